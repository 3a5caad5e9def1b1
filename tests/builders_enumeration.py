"""Tiny random instances, and exhaustive enumeration of all choices of strategies at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, pairwise, permutations, product
from math import inf

import numpy as np
from numpy.typing import NDArray

from scheduler.solver.instance import Floats, Instance, Ints, Solution, StageCosts


@dataclass(frozen=True, slots=True, eq=False)
class PricedPartition:
    """All choices of strategies [N, L] under one order of the groups and one set of cuts.

    `loads_s` [N, P + links], `memory_bytes` [N, P], both by device; `time_s` [N] is the objective.
    """

    order: tuple[int, ...]
    borders: tuple[int, ...]
    choices: Ints
    loads_s: Floats
    memory_bytes: Ints
    time_s: Floats

    def solution(self, number: int) -> Solution:
        return Solution(self.order, self.borders, tuple(self.choices[number].tolist()))

    def fitting(self, capacity_bytes: tuple[int, ...]) -> NDArray[np.bool_]:
        """Return [N]: whether every device keeps within the capacity of its group."""
        return np.asarray((self.memory_bytes <= np.array(capacity_bytes)[list(self.order)]).all(axis=1))


def enumerate_partitions(instance: Instance) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield every order of the groups with every set of borders."""
    listed = [group for group, count in enumerate(instance.counts) for _ in range(count)]
    if instance.borders:
        yield tuple(listed), instance.borders
        return
    inner = list(combinations(range(1, instance.layers), instance.devices - 1))
    for order, cuts in product(sorted(set(permutations(listed))), inner):
        yield order, (0, *cuts, instance.layers)


def price_partitions(instance: Instance) -> Iterator[PricedPartition]:
    """Yield every solution, whether it fits or not, by partition."""
    for order, borders in enumerate_partitions(instance):
        yield _priced(instance, order, borders)


def _priced(instance: Instance, order: tuple[int, ...], borders: tuple[int, ...]) -> PricedPartition:
    devices, chunks = instance.devices, list(pairwise(borders))
    held = [order[number % devices] for number, (first, end) in enumerate(chunks) for _ in range(first, end)]
    sizes = [instance.costs[group].strategies for group in held]
    choices: Ints = np.indices(sizes).reshape(instance.layers, -1).T
    loads_s = np.zeros((len(choices), devices + len(instance.hand_over_s)))
    memory = np.zeros((len(choices), devices), dtype=np.int64)
    working = np.zeros_like(memory)
    for number, (first, end) in enumerate(chunks):
        at, following = number % devices, (number + 1) % devices
        costs, kinds, picked = instance.costs[order[at]], instance.types[first:end], choices[:, first:end]
        ways = costs.layouts[picked]
        loads_s[:, at] += costs.time_s[kinds, picked].sum(axis=1)
        loads_s[:, at] += costs.reshard_s[kinds[:-1], ways[:, :-1], ways[:, 1:]].sum(axis=1)
        if first > 0:
            loads_s[:, at] += costs.border_s[kinds[0], picked[:, 0]]
        if end < instance.layers:
            loads_s[:, at] += costs.border_s[kinds[-1], picked[:, -1]]
            loads_s[:, devices + at] += instance.hand_over_s[at, order[at], order[following], end]
        kept = np.ceil(costs.kept_bytes * instance.in_flight[at]).astype(np.int64)
        memory[:, at] += (costs.state_bytes + kept)[kinds, picked].sum(axis=1)
        working[:, at] = np.maximum(working[:, at], costs.working_bytes[picked].max(axis=1))
    rounds = instance.micro_batches - 1 / instance.interleave
    time_s = loads_s.sum(axis=1) / instance.interleave + rounds * loads_s.max(axis=1)
    return PricedPartition(order, borders, choices, loads_s, memory + working, time_s)


def random_instance(generator: np.random.Generator, counts: tuple[int, ...] = ()) -> Instance:
    """Return an instance of 2 to 5 layers on 1 to 3 devices with unlimited memory; half of them have many ties.

    With `counts`, it has these devices of each group instead, and at least as many layers.
    """
    layers = int(generator.integers(max(2, sum(counts)), 6))
    kinds = int(generator.integers(1, layers + 1))
    if not counts:
        counts = (int(generator.integers(1, min(layers, 3) + 1)),)
        if generator.random() < 0.15:
            counts = (1, int(generator.integers(1, min(layers - 1, 2) + 1)))
    devices, rounds = sum(counts), int(generator.integers(1, 7))
    chunks = 2 if len(counts) == 1 and layers >= 2 * devices and generator.random() < 0.3 else 1
    inner = generator.choice(np.arange(1, layers), devices * chunks - 1, replace=False)
    links = devices if chunks > 1 else devices - 1
    coarse = generator.random() < 0.5
    hand_over_s = np.full((links, len(counts), len(counts), layers + 1), inf)
    hand_over_s[..., 1:-1] = _drawn(generator, 0, 1.5, (*hand_over_s.shape[:-1], layers - 1), coarse)
    return Instance(
        types=generator.integers(0, kinds, layers),
        costs=tuple(_costs(generator, kinds, coarse) for _ in counts),
        counts=counts,
        capacity_bytes=(10**9,) * len(counts),
        in_flight=tuple(float(generator.choice([min(rounds, devices - at), 1.5, 3, 1])) for at in range(devices)),
        hand_over_s=hand_over_s,
        micro_batches=rounds,
        interleave=chunks,
        borders=(0, *sorted(inner.tolist()), layers) if chunks > 1 else (),
    )


def _costs(generator: np.random.Generator, kinds: int, coarse: bool) -> StageCosts:
    strategies, layouts = int(generator.integers(1, 4)), int(generator.integers(1, 3))
    shape = (kinds, strategies)
    return StageCosts(
        layouts=generator.integers(0, layouts, strategies),
        time_s=_drawn(generator, 1, 3, (kinds, 1), coarse) * _drawn(generator, 0.8, 1.6, shape, coarse),
        state_bytes=generator.integers(10, 60, shape),
        kept_bytes=generator.integers(0, 40, shape),
        working_bytes=generator.integers(0, 30, strategies),
        reshard_s=_drawn(generator, 0, 0.5, (kinds, layouts, layouts), coarse) * (1 - np.eye(layouts)),
        border_s=_drawn(generator, 0, 0.2, shape, coarse),
    )


def _drawn(generator: np.random.Generator, low: float, high: float, shape: tuple[int, ...], coarse: bool) -> Floats:
    drawn = generator.uniform(low, high, shape)
    return np.round(drawn, 1) if coarse else drawn
