"""StageProblem: the layers of one device, each to be given a strategy within the device's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from scheduler.solver.instance import Floats, Ints, StageCosts


@dataclass(frozen=True, slots=True, eq=False)
class StageProblem:
    """n layers, S strategies, K layouts:

    step_s         [n, S]       of each layer, border gathers included
    memory_bytes   [n, S]       of each layer, with what its micro-batches in flight keep
    working_bytes  [S]          of the stage; the largest one counts
    layouts        [S]
    reshard_s      [n-1, K, K]  between a layer and the next
    """

    step_s: Floats
    memory_bytes: Ints
    working_bytes: Ints
    layouts: Ints
    reshard_s: Floats
    prices: Floats
    capacity_bytes: int

    def weigh(self, choices: Ints) -> tuple[Floats, Ints]:
        """(time, memory) [X] of choices [X, n], the buffer included."""
        at = np.arange(choices.shape[1])
        layouts = self.layouts[choices]
        time_s = self.step_s[at, choices].sum(axis=1)
        time_s = time_s + self.reshard_s[at[:-1], layouts[:, :-1], layouts[:, 1:]].sum(axis=1)
        return time_s, self.memory_bytes[at, choices].sum(axis=1) + self.working_bytes[choices].max(axis=1)


@dataclass(frozen=True, slots=True)
class StageSolution:
    """The best choice found, one strategy number a layer, and a time that no choice can beat.

    Infinite times mean that nothing fits. `labels` counts the partial choices that were looked at.
    """

    time_s: float = inf
    bound_s: float = inf
    choice: tuple[int, ...] = ()
    labels: int = 0


def stage_problem(
    costs: StageCosts,
    types: Ints,
    chunks: Sequence[tuple[int, int]],
    *,
    in_flight: float,
    capacity_bytes: int,
    prices: Floats,
) -> StageProblem:
    """The problem of a device that holds the layers a to b-1 of the chain `types` for every (a, b) in `chunks`.

    Between two chunks lies a hand-over, so that both ends gather there and no resharding is due.
    """
    held = np.concatenate([types[first:end] for first, end in chunks])
    step_s, reshard_s = costs.time_s[held], costs.reshard_s[held[:-1]]
    start = 0
    for first, end in chunks:
        last = start + end - first - 1
        if first > 0:
            step_s[start] += costs.border_s[types[first]]
        if end < len(types):
            step_s[last] += costs.border_s[types[end - 1]]
        if start > 0:
            reshard_s[start - 1] = 0.0
        start = last + 1
    memory = costs.memory_bytes(in_flight)[held]
    return StageProblem(step_s, memory, costs.working_bytes, costs.layouts, reshard_s, prices, capacity_bytes)
