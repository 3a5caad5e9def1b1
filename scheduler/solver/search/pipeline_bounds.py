"""Lower bounds of the time of a pipeline that need neither cuts nor an order of its groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, inf, log2

import numpy as np
from numpy.typing import NDArray

from scheduler.solver.instance import Floats, Objective
from scheduler.solver.search.stage_bounds import WindowEnds
from scheduler.solver.search.stage_oracle import StageOracle

_LEAST_S = 1e-300
"""Stands for a time of zero where it is divided by."""

_NO_STAGE = -(10**6)
"""Layers that a device holds on which no stage fits: the layers of other devices never make up for it."""

_ANY_LOAD_S = float(np.finfo(np.float64).max)
"""A load that permits all stages that fit."""

_GRID = np.linspace(0.0, 1.0, 32)
"""Positions of loads that are tried at once, between one that is too small and one that may do."""

_GRID_FACTORS = np.concatenate([np.geomspace(1.0, 2.0, 20), np.geomspace(2.2, 200.0, 12)])
"""Loads that are tried at first, as multiples of the load without memory limits. A slow GPU can make it many times."""

_TRADE_OFFS = np.linspace(1.0, 1.06, 25)
"""Largest loads that are weighed against the sum of all loads, as multiples of the least one."""


@dataclass(frozen=True, slots=True, eq=False)
class PipelineOutline:
    """The devices of a pipeline, as in `Instance`; group g has the stages of `oracles[g]`.

    The bounds by capacity and length are those of several devices, each with one micro-batch in flight or more.
    """

    oracles: tuple[StageOracle, ...]
    counts: tuple[int, ...]
    in_flight: tuple[float, ...]
    objective: Objective
    has_fixed_cuts: bool = False

    def compute_balanced_bound_s(self) -> float:
        """Return a bound with every layer at its fastest and perfect balance. It rules out most pipelines."""
        return self.objective.compute_time_s(*self._compute_balanced_loads_s())

    def compute_capacity_bound_s(self) -> float:
        """Return a bound that considers memory, as if each device held one micro-batch in flight.

        If no load is above w, then a device holds at most as many layers as its longest stage that takes w or less. The
        least w at which all devices hold all layers follows from one sorting of the times of stages by length.
        """
        layers = len(self.oracles[0].windows.types)
        depth = layers - len(self.in_flight) + 1
        times_s = np.stack([oracle.get_capacity_bounds_s()[:depth] for oracle in self.oracles])
        order = np.argsort(times_s, axis=None)
        held = np.cumsum(np.repeat(self.counts, times_s.shape[1])[order])
        largest_s = float(times_s.ravel()[order[np.searchsorted(held, layers)]])
        sum_s, least_s = self._compute_balanced_loads_s()
        largest_s = max(largest_s, float(times_s[:, 0].max()), least_s)
        return self.objective.compute_time_s(sum_s, largest_s) if largest_s < inf else inf

    def compute_length_bound_s(self) -> float:
        """Return a bound that considers memory and how many layers each device holds, but not which.

        If no load is above w, then a device at a position holds at most as many layers as the longest stage that takes
        w or less there. If these are fewer than all layers for every order of the groups, some load is above w.
        """
        sum_s, least_s = self._compute_balanced_loads_s()
        longest = _LongestStages.build(self)
        loads_s = np.append(least_s * _GRID_FACTORS, _ANY_LOAD_S)
        for _ in range(2):
            failed = np.flatnonzero(~longest.find_feasible(loads_s))
            if not len(failed):
                break
            least_s = float(loads_s[failed[-1]])
            if failed[-1] >= len(loads_s) - 2:
                break
            loads_s = least_s + _GRID * (loads_s[failed[-1] + 1] - least_s)
        if least_s == _ANY_LOAD_S:
            return inf
        # With the largest load between two neighbors, the sum is at least what the larger one permits.
        loads_s = least_s * _TRADE_OFFS
        sums_s = np.append(np.maximum(longest.compute_least_sums_s(loads_s[1:]), sum_s), sum_s)
        return min(map(self.objective.compute_time_s, sums_s.tolist(), loads_s.tolist()))

    def _compute_balanced_loads_s(self) -> tuple[float, float]:
        """Return lower bounds of the sum of all loads and of the largest, with every layer at its fastest.

        Each device holds a layer of its own, so a group's slower devices add what their layers take longer than
        elsewhere.
        """
        if len(self.oracles) == 1:
            total_s = float(self.oracles[0].fastest_s.sum())
            return total_s, total_s / self.counts[0]
        layers_s = np.stack([oracle.fastest_s for oracle in self.oracles])
        least_s = layers_s.min(axis=0)
        excess_s = np.sort(layers_s - least_s, axis=1)
        sum_s = least_s.sum() + sum(excess_s[group, :count].sum() for group, count in enumerate(self.counts))
        return float(sum_s), compute_bottleneck_bound_s(layers_s, self.counts)


@dataclass(frozen=True, slots=True, eq=False)
class _LongestStages:
    """Times of stages by their length, at B kinds of positions of a pipeline.

        sizes     [B]        positions of each kind
        counts    [G]        devices of each group
        times_s   [B, G, D]  least time of a stage of n + 1 layers or more

    Positions are of one kind if they are alike at the ends of the pipeline and in their micro-batches in flight,
    rounded down to a power of two: fewer of them never take longer.
    """

    sizes: NDArray[np.int64]
    counts: NDArray[np.int64]
    times_s: Floats
    layers: int

    @classmethod
    def build(cls, outline: PipelineOutline) -> _LongestStages:
        devices, layers = len(outline.in_flight), len(outline.oracles[0].windows.types)
        positions = Counter(
            (WindowEnds.of_position(position, devices), 2.0 ** floor(log2(in_flight)))
            for position, in_flight in enumerate(outline.in_flight)
        )
        times_s = [
            [oracle.get_length_bounds_s(in_flight)[ends, : layers - devices + 1] for oracle in outline.oracles]
            for ends, in_flight in positions
        ]
        return cls(np.array(list(positions.values())), np.array(outline.counts), np.array(times_s), layers)

    def find_feasible(self, loads_s: Floats) -> NDArray[np.bool_]:
        """Return [W]: whether the layers may fit if no device takes longer than each of `loads_s` [W].

        Any prices of a device of each group give a bound of the layers that fit (weak duality of the assignment of
        groups to positions). Those tried are the layers that a device of the group holds at some kind of position.
        """
        held = self._count_layers(loads_s)
        mean = np.tensordot(self.sizes, held, axes=1) / self.sizes.sum()
        held = np.where(held > 0, held, _NO_STAGE)
        prices = np.concatenate([held, mean[None]])[:, None]  # [C, 1, G, W]
        gains = (held - prices).max(axis=2)  # [C, B, W]
        most = np.tensordot(gains, self.sizes, axes=(1, 0)) + np.tensordot(prices[:, 0], self.counts, axes=(1, 0))
        return np.asarray((most >= self.layers - 0.5).all(axis=0))

    def compute_least_sums_s(self, loads_s: Floats) -> Floats:
        """Return [W]: a lower bound of the sum of all loads if none is above each of `loads_s` [W].

        Any price of a layer and of a device of each group gives a bound, as in `find_feasible`. The prices of a layer
        that are tried are its shares of a full device of each group.
        """
        held = self._count_layers(loads_s)
        shares_s = (
            loads_s.mean() * self.sizes.sum() / np.maximum(np.tensordot(self.sizes, held, axes=1).mean(axis=1), 1)
        )
        owed_s = self.times_s - shares_s[:, None, None, None] * np.arange(1, self.times_s.shape[-1] + 1)  # [M, B, G, D]
        least_s = np.minimum.accumulate(owed_s, axis=-1)
        least_s = np.take_along_axis(least_s, np.maximum(held - 1, 0)[None], axis=-1)  # [M, B, G, W]
        least_s = np.where(held > 0, least_s, inf)
        finite_s = np.where(held > 0, least_s, 0.0)
        mean_s = np.einsum("b,mbgw->mgw", self.sizes / self.sizes.sum(), finite_s)
        prices_s = -np.concatenate([finite_s, mean_s[:, None]], axis=1)  # [M, C, G, W]
        devices_s = (least_s[:, None] + prices_s[:, :, None]).min(axis=3)  # [M, C, B, W]
        sums_s = np.tensordot(devices_s, self.sizes, axes=(2, 0)) - np.tensordot(prices_s, self.counts, axes=(2, 0))
        return np.asarray((sums_s + self.layers * shares_s[:, None, None]).max(axis=(0, 1)))

    def _count_layers(self, loads_s: Floats) -> NDArray[np.int64]:
        """Return [B, G, W]: the most layers that a device holds within each load."""
        return np.asarray((self.times_s[:, :, None, :] <= loads_s[:, None]).sum(axis=-1))


def compute_bottleneck_bound_s(fastest_s: Floats, counts: Sequence[int]) -> float:
    """Return a lower bound of the fullest device's load, if layers can be split freely between devices.

    Any weights of the groups give a bound (weak duality of the split): a device counts as much as its group weighs, and
    each layer goes to the group where its weighted time is least.

    Args:
        fastest_s: [G, L], times of the layers on a device of each group.
        counts: devices of each group.
    """
    speeds = 1.0 / np.maximum(fastest_s.sum(axis=1), _LEAST_S)
    balance = speeds / speeds.sum()
    weights = np.concatenate([balance[None], 0.5 * balance + 0.5 * np.eye(len(counts))])
    split_s = (weights[:, :, None] * fastest_s).min(axis=1).sum(axis=1)
    return float((split_s / (weights @ np.array(counts))).max())
