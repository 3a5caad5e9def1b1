"""Instance: the optimization of one pipeline as plain arrays, independent of any cost model.

An instance fixes everything except the cuts, the order of the groups, and each layer's strategy. The search and the
baselines use this form: arrays in, integers (`Solution`) out.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import inf
from operator import le

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class StageCosts:
    """Costs of layers on a stage of one width, on GPUs of one model, at one number of micro-batches.

    Shapes, for T layer types, S strategies and K layouts (how the tensor between two layers lies on the GPUs):

        layouts        [S]        layout of each strategy
        time_s         [T, S]     one micro-batch through one layer, forward and backward
        state_bytes    [T, S]     of one layer, on one GPU, for the whole of training
        kept_bytes     [T, S]     activations of one layer and one micro-batch in flight
        working_bytes  [S]        buffer of a stage that uses the strategy; a stage needs the largest of its strategies'
        reshard_s      [T, K, K]  after a layer, from its layout to the next layer's, within a stage
        border_s       [T, S]     gathering at the first and the last layer of a stage that has a neighbor there
        host_bytes     [T, S]     of one layer in host memory, for one GPU; None if the host sets no limit
        host_kept_bytes [T, S]    the same for each micro-batch in flight; None if there is nothing
    """

    layouts: Ints
    time_s: Floats
    state_bytes: Ints
    kept_bytes: Ints
    working_bytes: Ints
    reshard_s: Floats
    border_s: Floats
    host_bytes: Ints | None = None
    host_kept_bytes: Ints | None = None

    @property
    def strategies(self) -> int:
        return len(self.layouts)

    def compute_memory_bytes(self, in_flight: float) -> Ints:
        """Return [T, S]: memory of one layer with the activations of `in_flight` micro-batches, rounded up."""
        kept = self.kept_bytes * in_flight
        return np.asarray(self.state_bytes + np.ceil(kept).astype(np.int64))

    def compute_host_bytes(self, in_flight: float) -> Ints | None:
        """Return [T, S]: the same in the memory of the host; None if the host sets no limit."""
        if self.host_bytes is None or self.host_kept_bytes is None:
            return self.host_bytes
        return np.asarray(self.host_bytes + np.ceil(self.host_kept_bytes * in_flight).astype(np.int64))

    def select_strategies(self, strategies: Ints) -> StageCosts:
        """Return the costs of only these strategies, in this order; layouts keep their numbers."""
        return StageCosts(
            layouts=self.layouts[strategies],
            time_s=self.time_s[:, strategies],
            state_bytes=self.state_bytes[:, strategies],
            kept_bytes=self.kept_bytes[:, strategies],
            working_bytes=self.working_bytes[strategies],
            reshard_s=self.reshard_s,
            border_s=self.border_s[:, strategies],
            host_bytes=None if self.host_bytes is None else self.host_bytes[:, strategies],
            host_kept_bytes=None if self.host_kept_bytes is None else self.host_kept_bytes[:, strategies],
        )


@dataclass(frozen=True, slots=True)
class Objective:
    """Time of an iteration of c micro-batches from the loads of devices and links, with v chunks per device:

        sum(loads) / v + (c - 1 / v) x max(loads)

    v = 1 is UniAP's objective (CVPR'25, section 3); the bubble shrinks by v (Narayanan et al., SC'21, section 2.2).
    """

    micro_batches: int
    interleave: int = 1

    @property
    def sum_weight(self) -> float:
        return 1.0 / self.interleave

    @property
    def max_weight(self) -> float:
        return self.micro_batches - self.sum_weight

    def compute_time_s(self, sum_s: float, largest_s: float) -> float:
        if sum_s == inf:
            return inf  # Avoids 0 x inf: one micro-batch has max_weight 0.
        return self.sum_weight * sum_s + self.max_weight * largest_s

    def compute_largest_s(self, sum_s: float, time_s: float) -> float:
        """Return the largest load with which an iteration of this sum of loads takes `time_s`."""
        return (time_s - self.sum_weight * sum_s) / self.max_weight if self.max_weight else inf


@dataclass(frozen=True, slots=True, eq=False)
class Instance:
    """A pipeline of P devices over a chain of L layers.

    `types` [L] is the type of each layer. Group g provides `counts[g]` devices with `costs[g]`, `capacity_bytes[g]` on
    each GPU and `host_capacity_bytes[g]` on the host for it; the latter is empty if no host sets a limit. The device at
    position i (from 0) holds `in_flight[i]` micro-batches at its peak.

    `hand_over_s` [P-1, G, G, L+1] is the time at cut i, from a device of one group to one of another, if the next stage
    begins with layer a; infinite for a = 0 and a = L.

    `borders` fixes the cuts and keeps the groups in the listed order; if empty, both are free. `stage_layers` above 0
    is the number of layers of every chunk, and leaves the order of the groups free.

    `interleave` 1 gives each device one run of layers. With v > 1 (interleaved 1F1B) `borders` cuts the layers into P x
    v chunks, and device i holds the chunks i, P + i, 2P + i, ... There is then only one group, and hand_over_s [P, ...]
    has one more row, from the last device back to the first.

    Devices and the links between them each have a load per micro-batch, which `objective` combines.
    """

    types: Ints
    costs: tuple[StageCosts, ...]
    counts: tuple[int, ...]
    capacity_bytes: tuple[int, ...]
    in_flight: tuple[float, ...]
    hand_over_s: Floats
    micro_batches: int
    interleave: int = 1
    borders: tuple[int, ...] = ()
    stage_layers: int = 0
    host_capacity_bytes: tuple[int, ...] = ()

    @property
    def layers(self) -> int:
        return len(self.types)

    @property
    def devices(self) -> int:
        return sum(self.counts)

    @property
    def objective(self) -> Objective:
        return Objective(self.micro_batches, self.interleave)


@dataclass(frozen=True, slots=True)
class Solution:
    """The integers that determine a solution of an instance.

    Attributes:
        order: group of each device, by position.
        borders: 0 = b0 < b1 < ... = L; chunk k holds the layers b(k) to b(k+1) - 1, on device k mod P.
        choice: strategy of each layer, as an index into the costs of its device's group.
    """

    order: tuple[int, ...]
    borders: tuple[int, ...]
    choice: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SolutionCost:
    """The objective of a solution, each device's load and memory, and each link's load.

    `fits` also considers the hosts, of which `host_bytes` are used per GPU.
    """

    time_s: float
    devices_s: tuple[float, ...]
    links_s: tuple[float, ...]
    memory_bytes: tuple[int, ...]
    host_bytes: tuple[int, ...]
    fits: bool


def evaluate_solution(instance: Instance, solution: Solution) -> SolutionCost:
    """Return the cost of a solution, added up term by term from the arrays alone."""
    devices_s = [0.0] * instance.devices
    memory = [0] * instance.devices
    working = [0] * instance.devices
    host = [0] * instance.devices
    chunks = list(pairwise(solution.borders))
    for number, (first, end) in enumerate(chunks):
        device = number % instance.devices
        costs = instance.costs[solution.order[device]]
        devices_s[device] += _compute_chunk_s(instance, costs, solution.choice, first, end)
        needs = costs.compute_memory_bytes(instance.in_flight[device])
        on_host = costs.compute_host_bytes(instance.in_flight[device])
        for layer in range(first, end):
            memory[device] += int(needs[instance.types[layer], solution.choice[layer]])
            working[device] = max(working[device], int(costs.working_bytes[solution.choice[layer]]))
            if on_host is not None:
                host[device] += int(on_host[instance.types[layer], solution.choice[layer]])
    totals = tuple(map(sum, zip(memory, working, strict=True)))
    links_s = _compute_link_loads_s(instance, solution)
    loads_s = (*devices_s, *links_s)
    limits = (instance.capacity_bytes[group] for group in solution.order)
    host_limits = (instance.host_capacity_bytes[group] for group in solution.order if instance.host_capacity_bytes)
    return SolutionCost(
        time_s=instance.objective.compute_time_s(sum(loads_s), max(loads_s)),
        devices_s=tuple(devices_s),
        links_s=links_s,
        memory_bytes=totals,
        host_bytes=tuple(host),
        fits=all(map(le, totals, limits)) and all(map(le, host, host_limits)),
    )


def _compute_chunk_s(instance: Instance, costs: StageCosts, choice: tuple[int, ...], first: int, end: int) -> float:
    time_s = sum(float(costs.time_s[instance.types[u], choice[u]]) for u in range(first, end))
    for u in range(first, end - 1):
        time_s += float(costs.reshard_s[instance.types[u], costs.layouts[choice[u]], costs.layouts[choice[u + 1]]])
    if first > 0:
        time_s += float(costs.border_s[instance.types[first], choice[first]])
    if end < instance.layers:
        time_s += float(costs.border_s[instance.types[end - 1], choice[end - 1]])
    return time_s


def _compute_link_loads_s(instance: Instance, solution: Solution) -> tuple[float, ...]:
    """Return the load of each link; in an interleaved pipeline the last link leads back to the first device."""
    devices = instance.devices
    loads_s = [0.0] * len(instance.hand_over_s)
    for number, border in enumerate(solution.borders[1:-1]):
        sender, receiver = number % devices, (number + 1) % devices
        loads_s[sender] += float(instance.hand_over_s[sender, solution.order[sender], solution.order[receiver], border])
    return tuple(loads_s)
