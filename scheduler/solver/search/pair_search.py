"""PairSearch: the best plan of one (pipeline degree, micro-batches) pair, refined step by step."""

from __future__ import annotations

import numpy as np

from scheduler.domain.parallel_plan import LayerStrategy
from scheduler.solver.costs.chain import Layer
from scheduler.solver.costs.cost_tables import Floats, cost_tables
from scheduler.solver.costs.setting import Setting
from scheduler.solver.search.partition import best_partition
from scheduler.solver.search.stage_bounds import stage_lower_bounds
from scheduler.solver.search.stage_search import StageProblem, StageSolution, solve_stage

ROUNDING = 1.0 - 1e-12
"""A bound this close to a cost has reached it: sums taken in another order differ by as much."""

_StageKey = tuple[int, bool, bool, tuple[int, ...]]


class PairSearch:
    """Holds a lower bound for the pair, and raises it when asked to.

    Stage times start as lower bounds. `refine` takes the best partition under the times known so far, and solves
    the stages it uses exactly. As soon as every stage of the best partition is exact, that partition is the
    optimum of the pair: any other one costs at least as much already under its bounds. Only stages that some best
    partition uses are ever solved, and equal stages (same layer types, same micro-batches in flight) only once.
    """

    def __init__(
        self, layers: tuple[Layer, ...], options: tuple[LayerStrategy, ...], setting: Setting, capacity_bytes: int
    ) -> None:
        self.setting = setting
        self.strategies = options
        self.labels = 0
        self.closed = False
        self.cost_s = np.inf
        self.borders: tuple[int, ...] = ()
        self.choice: tuple[int, ...] = ()
        self._capacity_bytes = capacity_bytes
        self._tables = cost_tables(layers, options, setting)
        self._stages_s: Floats | None = None
        self._solved: dict[_StageKey, StageSolution] = {}
        fastest_s = float(self._tables.time_s.min(axis=1)[self._tables.types].sum())
        # The largest stage is at least the mean one. This needs no table, and settles most pairs.
        self.bound_s = fastest_s * (1 + (setting.micro_batches - 1) / setting.stages)

    def refine(self, labels_max: int) -> None:
        """One step: raises `bound_s`, or finds a plan, or closes the pair. Spends about `labels_max` at most."""
        first = self._stages_s is None
        stages_s = self._bounds() if first else self._stages_s
        assert stages_s is not None
        self._stages_s = stages_s
        best = best_partition(stages_s, self._tables.hand_over_s, self.setting.micro_batches)
        if best is None:
            self.closed, self.bound_s = True, np.inf
            return
        self.bound_s = max(self.bound_s, best.cost_s)
        if first:
            return  # Another pair may be more promising now.
        solutions = self._solve(best.borders, labels_max)
        self._offer(best.borders, solutions)
        if not all(solution.proven for solution in solutions):
            return  # The budget is spent; the plan may stand, but the bound stays.
        again = best_partition(stages_s, self._tables.hand_over_s, self.setting.micro_batches)
        self.bound_s = max(self.bound_s, again.cost_s if again else np.inf)
        self.closed = again is None or self.bound_s >= self.cost_s * ROUNDING

    def _bounds(self) -> Floats:
        """Lower bounds of all stages; positions with as many micro-batches in flight share one table."""
        tables = {
            in_flight: stage_lower_bounds(self._tables, in_flight=in_flight, capacity_bytes=self._capacity_bytes)
            for in_flight in {self.setting.in_flight(stage) for stage in range(self.setting.stages)}
        }
        return np.stack([tables[self.setting.in_flight(stage)] for stage in range(self.setting.stages)])

    def _solve(self, borders: tuple[int, ...], labels_max: int) -> list[StageSolution]:
        """The partition's stages, exact as long as the budget lasts, and the best choice known after that."""
        solutions = []
        spent_before = self.labels
        for stage in range(self.setting.stages):
            key = self._key(stage, borders[stage], borders[stage + 1])
            solution = self._solved.get(key)
            if solution is None:
                solution = self._solve_stage(key, labels_max - (self.labels - spent_before))
                self.labels += solution.labels
                if solution.proven:
                    self._solved[key] = solution
                    self._enter(key, solution.time_s)
            solutions.append(solution)
        return solutions

    def _solve_stage(self, key: _StageKey, labels_max: int) -> StageSolution:
        in_flight, entry, exit_, types = key
        problem = StageProblem(
            tables=self._tables,
            types=np.array(types, dtype=np.int64),
            in_flight=in_flight,
            capacity_bytes=self._capacity_bytes,
            entry=entry,
            exit=exit_,
        )
        return solve_stage(problem, labels_max=labels_max)

    def _key(self, stage: int, first: int, end: int) -> _StageKey:
        types = tuple(self._tables.types[first:end].tolist())
        return self.setting.in_flight(stage), stage > 0, stage < self.setting.stages - 1, types

    def _enter(self, key: _StageKey, time_s: float) -> None:
        """Writes an exact time wherever the same stage can stand."""
        assert self._stages_s is not None
        length = len(key[3])
        windows = np.lib.stride_tricks.sliding_window_view(self._tables.types, length)
        starts = np.flatnonzero((windows == np.array(key[3])).all(axis=1))
        for stage in range(self.setting.stages):
            if self._key(stage, 0, 0)[:3] == key[:3]:
                self._stages_s[stage, starts, starts + length] = time_s

    def _offer(self, borders: tuple[int, ...], solutions: list[StageSolution]) -> None:
        """Keeps the partition as the pair's plan if it fits and is the fastest so far."""
        times_s = [solution.time_s for solution in solutions]
        times_s += [float(self._tables.hand_over_s[cut, border]) for cut, border in enumerate(borders[1:-1])]
        cost_s = sum(times_s) + (self.setting.micro_batches - 1) * max(times_s)
        if cost_s < self.cost_s:
            self.cost_s, self.borders = cost_s, borders
            self.choice = tuple(number for solution in solutions for number in solution.choice)
