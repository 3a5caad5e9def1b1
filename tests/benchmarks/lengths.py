"""Sequence-parallel groups for batches of unlike lengths: step time against single degrees, and time of the search.

Published constants (GPT-7B on 64 A100, FlexSP, arXiv 2412.01523), 200 batches of 512 lengths of Wikipedia articles,
capped at a context of 192K tokens. The folder in EBBTIDE_DATA must contain lengths/wikipedia_lengths.txt.gz
(PKU-DAIR/Hetu-Galvatron, branch FlexSP).
"""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from math import inf
from pathlib import Path
from statistics import mean, median
from time import perf_counter, process_time

from scheduler.solver.lengths.batch_plan import BatchPlan
from scheduler.solver.lengths.batch_search import search_batch_plan, sort_batch
from scheduler.solver.lengths.fluid_bound import compute_batch_bound
from scheduler.solver.lengths.sequence_costs import FLEXSP_GPT_7B_A100 as COSTS
from scheduler.solver.lengths.uniform_search import search_uniform_plan
from tests.benchmarks.reproduce import traces

Row = tuple[str, str, str]

LENGTHS = "lengths/wikipedia_lengths.txt.gz"
BATCH, BATCHES, CONTEXT = 512, 200, 192 * 1024


def rows() -> list[Row]:
    """Return (name, target, value). Searches are timed one by one after a warm-up, in wall and in processor time.

    Raises:
        FileNotFoundError: the lengths are missing.
    """
    batches = read_batches(traces(LENGTHS) / LENGTHS)
    search_batch_plan(COSTS, batches[0])
    plans, wall_ms, processor_ms = [], [], []
    for batch in batches:
        begin_s, begin_processor_s = perf_counter(), process_time()
        plans.append(search_batch_plan(COSTS, batch))
        wall_ms.append(1e3 * (perf_counter() - begin_s))
        processor_ms.append(1e3 * (process_time() - begin_processor_s))
    return [
        *_compare(plans, batches),
        ("lengths: search of a batch, ms", "100", _summarize(wall_ms)),
        ("lengths: search of a batch, ms of processor time", "100", _summarize(processor_ms)),
    ]


def _summarize(taken_ms: Sequence[float]) -> str:
    ordered = sorted(taken_ms)
    above = sum(taken > 100 for taken in ordered)
    spread = f"{mean(ordered):.0f} mean, {median(ordered):.0f} median, {ordered[-1]:.0f} worst"
    return f"{spread}, {above} of {len(ordered)} above 100"


def read_batches(file: Path) -> list[list[int]]:
    """Return the batches of the benchmark, in the order of the file."""
    with gzip.open(file, "rt") as lines:
        lengths = [min(int(line), CONTEXT) for line in lines]
    return [lengths[begin : begin + BATCH] for begin in range(0, BATCH * BATCHES, BATCH)]


def _compare(plans: Sequence[BatchPlan], batches: Sequence[list[int]]) -> list[Row]:
    """Return the rows about step times."""
    uniform = [[_compute_uniform_s(batch, degree) for degree in COSTS.degrees] for batch in batches]
    best_s = [min(times) for times in uniform]
    one_s = min(mean(times) for times in zip(*uniform, strict=True))
    planned_s, proven_s = mean(plan.time_s for plan in plans), mean(plan.bound_s for plan in plans)
    fluid_s = mean(compute_batch_bound(sort_batch(COSTS, batch)[1]) for batch in batches)
    slower = sum(plan.time_s > single_s * (1 + 1e-9) for plan, single_s in zip(plans, best_s, strict=True))
    return [
        ("lengths: mean step, s", "", f"{planned_s:.3f}"),
        ("lengths: over the proven bound of the multisets, %", "2", f"{100 * (planned_s / proven_s - 1):.2f}"),
        ("lengths: over the plain fluid bound, %", "", f"{100 * (planned_s / fluid_s - 1):.2f}"),
        ("lengths: largest proven gap of a batch, %", "", f"{100 * max(plan.optimality_gap for plan in plans):.1f}"),
        ("lengths: one degree for all batches, times as slow", "", f"{one_s / planned_s:.2f}"),
        ("lengths: best degree of each batch, times as slow", "1", f"{mean(best_s) / planned_s:.2f}"),
        ("lengths: batches slower than their best degree", "0", f"{slower}"),
    ]


def _compute_uniform_s(batch: list[int], degree: int) -> float:
    """Return the seconds of a step with groups of one degree, or infinity if a sequence does not fit."""
    plan = search_uniform_plan(COSTS, batch, degree)
    return inf if plan is None else plan.time_s


if __name__ == "__main__":
    for row in rows():
        print(" | ".join(row))
