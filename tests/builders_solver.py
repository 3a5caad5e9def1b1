"""Random instances for tests and benchmarks of the solver, and brute force over tiny ones."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, pairwise, permutations, product
from math import inf
from typing import Any

import numpy as np

from scheduler.solver.instance import Floats, Instance, Solution, StageCosts, evaluate_solution

LAYER: dict[str, Any] = {
    "layers": 2,
    "flops_per_sample": 1e9,
    "parameters": 1000,
    "activation_bytes_per_sample": 4000,
    "replicated_activation_bytes_per_sample": 0,
    "boundary_bytes_per_sample": 500,
    "heads": 8,
}
"""A run of layers in a model profile."""


@dataclass(frozen=True, slots=True)
class BruteForce:
    """The least time over all solutions that fit, a solution with it, and the least time with unlimited memory."""

    time_s: float
    solution: Solution | None
    unlimited_s: float

    @property
    def binding(self) -> bool:
        return self.time_s > self.unlimited_s


def brute_force(instance: Instance) -> BruteForce:
    """Evaluate every solution."""
    best_s, best, unlimited_s = inf, None, inf
    for solution in enumerate_solutions(instance):
        found = evaluate_solution(instance, solution)
        unlimited_s = min(unlimited_s, found.time_s)
        if found.fits and found.time_s < best_s:
            best_s, best = found.time_s, solution
    return BruteForce(best_s, best, unlimited_s)


def enumerate_solutions(instance: Instance) -> Iterator[Solution]:
    """Yield all orders, cuts and choices, whether they fit or not."""
    devices, listed = instance.devices, [group for group, count in enumerate(instance.counts) for _ in range(count)]
    free = combinations(range(1, instance.layers), devices * instance.interleave - 1)
    orders = [tuple(listed)] if instance.borders else sorted(set(permutations(listed)))
    for order, inner in product(orders, [instance.borders[1:-1]] if instance.borders else free):
        borders = (0, *inner, instance.layers)
        groups = [order[number % devices] for number, size in enumerate(np.diff(borders)) for _ in range(size)]
        for choice in product(*(range(instance.costs[group].strategies) for group in groups)):
            yield Solution(order, borders, choice)


def is_uneven_or_mixed(solution: Solution) -> bool:
    """Return whether chunks have different lengths, or a chunk has more than one strategy."""
    chunks = [solution.choice[first:end] for first, end in pairwise(solution.borders)]
    return len(set(map(len, chunks))) > 1 or any(len(set(chunk)) > 1 for chunk in chunks)


def a_tiny_instance(rng: random.Random, *, groups: int = 1, interleave: int = 1, pinned: bool = False) -> Instance:
    """Return an instance of 2 to 5 layers on 1 to 3 devices.

    Costs have no physical meaning and contain ties and zeros, so that no shortcut of a search holds by luck. Memory
    limits lie between the needs of the leanest and the fastest solution.
    """
    devices = groups if groups > 1 else rng.randint(1, 2 if interleave > 1 else 3)
    layers = rng.randint(devices * interleave, max(5 if groups == 1 else 4, devices * interleave))
    kinds = rng.randint(1, layers)
    free = Instance(
        types=np.array([rng.randrange(kinds) for _ in range(layers)]),
        costs=tuple(_tiny_costs(rng, kinds, 2 if layers > 4 else rng.randint(1, 3)) for _ in range(groups)),
        counts=tuple([1] * groups if groups > 1 else [devices]),
        capacity_bytes=(10**9,) * groups,
        in_flight=tuple(rng.choice([float(devices - at), 1.0, 1.5]) for at in range(devices)),
        hand_over_s=_tiny_links(rng, devices if interleave > 1 else devices - 1, groups, layers),
        micro_batches=rng.choice([1, 2, 3, 8]),
        interleave=interleave,
    )
    if pinned:
        inner = sorted(rng.sample(range(1, layers), devices * interleave - 1))
        free = replace(free, borders=(0, *inner, layers))
    return _limited(rng, free)


def _tiny_costs(rng: random.Random, kinds: int, strategies: int) -> StageCosts:
    layouts = rng.randint(1, strategies)
    return StageCosts(
        layouts=np.array([rng.randrange(layouts) for _ in range(strategies)]),
        time_s=_drawn(rng, (kinds, strategies), [0.5, 1.0, 1.0, 1.7, 2.3, 4.0]),
        state_bytes=_drawn(rng, (kinds, strategies), [10, 25, 40, 77]).astype(np.int64),
        kept_bytes=_drawn(rng, (kinds, strategies), [0, 5, 13, 31]).astype(np.int64),
        working_bytes=_drawn(rng, (strategies,), [0, 8, 20]).astype(np.int64),
        reshard_s=_drawn(rng, (kinds, layouts, layouts), [0.0, 0.1, 0.6]),
        border_s=_drawn(rng, (kinds, strategies), [0.0, 0.0, 0.3]),
    )


def _tiny_links(rng: random.Random, links: int, groups: int, layers: int) -> Floats:
    hand_over_s = _drawn(rng, (links, groups, groups, layers + 1), [0.0, 0.2, 0.5, 3.0])
    hand_over_s[..., [0, layers]] = inf
    return hand_over_s


def _drawn(rng: random.Random, shape: tuple[int, ...], values: list[float]) -> Floats:
    return np.array([rng.choice(values) for _ in range(int(np.prod(shape)))], dtype=np.float64).reshape(shape)


def _limited(rng: random.Random, free: Instance) -> Instance:
    """Return the instance with limits between the largest need of the leanest solution and that of the fastest one."""
    priced = [evaluate_solution(free, solution) for solution in enumerate_solutions(free)]
    fastest = max(min(priced, key=lambda plan: plan.time_s).memory_bytes)
    leanest = min(max(plan.memory_bytes) for plan in priced)
    limits = (round(leanest + (fastest - leanest) * rng.uniform(-0.05, 1.05)) for _ in free.counts)
    return replace(free, capacity_bytes=tuple(max(limit, 1) for limit in limits))
