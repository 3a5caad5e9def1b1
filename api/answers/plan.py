"""Plans as answers: the Plan JSON of the contract, and what solving one on request tells beside it."""

from __future__ import annotations

from dataclasses import asdict
from typing import cast

from typing_extensions import TypedDict

from scheduler.domain.job import Job
from scheduler.domain.parallel_plan import ParallelPlan, Recompute, ScheduleName, plan_to_json
from scheduler.domain.snapshot import Snapshot
from scheduler.solver.curve import question_of
from scheduler.solver.inspection import Bound, Inspection, answer_to_json, inspect
from scheduler.solver.plan_rules import PlanError
from scheduler.solver.request import SolveRequest
from scheduler.solver.search.outcome import SearchOutcome


class ScheduleView(TypedDict):
    name: ScheduleName
    interleave: int


class StrategyView(TypedDict):
    """How `layers` consecutive layers are spread: tp x dp x ulysses x ring is the number of GPUs of the stage."""

    layers: int
    tp: int
    sequence_sharding: bool
    dp: int
    zero: int
    shard_group: int
    ulysses: int
    ring: int
    ep: int
    recompute: Recompute
    offload: bool


class StageView(TypedDict):
    """Layers `first_layer` to `last_layer`, both counted, on `gpus` GPUs of model `gpu`."""

    first_layer: int
    last_layer: int
    gpu: str
    gpus: int
    strategies: list[StrategyView]


class PlanView(TypedDict):
    """How a job is parallelised. Times are predictions for one optimizer step."""

    schedule: ScheduleView
    micro_batches: int
    micro_batch_size: int
    iteration_time_s: float
    samples_per_s: float
    peak_bytes_per_gpu: int
    stages: list[StageView]
    optimality_gap: float


class SlowerPlanView(PlanView):
    """`slower_ratio`: by which part of the best plan's time a step takes longer."""

    slower_ratio: float


class DeviceView(TypedDict):
    """How one device of the pipeline spends a step; the parts and `idle_s` add up to it."""

    gpu: str
    gpus: int
    layers: list[tuple[int, int]]
    compute_s: float
    tensor_s: float
    sequence_s: float
    expert_s: float
    data_s: float
    other_s: float
    idle_s: float
    memory_bytes: int
    memory_bytes_max: int
    micro_batches_held: float
    bound: Bound
    memory_near_limit: bool


class InspectionView(TypedDict):
    bubble_ratio: float
    model_flops_utilization: float
    devices: list[DeviceView]
    hand_overs_s: list[float]


class JobPlanView(PlanView):
    """`inspection` is null for a job without a model, for one that has left the plan's GPUs, and where what was learnt
    of the job since (its memory, its frozen layers) has made the plan none that the solver would give."""

    inspection: InspectionView | None


class SolvedPlanView(PlanView):
    """`whole`: the best plan that leaves no GPU out, where this one does; `remark` says so. `candidates`: how many
    strategies were looked at."""

    inspection: InspectionView
    runners_up: list[SlowerPlanView]
    whole: SlowerPlanView | None
    remark: str
    search_time_s: float
    candidates: int


def plan_view(plan: ParallelPlan) -> PlanView:
    return cast("PlanView", plan_to_json(plan))


def job_plan_view(job: Job, snapshot: Snapshot, plan: ParallelPlan) -> JobPlanView:
    found = _inspection(job, snapshot, plan)
    return cast("JobPlanView", {**plan_to_json(plan), "inspection": asdict(found) if found else None})


def _inspection(job: Job, snapshot: Snapshot, plan: ParallelPlan) -> Inspection | None:
    requests, target = job.curve_requests, job.allocation.target
    if not requests or not target:
        return None
    try:
        return inspect(plan, question_of(requests[0], snapshot.shape_of(target)))
    except PlanError:
        return None


def solved_plan_view(
    outcome: SearchOutcome, plan: ParallelPlan, request: SolveRequest, search_time_s: float
) -> SolvedPlanView:
    told = {"search_time_s": search_time_s, "candidates": outcome.report.candidates}
    return cast("SolvedPlanView", {**answer_to_json(outcome, plan, request), **told})
