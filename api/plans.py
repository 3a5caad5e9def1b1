"""Parallel plans: their JSON views, the endpoint that solves one on request, and checks of model and GPU names."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, NotRequired, cast

from pydantic import Field
from typing_extensions import TypedDict

from api.http.dependencies import Service, ServiceDep, create_router
from api.http.errors import ProblemError, raise_invalid_field
from api.identity.authorization import RouteRule, requires
from api.step_prediction import StepPredictionView, step_prediction_view
from scheduler.documents.plan_limits import to_plan_limits
from scheduler.documents.plan_request import PlanRequestDocument, to_gpu_shape
from scheduler.domain.framework_limits import combine_framework_limits
from scheduler.domain.job import Job
from scheduler.domain.job_spec import JobSpec
from scheduler.domain.parallel_plan import ParallelPlan, Recompute, ScheduleName, plan_to_json
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.suggestions import suggest
from scheduler.plan_export.frameworks import find_framework
from scheduler.solver.curve import build_solve_request
from scheduler.solver.fewer_gpus import search_offered_gpus
from scheduler.solver.inspection import Bound, Inspection, inspect_plan, search_outcome_to_json, simplest_plan_to_json
from scheduler.solver.plan_rules import PlanError
from scheduler.solver.profiles.catalog import (
    ProfileError,
    list_gpu_names,
    list_model_names,
    load_gpu,
    load_model,
    parse_model,
)
from scheduler.solver.profiles.job_model import find_lengths_problem
from scheduler.solver.profiles.model_profile import ModelProfile
from scheduler.solver.request import Infeasibility, RequestError, SolveRequest
from scheduler.solver.search.plan_search import SearchOutcome
from scheduler.solver.search.simple_plan import SimplestPlan, find_simplest_plan


def check_gpu(name: str, *, field: str = "gpu") -> None:
    if name not in list_gpu_names():
        raise_invalid_field(field, name, f"one of {', '.join(list_gpu_names())}{suggest(name, list_gpu_names())}")


def check_model(name: str) -> None:
    if name not in list_model_names():
        raise_invalid_field("model", name, f"one of {', '.join(list_model_names())}{suggest(name, list_model_names())}")


def check_job(spec: JobSpec) -> None:
    """Raise a 422 if the job names an unknown GPU model or model, or has an invalid profile."""
    if spec.gpu:
        check_gpu(spec.gpu)
    for gpu in spec.speeds:
        check_gpu(gpu, field="speeds")
    if spec.model:
        check_model(spec.model)
    if spec.profile_json:
        try:
            parse_model(spec.profile_json, spec.sequence_length)
        except ProfileError as error:
            raise_invalid_field("profile", None, str(error))
    if problem := find_lengths_problem(spec):
        raise_invalid_field("lengths", spec.lengths[-1][0], problem)


def gpu_memory_bytes(gpu: str) -> int:
    check_gpu(gpu)
    return load_gpu(gpu).memory_bytes


class ScheduleView(TypedDict):
    """Order of the micro-batches in the pipeline."""

    name: Annotated[
        ScheduleName, Field(description="`gpipe`, `1f1b` (one forward, one backward) or `interleaved-1f1b`.")
    ]
    interleave: Annotated[int, Field(description="Number of model chunks per pipeline device. 1: not interleaved.")]


class StrategyView(TypedDict):
    """How `layers` consecutive layers are sharded. tp x dp x ulysses x ring equals the number of GPUs of the stage."""

    layers: Annotated[int, Field(description="Number of consecutive layers that are sharded this way.")]
    tp: Annotated[int, Field(description="Degree of tensor parallelism.")]
    sequence_sharding: Annotated[
        bool,
        Field(
            description=(
                "Whether activations are sharded over the tensor-parallel GPUs (Megatron sequence parallelism)."
            )
        ),
    ]
    dp: Annotated[int, Field(description="Degree of data parallelism: number of replicas.")]
    zero: Annotated[
        int,
        Field(
            description=(
                "ZeRO stage: 0 replicates (DDP); 1 to 3 shard optimizer state, gradients and parameters (3 is FSDP)."
            )
        ),
    ]
    shard_group: Annotated[int, Field(description="Number of replicas over which ZeRO shards.")]
    ulysses: Annotated[
        int, Field(description="Degree of Ulysses sequence parallelism (all-to-all over attention heads).")
    ]
    ring: Annotated[int, Field(description="Degree of ring attention (context parallelism).")]
    ep: Annotated[int, Field(description="Degree of expert parallelism, for mixture-of-experts layers.")]
    recompute: Annotated[
        Recompute, Field(description="Activations that the backward pass recomputes instead of storing them.")
    ]
    offload: Annotated[bool, Field(description="Whether optimizer state is kept in host memory.")]
    offload_parameters: NotRequired[
        Annotated[
            bool,
            Field(
                description=(
                    "Whether parameters and gradients are in host memory, streamed for each micro-batch. "
                    "Absent if they are not."
                )
            ),
        ]
    ]
    offload_activations: NotRequired[
        Annotated[
            bool,
            Field(
                description="Whether the inputs of recomputed layers are kept in host memory. Absent if they are not."
            ),
        ]
    ]


class StageView(TypedDict):
    """Consecutive layers of the model on one group of GPUs."""

    first_layer: Annotated[int, Field(description="Index of the lowest layer, from 0.")]
    last_layer: Annotated[int, Field(description="Index of the highest layer, inclusive.")]
    gpu: Annotated[str, Field(description="Profile name of the GPU model, such as `h100-80g`.")]
    gpus: Annotated[int, Field(description="Number of GPUs that run these layers.")]
    strategies: Annotated[
        list[StrategyView], Field(description="How runs of consecutive layers are sharded, in layer order.")
    ]


class PlanView(TypedDict):
    """How a job is parallelised. Times are predictions for one optimizer step."""

    schedule: Annotated[ScheduleView, Field(description="Order of the micro-batches in the pipeline.")]
    micro_batches: Annotated[int, Field(description="Number of parts into which a global batch is split.")]
    micro_batch_size: Annotated[int, Field(description="Samples of one part over all data-parallel replicas together.")]
    iteration_time_s: Annotated[float, Field(description="Predicted seconds per optimizer step.")]
    samples_per_s: Annotated[float, Field(description="Predicted throughput in samples per second.")]
    peak_bytes_per_gpu: Annotated[int, Field(description="Predicted largest memory use of a GPU, in bytes.")]
    peak_bytes_by_model: NotRequired[
        Annotated[
            list[tuple[str, int]],
            Field(description="GPU model and predicted largest memory use in bytes. Absent for a plan on one model."),
        ]
    ]
    terms: NotRequired[
        Annotated[
            list[float],
            Field(
                description=(
                    "Shares of the predicted step by cause: compute, links in nodes, network, experts, optimizer, "
                    "fixed. Empty for a plan without a prediction."
                )
            ),
        ]
    ]
    profile_time_s: NotRequired[
        Annotated[
            float,
            Field(
                description="Predicted seconds per step by the GPU profiles, without what measured steps say of the "
                "hardware. 0 for a plan without a prediction."
            ),
        ]
    ]
    stages: Annotated[
        list[StageView],
        Field(
            description=(
                "Pipeline stages in layer order. With interleaving, stage k runs on device k modulo the "
                "number of devices."
            )
        ),
    ]
    optimality_gap: Annotated[
        float, Field(description="Largest possible speedup of any other plan, as a fraction. 0: proven fastest.")
    ]


class AlternativePlanView(PlanView):
    """Another plan for the same request, compared with the best one."""

    slower_ratio: Annotated[
        float, Field(description="How much longer a step takes than with the best plan, as a fraction.")
    ]


class SimplestPlanView(AlternativePlanView):
    """The plan with the fewest different strategies among those that are fast enough."""

    strategies: Annotated[int, Field(description="Number of different strategies of its layers.")]
    strategies_min: Annotated[
        int, Field(description="Proven lower bound: no plan that is fast enough has fewer different strategies.")
    ]


class MemoryPartsView(TypedDict):
    """Predicted peak memory of one GPU by purpose, in bytes."""

    parameters: Annotated[int, Field(description="Weights as the computation uses them.")]
    gradients: Annotated[
        int, Field(description="Bytes of the gradients that a GPU accumulates over the micro-batches of a step.")
    ]
    optimizer: Annotated[int, Field(description="Master weights and moments of the optimizer.")]
    activations: Annotated[int, Field(description="Activations that are stored for the backward pass.")]
    buffers: Annotated[int, Field(description="What a layer needs while it computes or sends.")]
    reserve: Annotated[int, Field(description="What the GPU profile reserves: framework context and fragmentation.")]


class DeviceView(TypedDict):
    """How one device of the pipeline spends a step. The parts and `idle_s` add up to the step time."""

    gpu: Annotated[str, Field(description="Profile name of the GPU model, such as `h100-80g`.")]
    gpus: Annotated[int, Field(description="Number of GPUs that work as this device.")]
    layers: Annotated[
        list[tuple[int, int]],
        Field(description="First and last layer, inclusive, of each run of layers that it holds."),
    ]
    compute_s: Annotated[float, Field(description="Seconds of computation, forward and backward, per step.")]
    tensor_s: Annotated[float, Field(description="Seconds of tensor-parallel communication per step.")]
    sequence_s: Annotated[float, Field(description="Seconds of sequence-parallel communication per step.")]
    expert_s: Annotated[float, Field(description="Seconds of expert-parallel communication per step.")]
    data_s: Annotated[
        float, Field(description="Seconds of data-parallel communication per step that computation does not hide.")
    ]
    other_s: Annotated[
        float, Field(description="Seconds of the optimizer, changes of layout and host overhead per step.")
    ]
    idle_s: Annotated[float, Field(description="Seconds per step in which it waits for other devices.")]
    memory_bytes: Annotated[int, Field(description="Predicted peak per GPU, in bytes.")]
    memory_bytes_max: Annotated[int, Field(description="Bytes that a plan may use of one of its GPUs.")]
    micro_batches_held: Annotated[
        float, Field(description="Largest number of micro-batches whose activations it stores at once.")
    ]
    bound: Annotated[
        Bound, Field(description="Largest part of the step: computation, a kind of communication, or waiting.")
    ]
    memory_near_limit: Annotated[
        bool, Field(description="Whether `memory_bytes` is at least 90% of `memory_bytes_max`.")
    ]
    host_bytes: Annotated[int, Field(description="Bytes of host memory for what is offloaded, per GPU.")]
    host_bytes_max: Annotated[
        int | None, Field(description="Bytes of host memory that a plan may use per GPU. Null: unknown, so no limit.")
    ]
    memory_parts: Annotated[MemoryPartsView, Field(description="`memory_bytes` by purpose.")]


class InspectionView(TypedDict):
    """How the devices of a plan spend a step."""

    bubble_ratio: Annotated[float, Field(description="Fraction of all GPU time of a step in which devices wait.")]
    model_flops_utilization: Annotated[
        float, Field(description="Useful floating-point operations divided by the peak of all GPUs, as a fraction.")
    ]
    devices: Annotated[list[DeviceView], Field(description="One entry per device of the pipeline, in order.")]
    hand_overs_s: Annotated[
        list[float],
        Field(description="Seconds per step that each link between consecutive devices transfers activations."),
    ]


class JobPlanView(PlanView):
    """The plan of a job, with how each device spends the step."""

    is_estimated: Annotated[
        bool,
        Field(
            description="Whether nothing confirms the predictions and `optimality_gap`, because the job has never "
            "reported progress."
        ),
    ]
    step: Annotated[StepPredictionView, Field(description="Predicted, expected and measured seconds per step.")]
    inspection: Annotated[
        InspectionView | None,
        Field(
            description=(
                "How each device spends the step. Null: no model, no GPUs, samples of unlike lengths, or the plan "
                "no longer fits what is known now."
            )
        ),
    ]


class ExportedFileView(TypedDict):
    """A file for a training framework."""

    name: Annotated[str, Field(description="Name of the file, with the suffix that the framework expects.")]
    text: Annotated[str, Field(description="What to write into it, in the format of its suffix.")]


class ExportedPlanView(TypedDict):
    """A plan in the words of a training framework."""

    args: Annotated[
        list[str],
        Field(description="Command-line arguments. `{plan.file}` stands for the path of the file. Empty: none."),
    ]
    file: Annotated[ExportedFileView | None, Field(description="File for the framework. Null: it needs none.")]


class SolvedPlanView(PlanView):
    """The fastest plan for a request, with details of the search."""

    step_range_s: Annotated[
        tuple[float, float] | None,
        Field(
            description="Seconds between which a measured step should lie in 95% of cases. "
            "Null: the error of a GPU profile is unknown."
        ),
    ]
    inspection: Annotated[InspectionView, Field(description="How each device of the pipeline spends the step.")]
    runners_up: Annotated[
        list[AlternativePlanView],
        Field(description="Next-best plans, fastest first: as many as `alternatives` asks for, if they exist."),
    ]
    whole: Annotated[
        AlternativePlanView | None,
        Field(description="Best plan that uses all GPUs, if this one leaves some out. Null: it does not."),
    ]
    remark: Annotated[
        str,
        Field(
            description="Why some GPUs are left out, mixing GPU models does not pay, or the job must train in fp16. "
            "Empty: nothing to add."
        ),
    ]
    simplest: NotRequired[
        Annotated[
            SimplestPlanView,
            Field(description="Simplest plan within `simplicity` of this one. Absent: the request sets no simplicity."),
        ]
    ]
    export: NotRequired[
        Annotated[
            ExportedPlanView,
            Field(description="The plan in the words of `framework`. Absent: the request names no framework."),
        ]
    ]
    search_time_s: Annotated[float, Field(description="Seconds that the solver took.")]
    candidates: Annotated[int, Field(description="Number of strategies that the solver examined.")]
    estimated: Annotated[
        bool, Field(description="Whether a GPU profile behind these times was estimated from what a machine reported.")
    ]


def plan_view(plan: ParallelPlan) -> PlanView:
    return cast("PlanView", plan_to_json(plan))


def job_plan_view(job: Job, snapshot: Snapshot, plan: ParallelPlan) -> JobPlanView:
    inspection = _inspect_plan(job, snapshot, plan)
    figures = {
        "is_estimated": not job.has_reported,
        "step": step_prediction_view(job, snapshot, plan.iteration_time_s),
        "inspection": asdict(inspection) if inspection else None,
    }
    return cast("JobPlanView", {**plan_to_json(plan), **figures})


def _inspect_plan(job: Job, snapshot: Snapshot, plan: ParallelPlan) -> Inspection | None:
    requests, target = job.curve_requests, job.allocation.target
    if not requests or not target or job.spec.lengths:
        return None
    try:
        return inspect_plan(plan, build_solve_request(requests[0], snapshot.shape_of(target)))
    except PlanError:
        return None


@dataclass(frozen=True, slots=True)
class _Found:
    """The outcome of a search, and the request for the GPUs that its plan uses."""

    outcome: SearchOutcome
    request: SolveRequest
    search_time_s: float
    simplest: SimplestPlan | None = None


def _solved_plan_view(found: _Found, plan: ParallelPlan) -> SolvedPlanView:
    statistics = {"search_time_s": found.search_time_s, "candidates": found.outcome.stats.candidates}
    statistics["estimated"] = any(hardware.estimated for hardware in found.request.hardware)
    simple = {} if found.simplest is None else {"simplest": simplest_plan_to_json(found.simplest, plan)}
    return cast(
        "SolvedPlanView", {**search_outcome_to_json(found.outcome, plan, found.request), **simple, **statistics}
    )


router = create_router("plans")


@router.post("/plans")
@requires(RouteRule(changes_state=False))
def solve_plan(document: PlanRequestDocument, service: ServiceDep) -> SolvedPlanView:
    """Solve for the fastest plan, with `search_time_s` and the number of `candidates` examined.

    `inspection` shows how each device spends the step, its memory and its bottleneck. `runners_up` has as many plans as
    `alternatives` asks for. A plan may use fewer GPUs, if the batch cannot be split over all of them, or if more are no
    faster, or if some of the GPU models are at least as fast without the others: `remark` then says so, and `whole` is
    the best plan that uses the whole shape. With `framework`, the plan is the fastest that the framework can run, and
    `export` has its arguments and its file. If no plan is feasible, the problem names the binding constraint.
    """
    service.state_reader.read(service.clock.now_s())  # the hardware of the fleet is part of the state
    found = _search_plans(_to_solve_request(document), document, service)
    plan = found.outcome.result
    if isinstance(plan, Infeasibility):
        raise ProblemError(422, "infeasible", f"{plan.constraint}: {plan.reason}")
    view = _solved_plan_view(found, plan)
    return {**view, "export": _export_plan(plan, document.framework)} if document.framework else view


def _export_plan(plan: ParallelPlan, framework: str) -> ExportedPlanView:
    exported = find_framework(framework).export(plan)
    file = exported.file
    return {"args": list(exported.args), "file": None if file is None else {"name": file.name, "text": file.text}}


def _search_plans(request: SolveRequest, document: PlanRequestDocument, service: Service) -> _Found:
    """Return the outcome, and the simplest plan if requested. Raises a 429 while too many searches run."""
    with service.acquire_search("too many plans are being solved"):
        started_s = service.clock.elapsed_s()
        outcome, used = search_offered_gpus(request, tolerance=document.tolerance, runners_up=document.alternatives)
        simplest = None
        if document.simplicity is not None and isinstance(outcome.result, ParallelPlan):
            simplest = find_simplest_plan(used, outcome.result, ratio=document.simplicity)
        return _Found(outcome, used, service.clock.elapsed_s() - started_s, simplest)


def _to_solve_request(document: PlanRequestDocument) -> SolveRequest:
    shape = to_gpu_shape(document)
    for group in shape.groups:
        check_gpu(group.gpu, field="gpu" if document.shape is None else "shape.gpu")
    hardware = tuple(load_gpu(gpu) for gpu in dict.fromkeys(group.gpu for group in shape.groups))
    if document.host_memory == 0:
        raise_invalid_field("host_memory", 0, "above 0; exclude `offload` in `limits` for plans without host memory")
    if document.host_memory is not None:
        hardware = tuple(profile.with_host_memory(document.host_memory) for profile in hardware)
    largest, memory_bytes = max(hardware, key=lambda profile: profile.memory_bytes), document.memory or 0
    if memory_bytes > largest.memory_bytes:
        raise_invalid_field(
            "memory", memory_bytes, f"at most {largest.memory_bytes} bytes, the memory of a {largest.gpu}"
        )
    try:
        model = _model_with_frozen_layers(document)
        limits = combine_framework_limits(document.framework, to_plan_limits(document.limits))
        return SolveRequest(model, hardware, shape, document.global_batch, memory_bytes, limits=limits)
    except RequestError as error:
        return raise_invalid_field("document", None, str(error))


def _model_with_frozen_layers(document: PlanRequestDocument) -> ModelProfile:
    model, frozen = _load_model_profile(document), document.frozen_layers
    if frozen > model.layer_count:
        raise_invalid_field("frozenLayers", frozen, f"at most {model.layer_count}, the layers of {model.name}")
    return model.with_frozen_layers(frozen)


def _load_model_profile(document: PlanRequestDocument) -> ModelProfile:
    sequence_length = document.sequence_length or 0
    try:
        if document.profile_json:
            return parse_model(document.profile_json, sequence_length)
        check_model(document.model)
        return load_model(document.model, sequence_length)
    except ProfileError as error:
        return raise_invalid_field(
            "profile" if document.profile_json else "sequenceLength", sequence_length or None, str(error)
        )
