"""The exact search: the plan of least iteration time over pipeline degree, micro-batches, cuts and strategies.

Objective (UniAP, CVPR'25): with stage times p, hand-overs o and c micro-batches, sum(p) + sum(o) + (c - 1) max(p, o),
under a memory limit per GPU. time_cost says how work done once per iteration enters p.

The proof is a chain of lower bounds, each looser and cheaper than the next:

1. pair (pipeline degree, c): all layers at their fastest, perfectly even stages       (PairSearch.__init__)
2. pair: the best partition when every stage takes only its Lagrangian bound           (stage_bounds, partition)
3. pair: the same when the stages that this partition uses take their exact time       (stage_search)

Pairs wait in a heap by their bound. The one with the least bound is refined by one step and goes back; the search ends
when the least bound in the heap has reached the best plan found. No pair that is left can then hold a faster plan.
There is no clock in here: the search stops by the number of labels it makes, and then reports the gap it has proven.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from math import inf

from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan, Schedule, Stage
from scheduler.solver.costs.chain import chain
from scheduler.solver.costs.divisors import divisors
from scheduler.solver.costs.setting import Setting
from scheduler.solver.costs.strategies import strategies
from scheduler.solver.costs.topology import Topology
from scheduler.solver.evaluate import evaluate
from scheduler.solver.infeasible import batch_infeasible, memory_infeasible, shape_infeasible
from scheduler.solver.profiles.hardware_profile import Dimension
from scheduler.solver.request import Infeasible, SolveRequest
from scheduler.solver.search.pair_search import ROUNDING, PairSearch

LABELS_MAX = 20_000_000
"""Default budget of work, in labels of the stage search; seconds of it on one core, so that it ends no usual search."""


@dataclass(frozen=True, slots=True)
class SearchReport:
    """How much was looked at: `candidates` are triples (pipeline degree, micro-batches, layer strategy)."""

    candidates: int
    labels: int


@dataclass(frozen=True, slots=True)
class SearchOutcome:
    """The answer, and what it took."""

    result: ParallelPlan | Infeasible
    report: SearchReport


def solve(request: SolveRequest) -> ParallelPlan | Infeasible:
    """The fastest plan for `request`, proven, or why there is none."""
    return search(request).result


def search(request: SolveRequest, *, tolerance: float = 0.0, labels_max: int = LABELS_MAX) -> SearchOutcome:
    """The fastest plan for `request`; equal requests give equal answers.

    Args:
        tolerance: stop as soon as no plan can be faster by more than this ratio. The plan's `optimality_gap` is the
            gap that was proven, which may be smaller, and is larger only where `labels_max` ran out.
        labels_max: the budget of work.
    """
    if len({group.gpu for group in request.shape.groups}) > 1:
        return SearchOutcome(shape_infeasible(request), SearchReport(0, 0))
    pairs = _pairs(request)
    if not pairs:
        return SearchOutcome(batch_infeasible(request), SearchReport(0, 0))
    best, bound_s = _best_first(pairs, tolerance, labels_max)
    report = SearchReport(sum(len(pair.strategies) for pair in pairs), sum(pair.labels for pair in pairs))
    if best.cost_s < inf:
        return SearchOutcome(_plan(request, best, bound_s), report)
    if bound_s < inf:
        reason = f"no plan was found within the budget of {labels_max} labels; a larger budget may find one"
        return SearchOutcome(Infeasible(reason, "budget"), report)
    return SearchOutcome(memory_infeasible(request, [pair.setting for pair in pairs]), report)


def _pairs(request: SolveRequest) -> list[PairSearch]:
    """All pairs for which a strategy exists, in a fixed order."""
    pairs = []
    topology = Topology.of(request)
    capacity_bytes = request.memory_limit_bytes - request.hardware.reserve_bytes
    for stages in _pipeline_degrees(request):
        layers = chain(request.model, request.hardware.precision, stages=stages)
        for micro_batches in divisors(request.global_batch):
            setting = Setting(
                hardware=request.hardware,
                topology=topology,
                stages=stages,
                stage_gpus=request.gpus // stages,
                micro_batches=micro_batches,
                micro_batch_size=request.global_batch // micro_batches,
            )
            options = strategies(layers, setting)
            if options:
                pairs.append(PairSearch(layers, options, setting, capacity_bytes))
    return pairs


def _pipeline_degrees(request: SolveRequest) -> list[int]:
    if not request.hardware.supports(Dimension.PIPELINE):
        return [1]
    return [degree for degree in divisors(request.gpus) if degree <= request.model.layer_count]


def _best_first(pairs: list[PairSearch], tolerance: float, labels_max: int) -> tuple[PairSearch, float]:
    """The pair with the best plan, and a time that no plan of any pair can beat."""
    heap = [(pair.bound_s, number) for number, pair in enumerate(pairs)]
    heapq.heapify(heap)
    best = pairs[0]
    labels_left = labels_max
    while heap and heap[0][0] < best.cost_s * min(ROUNDING, 1.0 - tolerance) and labels_left > 0:
        pair = pairs[heapq.heappop(heap)[1]]
        before = pair.labels
        pair.refine(labels_left)
        labels_left -= pair.labels - before
        if pair.cost_s < best.cost_s:
            best = pair
        if not pair.closed:
            heapq.heappush(heap, (pair.bound_s, pairs.index(pair)))
    return best, min([best.cost_s, *(bound_s for bound_s, _ in heap)])


def _plan(request: SolveRequest, pair: PairSearch, bound_s: float) -> ParallelPlan:
    """The pair's plan, with the predictions of the independent evaluator."""
    gap = 1.0 - bound_s / pair.cost_s
    draft = ParallelPlan(
        schedule=Schedule(),
        micro_batches=pair.setting.micro_batches,
        micro_batch_size=pair.setting.micro_batch_size,
        iteration_time_s=pair.cost_s,
        samples_per_s=request.global_batch / pair.cost_s,
        peak_bytes_per_gpu=0,
        stages=_stages(pair),
        optimality_gap=gap if gap > 1.0 - ROUNDING else 0.0,
    )
    judged = evaluate(draft, request)
    assert judged.fits, "the search returned a plan beyond the memory limit"
    assert abs(judged.iteration_time_s - pair.cost_s) <= 1e-9 * pair.cost_s, "search and evaluator disagree"
    return replace(
        draft,
        iteration_time_s=judged.iteration_time_s,
        samples_per_s=request.global_batch / judged.iteration_time_s,
        peak_bytes_per_gpu=judged.peak_bytes_per_gpu,
    )


def _stages(pair: PairSearch) -> tuple[Stage, ...]:
    stages = []
    for first, end in pairwise(pair.borders):
        chosen = [pair.strategies[number] for number in pair.choice[first:end]]
        stages.append(Stage(first, end - 1, pair.setting.hardware.gpu, pair.setting.stage_gpus, _runs(chosen)))
    return tuple(stages)


def _runs(chosen: list[LayerStrategy]) -> tuple[LayerStrategy, ...]:
    """Neighbouring layers of one strategy as one run."""
    return tuple(replace(strategy, layers=len(list(run))) for strategy, run in groupby(chosen))
