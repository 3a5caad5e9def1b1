"""GPUs of the capacity model against a token-by-token simulation, and the padding of length classes.

The grid has three replicas, four mixes of lengths, rates from 0.5 to 500 requests/s, and Poisson and bursty arrivals.
The folder in EBBTIDE_DATA must contain lengths/wikipedia_lengths.txt.gz (PKU-DAIR/Hetu-Galvatron, branch FlexSP).
"""

from __future__ import annotations

import gzip
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from time import process_time

import numpy as np

from scheduler.documents.serving import LENGTHS_MAX
from scheduler.domain.serving import ReportedRequests, RequestLength, ServedModel
from scheduler.serving.capacity import size_pool
from scheduler.serving.length_classes import choose_length_classes, cut_batches
from scheduler.serving.request_mix import Floats
from scheduler.serving.served_models import size_requests
from tests.benchmarks.reproduce import traces
from tests.serving.capacity_comparison import GRID, Comparison, build_sizing, compare_cells
from tests.serving.length_mixes import MIXES, draw_lengths

Row = tuple[str, str, str]

SEED = 9_000
LENGTHS = "lengths/wikipedia_lengths.txt.gz"
CONTEXTS = (2_048, 4_096, 8_192, 196_608)
CLASSES, QUEUE, BATCH_TOKENS = 8, 512, 300
"""A batch costs as much as BATCH_TOKENS tokens besides its own, about the base of an iteration on an H100."""


def rows() -> Iterator[Row]:
    """Yield (name, target, value).

    Raises:
        FileNotFoundError: the lengths are missing.
    """
    begin_s = process_time()
    compared = list(compare_cells(GRID, SEED))
    yield from _summarize(compared)
    yield ("serving: CPU time of the comparison, s", "", f"{process_time() - begin_s:.0f}")
    yield from _measure_times()
    yield from _measure_padding(traces(LENGTHS) / LENGTHS)


def _measure_times() -> Iterator[Row]:
    """Yield CPU times of a size over the cells, and of a reading of requests in a service."""
    sizes_ms = [_time_ms(partial(size_pool, *build_sizing(cell, SEED))) for cell in GRID]
    yield ("serving: CPU time of a size, median of the cells, ms", "5", f"{median(sizes_ms):.1f}")
    rows = draw_lengths(np.random.default_rng(SEED), MIXES["chat"], LENGTHS_MAX).tolist()
    lengths = tuple(RequestLength(prompt, output) for prompt, output in rows)
    served = ServedModel("llama-3-8b", "h100-80g", 1.0, 0.03, lengths=lengths)
    rates = np.geomspace(5, 400, 60).tolist()
    size_requests(served, ReportedRequests(served.model, 1.0), 1.0)
    for name, target in (("a new rate: three sizes", ""), ("a known rate", "5")):
        times_ms = [
            _time_ms(partial(size_requests, served, ReportedRequests(served.model, rate), rate)) for rate in rates
        ]
        yield (f"serving: CPU time of a reading at {name}, median, ms", target, f"{median(times_ms):.2f}")


def _time_ms(call: Callable[[], object]) -> float:
    begin_s = process_time()
    call()
    return 1e3 * (process_time() - begin_s)


def _summarize(compared: Sequence[Comparison]) -> Iterator[Row]:
    within = np.mean([each.is_within for each in compared])
    within_one = np.mean([each.is_within_one for each in compared])
    too_few = [each for each in compared if each.model < each.referee]
    surplus = sum(each.model for each in compared) / sum(each.referee for each in compared) - 1
    yield ("serving: cells", "", f"{len(compared)}")
    yield ("serving: within 10%, % of cells", "", f"{100 * within:.1f}")
    yield ("serving: within 10% or one replica, % of cells", "100", f"{100 * within_one:.1f}")
    yield ("serving: too few GPUs, % of cells", "1", f"{100 * len(too_few) / len(compared):.1f}")
    yield ("serving: GPUs of all cells over those of the simulation, %", "10", f"{100 * surplus:.1f}")
    large = [each for each in compared if each.referee >= 10]
    worst = max(large, key=lambda each: abs(each.error))
    cell = f"{worst.cell.setup}, {worst.cell.mix}, {worst.cell.rate_per_s:g}/s, SCV {worst.cell.scv:g}"
    yield ("serving: worst with 10 replicas or more, %", "10", f"{100 * worst.error:+.1f} ({cell})")


def _measure_padding(file: Path) -> Iterator[Row]:
    with gzip.open(file, "rt") as lines:
        lengths = [int(line) for line in lines]
    for context in CONTEXTS:
        known, unseen = ([min(tokens, context) for tokens in lengths[part::2]] for part in (0, 1))
        found = choose_length_classes(Counter(known), CLASSES, longest=context)
        padded = sum(found.limits[bisect_left(found.limits, tokens)] for tokens in unseen)
        yield (
            f"serving: {CLASSES} classes up to {context} tokens, padded over unpadded (unseen)",
            "1.2",
            f"{found.padding_ratio:.3f} ({padded / sum(unseen):.3f})",
        )
    queue = [min(tokens, CONTEXTS[-1]) for tokens in lengths[:QUEUE]]
    batches = cut_batches(queue, _cost_of_batch)
    ratio = sum(len(batch) * batch[-1] for batch in batches) / sum(queue)
    yield (f"serving: length-aware batches of {QUEUE} requests, padded over unpadded", "1.2", f"{ratio:.3f}")


def _cost_of_batch(sizes: Floats, length: int) -> Floats:
    return BATCH_TOKENS + sizes * length


if __name__ == "__main__":
    for row in rows():
        print(" | ".join(row))
