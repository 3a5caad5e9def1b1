"""Bytes that move when allocations change, over 200 seeded transitions between random plans on 1 to 64 GPUs.

Three yardsticks. The floor: everything that the new ranks need, less the smaller of what each rank could keep on its
best GPU and what each GPU could keep of its best rank; no order of ranks can beat it. The optimum: the best of all
orders by the linear programme of the assignment problem on HiGHS, so not by the code that is measured. Rank order: the
ranks on the GPUs as a launcher lists them. Orders that keep together who was together are what is measured; `any
order` may tear tensor groups apart and is shown for comparison.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from statistics import median, quantiles
from time import perf_counter

import numpy as np
from scipy.optimize import linprog  # type: ignore[import-untyped]  # scipy ships no types
from scipy.sparse import eye_array, kron, vstack  # type: ignore[import-untyped]  # scipy ships no types

from scheduler.resharding.mapping import Mapping, rank_mapping
from scheduler.resharding.overlap import overlap
from scheduler.resharding.placement import Placement
from scheduler.resharding.tensors import Split, TensorFacts, layer_tensors
from tests.builders_resharding import Transition, a_transition

TRANSITIONS = 200
EXPERTS = 16


@dataclass(frozen=True, slots=True)
class Case:
    transition: Transition
    tensors: tuple[TensorFacts, ...]
    mapping: Mapping
    loose: Mapping
    optimum_bytes: float
    taken_s: float


def rows() -> list[tuple[str, str, str]]:
    """Ratios over those transitions of which the yardstick moves anything, and how many others moved nothing either."""
    cases = [_case(seed) for seed in range(TRANSITIONS)]
    shrinks = [case for case in cases if case.transition.shrinks]
    times_ms = sorted(case.taken_s * 1e3 for case in cases)
    took = f"median {median(times_ms):.1f} ms, p99 {quantiles(times_ms, n=100)[98]:.1f} ms, worst {times_ms[-1]:.1f} ms"
    return [
        ("moved over the floor", "at most 1.05", _over(cases, lambda case: case.mapping.floor_bytes)),
        ("moved over the optimum of all orders", "at most 1.05", _over(cases, lambda case: case.optimum_bytes)),
        ("any order: moved over the floor", "", _over(cases, lambda case: case.mapping.floor_bytes, loose=True)),
        ("any order: moved over the optimum", "1", _over(cases, lambda case: case.optimum_bytes, loose=True)),
        ("saved against rank order, shrinks", "median 40%", _saved(shrinks)),
        ("saved against rank order, shrinks, any order", "", _saved(shrinks, loose=True)),
        ("saved against rank order, all", "", _saved(cases)),
        ("time of one mapping, overlap included", "", took),
    ]


def _case(seed: int) -> Case:
    seeded = random.Random(f"resharding {seed}")
    layers = seeded.choice([12, 24, 32, 48, 64, 80, 96])
    experts = EXPERTS if seeded.random() < 0.25 else 0
    transition = a_transition(seeded, layers, experts=experts)
    tensors = _tensors(seeded, layers, experts)
    old = Placement(transition.old_plan, transition.old_seats)
    begin_s = perf_counter()
    mapping = rank_mapping(old, transition.new_plan, transition.new_seats, tensors)
    taken_s = perf_counter() - begin_s
    loose = rank_mapping(old, transition.new_plan, transition.new_seats, tensors, any_order=True)
    return Case(transition, tensors, mapping, loose, _optimum_bytes(old, transition, tensors), taken_s)


def _tensors(seeded: random.Random, layers: int, experts: int) -> tuple[TensorFacts, ...]:
    """Layers of about 1 GB with larger ends; with experts, a stack of them in each layer beside the dense part."""
    sizes = [1e9] * layers
    sizes[0], sizes[-1] = 1e9 * seeded.uniform(1, 4), 1e9 * seeded.uniform(1, 4)
    stacks = (
        TensorFacts(f"experts {layer} {split}", layer, (4096, 4096), 12.0, split, experts)
        for layer in range(layers if experts else 0)
        for split in (Split.ROWS, Split.COLUMNS)
    )
    return (*layer_tensors(sizes), *stacks)


def _optimum_bytes(old: Placement, transition: Transition, tensors: tuple[TensorFacts, ...]) -> float:
    both, ranks = overlap(old, transition.new_plan, tensors), {seat: rank for rank, seat in enumerate(old.seats)}
    size = len(transition.new_seats)
    kept = np.zeros((size, size))
    for column, seat in enumerate(transition.new_seats):
        if seat in ranks:
            kept[:, column] = both.by_rank[:, ranks[seat]]
    one, all_ones = eye_array(size), np.ones((1, size))
    scale = kept.max() or 1.0
    once = vstack([kron(one, all_ones), kron(all_ones, one)])
    solved = linprog(-kept.ravel() / scale, A_eq=once, b_eq=np.ones(2 * size), method="highs")
    assert solved.success
    return float(both.needed.sum() + solved.fun * scale)


def _over(cases: list[Case], yardstick: Callable[[Case], float], *, loose: bool = False) -> str:
    ratios = list[float]()
    nothing = 0
    for case in cases:
        moved, least = (case.loose if loose else case.mapping).moved_bytes, yardstick(case)
        if least > 1.0:
            ratios.append(moved / least)
        elif moved > 1.0:
            ratios.append(inf)
        else:
            nothing += 1
    above = sum(ratio > 1.05 for ratio in ratios)
    told = f"median {median(ratios):.4f}, p99 {quantiles(ratios, n=100)[98]:.4f}, worst {max(ratios):.4f}"
    return f"{told}; {above} of {len(ratios)} above 1.05; {nothing} move nothing"


def _saved(cases: list[Case], *, loose: bool = False) -> str:
    pairs = [((case.loose if loose else case.mapping).moved_bytes, case.mapping.moved_bytes_in_order) for case in cases]
    saved = [1 - moved / in_order for moved, in_order in pairs if in_order > 0]
    total = 1 - sum(moved for moved, _ in pairs) / sum(in_order for _, in_order in pairs)
    return f"median {median(saved):.1%} fewer ({len(saved)} transitions), {total:.1%} of all bytes"
