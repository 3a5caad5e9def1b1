"""A stage of identical layers as the exact search takes it."""

from __future__ import annotations

import numpy as np

from scheduler.solver.galvatron.costs import layer_mb, layer_time
from scheduler.solver.galvatron.setting import Setting, Strategy
from scheduler.solver.instance import Floats, Ints
from scheduler.solver.search.stage_bounds import candidate_prices
from scheduler.solver.search.stage_problem import StageProblem, StageSolution
from scheduler.solver.search.stage_search import solve_stage

LABELS_MAX = 2_000_000
_CHOICES_MAX = 50_000
_MB = 2**20
_ROUNDING = 1e-12


class LayerTable:
    """Times and memory of a layer by strategy; solves stages of such layers, each question once.

    Reduction counts `weight` times: a stage of n layers then takes sum(compute + weight * reduction).
    """

    def __init__(self, setting: Setting, strategies: list[Strategy]) -> None:
        times = [layer_time(strategy, setting) for strategy in strategies]
        self.setting, self.strategies = setting, strategies
        self.counts = np.arange(setting.case.model.layers + 1)
        self.compute_s = np.array([time.compute_s for time in times])
        self.reduction_s = np.array([time.synced_s for time in times]) - self.compute_s
        self.memory_mb = np.array([[layer_mb(one, setting, i) for one in strategies] for i in range(setting.stages)])
        self._solved: dict[tuple[int, int, int, float], StageSolution] = {}

    def bounds_s(self, stage: int, room_mb: int, weight: float) -> Floats:
        """[L+1] a time that no stage of n layers can beat, by weak duality; infinite where none fits."""
        memory, step_s = self.memory_mb[stage], self.compute_s + weight * self.reduction_s
        prices = candidate_prices(step_s[None], memory[None])
        priced_s = (step_s + prices[:, None] * memory).min(axis=1)
        bounds_s = (self.counts[:, None] * priced_s - prices * room_mb).max(axis=1)
        return np.where(self.counts * memory.min() <= room_mb, bounds_s, np.inf)

    def solve(self, stage: int, layers: int, room_mb: int, weight: float) -> StageSolution:
        key = stage, layers, room_mb, weight
        if key not in self._solved:
            step_s = self.compute_s + weight * self.reduction_s
            problem = identical_layers(step_s, self.memory_mb[stage], layers, room_mb)
            self._solved[key] = solve_stage(problem, labels_max=LABELS_MAX)
        return self._solved[key]

    def fastest_alone(
        self, room_mb: int, *, weight: float, hidden_s: float, limit_s: float
    ) -> tuple[float, tuple[int, ...]] | None:
        """(time, choice) of all layers in the only stage, per micro-batch; no choice: none below `limit_s`; None: too
        many to try. The reduction beyond `hidden_s` counts, once in all micro-batches.

        Against the bound at a price of memory and a `weight` of reduction, each layer adds its regret. So only choices
        whose regrets sum to less than limit - bound are tried: counts of strategies, those of most regret first.
        """
        layers, share, memory = len(self.counts) - 1, 1 / self.setting.micro_batches, self.memory_mb[0]
        step_s = self.compute_s + weight * share * self.reduction_s
        prices = candidate_prices(step_s[None], memory[None])
        bounds_s = layers * (step_s + prices[:, None] * memory).min(axis=1) - prices * room_mb
        priced_s = step_s + prices[bounds_s.argmax()] * memory
        regret_s, left_s = priced_s - priced_s.min(), limit_s - bounds_s.max() + weight * share * hidden_s
        left_s = max(0.0, left_s) + _ROUNDING * limit_s
        *others, last = np.argsort(-regret_s, kind="stable").tolist()
        found = np.zeros((1, len(memory)), dtype=np.int64)
        for strategy in others:
            tried = np.arange(1 + min(layers, int(left_s / max(regret_s[strategy], left_s / layers))))
            if len(found) * len(tried) > _CHOICES_MAX:
                return None
            found = np.repeat(found, len(tried), axis=0)
            found[:, strategy] = np.tile(tried, len(found) // len(tried))
            left = layers - found.sum(axis=1)
            fits = found @ memory + left * memory.min() <= room_mb
            found = found[fits & (left >= 0) & (found @ regret_s <= left_s)]
        found[:, last] = layers - found.sum(axis=1)
        found = found[found @ memory <= room_mb]
        times_s = found @ self.compute_s + share * np.maximum(0.0, found @ self.reduction_s - hidden_s)
        if not (times_s < limit_s).any():
            return limit_s, ()
        return float(times_s.min()), tuple(np.repeat(np.arange(len(memory)), found[times_s.argmin()]).tolist())


def identical_layers(
    time_s: Floats, memory_mb: Ints, layers: int, room_mb: int, transition_s: Floats | None = None
) -> StageProblem:
    """`layers` equal layers with time_s [S], memory_mb [S] and transition_s [S, S] (None: free) in `room_mb`.

    Strategies with equal transitions from and to all others share a layout.
    """
    count = len(time_s)
    between = np.zeros((count, count)) if transition_s is None else transition_s
    _, first, layouts = np.unique(np.hstack([between, between.T]), axis=0, return_index=True, return_inverse=True)
    memory, reshard_s = memory_mb * _MB, between[first[:, None], first]
    return StageProblem(
        step_s=np.tile(time_s, (layers, 1)),
        memory_bytes=np.tile(memory, (layers, 1)),
        working_bytes=np.zeros(count, dtype=np.int64),
        layouts=layouts.reshape(-1),
        reshard_s=np.broadcast_to(reshard_s, (layers - 1, *reshard_s.shape)),
        prices=candidate_prices(time_s[None], memory[None]),
        capacity_bytes=room_mb * _MB,
    )
