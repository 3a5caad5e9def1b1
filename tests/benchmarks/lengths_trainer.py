"""Steps of the reference trainer on four ranks: planned sequence-parallel groups against one degree for all sequences.

Costs are measured on the ranks. A rank holds as many tokens as half of the longest sequence, or a quarter of it, as if
its memory were that small, so that one degree for all must be at least 2 or 4. `main(FOLDER, RANK, RANKS)` is the
program of a rank and writes seconds to `FOLDER/found-RANK.json`.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import median

import torch
from torch import Tensor, distributed

from scheduler.solver.lengths.batch_plan import BatchPlan
from scheduler.solver.lengths.batch_search import search_batch_plan
from scheduler.solver.lengths.sequence_costs import SequenceCosts
from scheduler.solver.lengths.uniform_search import search_uniform_plan
from scheduler.trainer.model import Gpt, GptSize, build_gpt
from scheduler.trainer.sequence_groups import SequenceGroups, list_degrees, run_micro_batches, sum_gradients
from scheduler.trainer.sequence_timing import measure_sequence_costs
from tests.e2e.rank_launcher import launch_ranks
from tests.e2e.rank_programs import run_on_ranks

Row = tuple[str, str, str]

RANKS = 4
SIZE = GptSize(layers=4, hidden=128, heads=4, vocabulary=256, sequence=1024)
BATCH, ROUNDS = 24, 7
RANK_TOKENS = (512, 256)


def rows() -> list[Row]:
    """Return (name, target, value)."""
    with tempfile.TemporaryDirectory() as folder, launch_ranks(Path(folder) / "agent") as launcher:
        found: list[dict[str, dict[str, float]]] = run_on_ranks(
            launcher, "tests.benchmarks.lengths_trainer", Path(folder) / "ranks", ranks=RANKS
        )
    table = list[Row]()
    for tokens, seconds in found[0].items():
        best_s = min(taken_s for name, taken_s in seconds.items() if name != "planned")
        name = f"lengths on four ranks of {tokens} tokens"
        table.append((f"{name}: best degree over planned groups, times", "1.05", f"{best_s / seconds['planned']:.2f}"))
        table.append((f"{name}: planned groups, s", "", f"{seconds['planned']:.2f}"))
    return table


def main(folder: Path, rank: int, ranks: int) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=ranks)
    model, degrees = build_gpt(SIZE, seed=0, dtype=torch.float32), list_degrees(ranks, heads=SIZE.heads)
    groups, sequences = SequenceGroups(degrees), draw_sequences()
    batch_tokens = BATCH * SIZE.sequence
    costs = measure_sequence_costs(model, groups, degrees=degrees, tokens=SIZE.sequence, batch_tokens=batch_tokens)
    found = {tokens: compare(model, groups, replace(costs, gpu_tokens_max=tokens), sequences) for tokens in RANK_TOKENS}
    (folder / f"found-{rank}.json").write_text(json.dumps(found))
    distributed.barrier()


def draw_sequences() -> list[Tensor]:
    """Return sequences of which most are short and one is as long as the model allows."""
    random, generator = Random(1), torch.Generator().manual_seed(1)
    lengths = [SIZE.sequence, *(min(SIZE.sequence, int(random.lognormvariate(5, 1)) + 16) for _ in range(BATCH - 1))]
    return [torch.randint(256, (length + 1,), generator=generator) for length in lengths]


def compare(model: Gpt, groups: SequenceGroups, costs: SequenceCosts, sequences: list[Tensor]) -> Mapping[str, float]:
    """Return the median seconds of a step with each plan. The plans take turns."""
    lengths = [len(sequence) - 1 for sequence in sequences]
    plans = {"planned": search_batch_plan(costs, lengths)}
    for degree in costs.degrees:
        if plan := search_uniform_plan(costs, lengths, degree):
            plans[f"degree {degree}"] = plan
    taken_s: dict[str, list[float]] = {name: [] for name in plans}
    for _ in range(ROUNDS):
        for name, plan in plans.items():
            taken_s[name].append(_time_step(model, groups, plan, sequences))
    return {name: median(times[1:]) for name, times in taken_s.items()}


def _time_step(model: Gpt, groups: SequenceGroups, plan: BatchPlan, sequences: list[Tensor]) -> float:
    distributed.barrier()
    begin_s = time.perf_counter()
    run_micro_batches(model, groups, plan, sequences)
    sum_gradients(model)
    distributed.barrier()
    taken_s = time.perf_counter() - begin_s
    model.zero_grad(set_to_none=True)
    return taken_s
