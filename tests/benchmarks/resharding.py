"""Bytes moved when allocations change, over 200 seeded transitions on 1 to 64 GPUs in nodes of 8.

Transitions are between solver plans of shipped models, between unrelated random plans, and between plans that differ
only in data parallelism on whole nodes. The GPUs that a job keeps are random: whole nodes, or part of one node. Three
references:

* lower bound: all data that the new ranks need, minus the smaller of two sums: what each rank could keep on its best
  GPU, and what each GPU could keep of its best rank. No order of ranks beats it, and not always does one reach it.
* optimum: the best of all orders, from a linear assignment solved by HiGHS, independent of the code under test. It
  includes orders that split tensor groups.
* rank order: ranks on GPUs in launcher order. Only bytes above the lower bound can be saved.

The measured code keeps groups together, except in the rows `any order`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median, quantiles
from time import perf_counter

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import eye_array, kron, vstack

from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan
from scheduler.domain.scaling_curve import CurveRequest
from scheduler.resharding.placement import Placement, TensorSpec, TensorSplit, build_layer_tensors
from scheduler.resharding.rank_mapping import RankMapping, map_ranks
from scheduler.resharding.shards import compute_overlap
from scheduler.solver.curve import list_canonical_shapes, solve_curve
from scheduler.solver.profiles.catalog import load_model
from scheduler.solver.profiles.model_profile import ModelProfile
from tests.builders_resharding import NODE_GPUS, Transition, a_move, a_plan, a_transition

TRANSITIONS = 200
EXPERTS = 16
MODELS = ("gpt2", "llama-2-7b", "llama-2-13b", "llama-2-70b", "mixtral-8x7b")
GPU = "a100-80g"
GLOBAL_BATCH = 64
STATE_BYTES = 12.0
"""Bytes per parameter with AdamW in fp32."""


@dataclass(frozen=True, slots=True)
class Case:
    transition: Transition
    mapping: RankMapping
    loose: RankMapping
    optimum_bytes: float
    taken_s: float


def rows() -> Iterator[tuple[str, str, str]]:
    """Ratios (infinite if only we move data), and the number of transitions without any move."""
    curves = [curve_of(name, GPU) for name in MODELS]
    yield from _rows("solver's plans", [_solved(seed, curves) for seed in range(TRANSITIONS)])
    yield from _rows("random plans", [_random(seed) for seed in range(TRANSITIONS)])
    yield from _rows("same degrees", [_rescale_transitions(seed) for seed in range(TRANSITIONS)])


def _rows(kind: str, cases: list[Case]) -> Iterator[tuple[str, str, str]]:
    shrinks = [case for case in cases if case.transition.shrinks]
    times_ms = sorted(case.taken_s * 1e3 for case in cases)
    took = f"median {median(times_ms):.1f} ms, p99 {quantiles(times_ms, n=100)[98]:.1f} ms, worst {times_ms[-1]:.1f} ms"
    yield f"{kind}: moved over the floor", "at most 1.05", _ratio_over(cases, lambda case: case.mapping.floor_bytes)
    yield f"{kind}: moved over the optimum", "at most 1.05", _ratio_over(cases, lambda case: case.optimum_bytes)
    yield (
        f"{kind}, any order: over the floor",
        "",
        _ratio_over(cases, lambda case: case.mapping.floor_bytes, loose=True),
    )
    yield f"{kind}, any order: over the optimum", "1", _ratio_over(cases, lambda case: case.optimum_bytes, loose=True)
    yield f"{kind}: saved against rank order, shrinks", "median 40%", _saved(shrinks)
    yield f"{kind}, any order: saved, shrinks", "", _saved(shrinks, loose=True)
    yield f"{kind}: saved of what could be saved, shrinks", "", _saved_share_of_avoidable(shrinks)
    yield f"{kind}: saved against rank order, all", "", _saved(cases)
    yield f"{kind}: time of one mapping with its overlap", "", took


def curve_of(name: str, gpu: str) -> tuple[ModelProfile, list[ParallelPlan]]:
    request = CurveRequest(model=name, profile_json="", global_batch=GLOBAL_BATCH, sequence_length=0)
    points = solve_curve(request, list_canonical_shapes(gpu, gpus_per_node=NODE_GPUS, gpus_max=64)).values()
    return load_model(name), [point for point in points if isinstance(point, ParallelPlan)]


def _solved(seed: int, curves: Sequence[tuple[ModelProfile, list[ParallelPlan]]]) -> Case:
    seeded = random.Random(f"resharding, solved {seed}")
    model, plans = seeded.choice(curves)
    return _case(a_move(seeded, *seeded.choices(plans, k=2)), state_tensors(model))


def state_tensors(model: ModelProfile) -> tuple[TensorSpec, ...]:
    """Return the bytes of each layer; embedding and head belong to the first and last layer."""
    sizes = [float(run.parameters) for run in model.layers for _ in range(run.layers)]
    sizes[0] += model.embedding.parameters
    sizes[-1] += model.head.parameters
    return build_layer_tensors([STATE_BYTES * size for size in sizes])


def _random(seed: int) -> Case:
    seeded = random.Random(f"resharding {seed}")
    layers = seeded.choice([12, 24, 32, 48, 64, 80, 96])
    experts = EXPERTS if seeded.random() < 0.25 else 0
    return _case(a_transition(seeded, layers, experts=experts), _tensors(seeded, layers, experts))


def _rescale_transitions(seed: int) -> Case:
    """Return transitions from 1 to 8 nodes to another number, with equal pipeline, tensor degree and sharding."""
    seeded = random.Random(f"resharding, rescaled {seed}")
    layers, tp, devices = seeded.choice([12, 24, 32, 48, 96]), seeded.choice([1, 2, 4, 8]), seeded.choice([1, 2, 4])
    zero, hybrid = seeded.choice([(0, False), (3, False), (3, False), (3, True)])
    counts = seeded.sample([nodes for nodes in range(1, 9) if nodes * NODE_GPUS % (devices * tp) == 0], 2)
    plans = list[ParallelPlan]()
    for nodes in counts:
        dp = nodes * NODE_GPUS // (devices * tp)
        group = NODE_GPUS // tp if hybrid and dp % (NODE_GPUS // tp) == 0 else dp
        run = LayerStrategy(layers // devices, tp=tp, dp=dp, zero=zero, shard_group=group if zero else 1)
        plans.append(a_plan([[run]] * devices))
    return _case(a_move(seeded, *plans), build_layer_tensors([1e9] * layers))


def _case(transition: Transition, tensors: tuple[TensorSpec, ...]) -> Case:
    old = Placement(transition.old_plan, transition.old_slots)
    begin_s = perf_counter()
    mapping = map_ranks(old, transition.new_plan, transition.new_slots, tensors)
    taken_s = perf_counter() - begin_s
    loose = map_ranks(old, transition.new_plan, transition.new_slots, tensors, any_order=True)
    return Case(transition, mapping, loose, _optimum_bytes(old, transition, tensors), taken_s)


def _tensors(seeded: random.Random, layers: int, experts: int) -> tuple[TensorSpec, ...]:
    """Return layers of about 1 GB with larger ends; with experts, a stack of them per layer beside the dense part."""
    sizes = [1e9] * layers
    sizes[0], sizes[-1] = 1e9 * seeded.uniform(1, 4), 1e9 * seeded.uniform(1, 4)
    stacks = (
        TensorSpec(f"experts {layer} {split}", layer, (4096, 4096), 12.0, split, experts)
        for layer in range(layers if experts else 0)
        for split in (TensorSplit.ROWS, TensorSplit.COLUMNS)
    )
    return (*build_layer_tensors(sizes), *stacks)


def _optimum_bytes(old: Placement, transition: Transition, tensors: tuple[TensorSpec, ...]) -> float:
    both, ranks = (
        compute_overlap(old, transition.new_plan, tensors),
        {seat: rank for rank, seat in enumerate(old.slots)},
    )
    size = len(transition.new_slots)
    kept = np.zeros((size, size))
    for column, seat in enumerate(transition.new_slots):
        if seat in ranks:
            kept[:, column] = both.by_rank[:, ranks[seat]]
    one, all_ones = eye_array(size), np.ones((1, size))
    scale = kept.max() or 1.0
    once = vstack([kron(one, all_ones), kron(all_ones, one)])
    solved = linprog(-kept.ravel() / scale, A_eq=once, b_eq=np.ones(2 * size), method="highs")
    assert solved.success, solved.message
    return float(both.needed.sum() - kept.ravel()[solved.x > 0.5].sum())  # its corners are whole assignments


def _ratio_over(cases: list[Case], yardstick: Callable[[Case], float], *, loose: bool = False) -> str:
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


def _saved_share_of_avoidable(cases: list[Case]) -> str:
    found = (case.mapping for case in cases)
    saved = [
        (one.moved_bytes_in_order - one.moved_bytes) / (one.moved_bytes_in_order - one.floor_bytes)
        for one in found
        if one.moved_bytes_in_order > 1.0001 * one.floor_bytes
    ]
    return f"median {median(saved):.1%} ({len(saved)} of {len(cases)} transitions have any)"
