"""The best plan under Galvatron's cost model: pipelines in order of their bound, until it passes the best plan."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf

import numpy as np

from scheduler.solver.galvatron.costs import embedding_mb, embedding_time
from scheduler.solver.galvatron.evaluate import GalvatronEvaluation, GalvatronPlan, evaluate, pipeline_s
from scheduler.solver.galvatron.profile import GalvatronCase
from scheduler.solver.galvatron.setting import Strategy, even_cut, settings, strategy_sets
from scheduler.solver.galvatron.stages import LayerTable
from scheduler.solver.instance import Floats, Objective
from scheduler.solver.search.partition import StageTimes, best_partition, smallest_bottleneck_s
from scheduler.solver.search.stage_search import CLOSER_THAN

_Choice = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GalvatronOutcome:
    """The plan and its evaluation, both None where nothing fits: `least_mb` is then the smallest cap that would do.

    No plan of the space has a judged time below (1 - `optimality_gap`) times that of `plan`. `candidates` are triples
    (pipeline, embedding's strategy, layer's strategy).
    """

    plan: GalvatronPlan | None
    evaluation: GalvatronEvaluation | None
    optimality_gap: float = 0.0
    least_mb: float = inf
    candidates: int = 0


def search(case: GalvatronCase, cap_mb: int, *, restricted: bool = False) -> GalvatronOutcome:
    """The least judged time (see GalvatronEvaluation) in `cap_mb` of memory on each GPU.

    Args:
        restricted: Galvatron's own space alone: even stages, powers of two up to 8.

    Raises:
        ProfileError: a degree that Galvatron itself would use is not profiled.
    """
    best_s = floor_s = inf
    pipelines = list(_pipelines(case, cap_mb, restricted=restricted))
    best = GalvatronOutcome(None, None, candidates=sum(pipeline.strategies for pipeline in pipelines))
    queue = [(pipeline.bound_s, number, pipeline) for number, pipeline in enumerate(pipelines)]
    heapq.heapify(queue)
    while queue and queue[0][0] < best_s * CLOSER_THAN:
        _, number, pipeline = heapq.heappop(queue)
        plan = pipeline.advance()
        if plan is None:
            heapq.heappush(queue, (pipeline.bound_s, number, pipeline))
            continue
        floor_s = min(floor_s, pipeline.bound_s)
        judged = evaluate(plan, case)
        if judged.judged_s < best_s:
            best, best_s = replace(best, plan=plan, evaluation=judged), judged.judged_s
    if best.plan is None:
        return replace(best, least_mb=cap_mb + min((pipeline.lacking_mb for pipeline in pipelines), default=inf))
    return best if floor_s >= best_s * CLOSER_THAN else replace(best, optimality_gap=1 - floor_s / best_s)


def _pipelines(case: GalvatronCase, cap_mb: int, *, restricted: bool) -> Iterator[Pipeline]:
    for setting in settings(case, restricted=restricted):
        for buffer_degree, strategies in strategy_sets(setting, restricted=restricted):
            table = LayerTable(setting, strategies)
            for embedding in (strategy for strategy in strategies if not strategy.recompute):
                yield Pipeline(table, embedding, buffer_degree, cap_mb, even=True)
                if setting.stages > 1 and not restricted:
                    yield Pipeline(table, embedding, buffer_degree, cap_mb, even=False)


class Pipeline:
    """Everything but cut and layers' strategies is fixed. `bound_s` never exceeds the judged time of any plan of it.

    `even`: Galvatron's own cut, judged by its final time; else the best of all cuts, judged by the bottleneck form.
    With one stage of compute A and reduction E, the embedding's compute being o, the time is c A + max(0, E - o), that
    is the largest of c A + w (E - o) over 0 <= w <= 1, and each w gives a bound. With more stages the reduction that
    nothing hides is left out of the bound.
    """

    def __init__(
        self, table: LayerTable, embedding: Strategy, buffer_degree: int | None, cap_mb: int, *, even: bool
    ) -> None:
        setting, stages = table.setting, range(table.setting.stages)
        self._table, self._embedding, self._buffer_degree, self._even = table, embedding, buffer_degree, even
        self._other_s = [embedding_time(embedding, setting, stage).compute_s for stage in stages]
        self._rooms_mb = [cap_mb - embedding_mb(embedding, setting, stage, buffer_degree) for stage in stages]
        self._times_s = np.array([self._bounds_s(stage) for stage in stages])
        self._choices: dict[tuple[int, int], _Choice] = {}
        self._look()

    def advance(self) -> GalvatronPlan | None:
        """The plan of the best cut if its stages are proven, else None and a sharper bound.

        Layers are identical and changes of split are free in Galvatron's final time: equal strategies come together.
        """
        open_stages = [key for key in enumerate(self._cut) if key not in self._choices]
        for key in open_stages:
            bound_s, self._choices[key] = self._alone() if len(self._cut) == 1 else self._proven(*key)
            self._times_s[key] = max(self._times_s[key], bound_s)
        if open_stages:
            self._look()
            return None
        chosen = ([self._table.strategies[at] for at in self._choices[key]] for key in enumerate(self._cut))
        stages = tuple(tuple(sorted(stage, key=lambda one: (one.split, one))) for stage in chosen)
        return GalvatronPlan(stages, self._embedding, self._table.setting.micro_batches, self._buffer_degree)

    @property
    def strategies(self) -> int:
        return len(self._table.strategies)

    @property
    def lacking_mb(self) -> float:
        """By how much the memory cap must grow for some cut to fit (negative: it may shrink)."""
        need_mb = self._table.counts * self._table.memory_mb.min(axis=1)[:, None] - np.array(self._rooms_mb)[:, None]
        return smallest_bottleneck_s(_windows(need_mb.astype(np.float64)))

    def _look(self) -> None:
        """The best cut, as far as the stages' times are known."""
        setting, objective = self._table.setting, Objective(self._table.setting.micro_batches)
        self._cut = even_cut(setting.case.model.layers, setting.stages)
        if self._even:
            stages_s = [float(self._times_s[key]) for key in enumerate(self._cut)]
            self.bound_s = pipeline_s(stages_s, setting.micro_batches) if max(stages_s) < inf else inf
        else:
            found, self.bound_s = best_partition(_windows(self._times_s), objective)
            if found is not None:
                self._cut = tuple(end - first for first, end in pairwise(found.borders))

    def _bounds_s(self, stage: int) -> Floats:
        """[L+1] by number of layers, embedding and head included."""
        room_mb, other_s = self._rooms_mb[stage], self._other_s[stage]
        bounds_s = self._table.bounds_s(stage, room_mb, 0.0)
        if len(self._rooms_mb) == 1:
            weight = 1 / self._table.setting.micro_batches
            bounds_s = np.maximum(bounds_s, self._table.bounds_s(stage, room_mb, weight) - weight * other_s)
        return bounds_s + other_s

    def _proven(self, stage: int, layers: int) -> tuple[float, _Choice]:
        found = self._table.solve(stage, layers, self._rooms_mb[stage], 0.0)
        return found.bound_s + self._other_s[stage], found.choice

    def _alone(self) -> tuple[float, _Choice]:
        """(bound, choice) of the only stage, as time per micro-batch.

        The weights 1 and 0 settle it where reduction outlasts the embedding, or hides behind it, in the best choice
        under that weight. Else the dual's optimum is near the weight at which these two choices tie.
        """
        table, other_s, share = self._table, self._other_s[0], 1 / self._table.setting.micro_batches
        tried: list[tuple[float, float, float, _Choice]] = []  # (compute, excess, bound) and choice.
        for weight in (1.0, 0.0, inf):
            if weight == inf:
                weight = (tried[0][0] - tried[1][0]) / share / (tried[1][1] - tried[0][1])
            found = table.solve(0, self._cut[0], self._rooms_mb[0], weight * share)
            chosen = list(found.choice)
            compute_s = float(table.compute_s[chosen].sum()) + other_s
            excess_s = float(table.reduction_s[chosen].sum()) - other_s
            tried.append((compute_s, excess_s, found.bound_s + other_s * (1 - weight * share), found.choice))
            if (weight == 1.0 and excess_s >= 0) or (weight == 0.0 and excess_s <= 0):
                return tried[-1][2:]
        best_s, best = min((one[0] + share * max(0.0, one[1]), one[3]) for one in tried)
        better = table.fastest_alone(self._rooms_mb[0], weight=weight, hidden_s=other_s, limit_s=best_s - other_s)
        return (max(one[2] for one in tried), best) if better is None else (better[0] + other_s, better[1] or best)


def _windows(by_count: Floats) -> StageTimes:
    """Times (or sizes) [P, L+1] by number of layers as those of every candidate stage."""
    depth = by_count.shape[1] - len(by_count)
    lengths = np.arange(depth)[None, :] - np.arange(depth)[:, None] + 1
    stages = np.where(lengths > 0, by_count[:, np.maximum(lengths, 0)], inf)
    return StageTimes(stages[:, None], np.zeros((len(by_count) - 1, 1, 1, depth)), (len(by_count),))
