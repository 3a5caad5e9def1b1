"""Inspection of a plan: how each device of its pipeline spends the step, and its bottleneck."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from scheduler.domain.parallel_plan import ParallelPlan, plan_to_json
from scheduler.solver.evaluate import Evaluation, MemoryParts, evaluate
from scheduler.solver.profiles.hardware_profile import Precision
from scheduler.solver.request import SolveRequest
from scheduler.solver.search.plan_search import SearchOutcome
from scheduler.solver.search.simple_plan import SimplestPlan

MEMORY_NEAR_LIMIT = 0.9
"""Share of the memory limit from which memory counts as one of the limits of a stage."""


class Bound(StrEnum):
    """The largest part of a device's step; communication is named by its kind."""

    COMPUTE = "compute"
    TENSOR = "tensor"
    SEQUENCE = "sequence"
    EXPERT = "expert"
    DATA = "data"
    OTHER = "other"
    BUBBLE = "bubble"
    HAND_OVER = "hand-over"


@dataclass(frozen=True, slots=True)
class DeviceInspection:
    """One device of the pipeline over one step. The six parts and `idle_s` add up to the step.

    `other_s` is the optimizer step, streaming from the host, changes of layout and the host overhead of each step.
    `layers` are the runs (first, last) that the device holds; `memory_parts` adds up to `memory_bytes`;
    `memory_bytes_max` is the memory of one GPU that a plan
    may use. `host_bytes` is what offload keeps on the host for one GPU, and `host_bytes_max` what it may keep; None if
    that is unknown.
    """

    gpu: str
    gpus: int
    layers: tuple[tuple[int, int], ...]
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
    host_bytes: int
    host_bytes_max: int | None
    memory_parts: MemoryParts


@dataclass(frozen=True, slots=True)
class Inspection:
    """How each device of a pipeline spends the step.

    `bubble_ratio` is the share of all GPU time of a step in which devices wait: while the pipeline fills and drains,
    and for its slowest part. `hand_overs_s` is one time per link and step.
    """

    bubble_ratio: float
    model_flops_utilization: float
    devices: tuple[DeviceInspection, ...]
    hand_overs_s: tuple[float, ...]


def inspect_plan(plan: ParallelPlan, request: SolveRequest) -> Inspection:
    """Inspect how the step of `plan` is spent, by the independent evaluation.

    Raises:
        PlanError: the plan does not answer the request.
    """
    evaluation = evaluate(plan, request)
    devices = tuple(_inspect_device(plan, evaluation, request, position) for position in range(plan.pipeline_devices))
    idle_s = sum(device.gpus * device.idle_s for device in devices)
    return Inspection(
        bubble_ratio=idle_s / (plan.world_size * evaluation.iteration_time_s),
        model_flops_utilization=evaluation.model_flops_utilization,
        devices=devices,
        hand_overs_s=tuple(plan.micro_batches * time_s for time_s in evaluation.hand_overs_s),
    )


def search_outcome_to_json(outcome: SearchOutcome, plan: ParallelPlan, request: SolveRequest) -> dict[str, Any]:
    """Return the plan in its contract's form, with the details of the search.

    `step_range_s` is that of `compute_step_range_s`. `runners_up` are plans with their `slower_ratio`. If the plan
    leaves GPUs unused, `whole` is the best plan that uses all.
    """
    return {
        **plan_to_json(plan),
        "step_range_s": compute_step_range_s(plan, request),
        "inspection": asdict(inspect_plan(plan, request)),
        "runners_up": [_slower_plan_to_json(other, plan) for other in outcome.runners_up],
        "whole": _slower_plan_to_json(outcome.full_shape_plan, plan) if outcome.full_shape_plan else None,
        "remark": "; ".join(filter(None, (outcome.remark, _describe_precision(plan, request)))),
    }


def compute_step_range_s(plan: ParallelPlan, request: SolveRequest) -> tuple[float, float] | None:
    """Return the times between which a measured step should lie in 95% of cases; None if a profile's error is unknown.

    The error of a profile is predicted / measured - 1.
    """
    used = {stage.gpu for stage in plan.stages}
    errors = [profile.prediction_error for profile in request.hardware if profile.gpu in used]
    if not all(0 < error < 1 for error in errors):
        return None
    return plan.iteration_time_s / (1 + max(errors)), plan.iteration_time_s / (1 - max(errors))


def _describe_precision(plan: ParallelPlan, request: SolveRequest) -> str:
    """Return the number format of a plan on GPU models that do not all have bf16; empty for other plans."""
    used = {stage.gpu for stage in plan.stages}
    profiles = [profile for profile in request.hardware if profile.gpu in used]
    lacking = sorted(profile.gpu for profile in profiles if profile.precision is Precision.FP16)
    if len(lacking) in (0, len(profiles)):
        return ""
    return f"train in fp16, since bf16 is not supported by {', '.join(lacking)}"


def simplest_plan_to_json(simplest: SimplestPlan, plan: ParallelPlan) -> dict[str, Any]:
    """Return the simplest plan in its contract's form, compared with the fastest one, `plan`."""
    counts = {"strategies": simplest.strategies, "strategies_min": simplest.strategies_min}
    return {**_slower_plan_to_json(simplest.plan, plan), **counts}


def _slower_plan_to_json(other: ParallelPlan, plan: ParallelPlan) -> dict[str, Any]:
    return {**plan_to_json(other), "slower_ratio": other.iteration_time_s / plan.iteration_time_s - 1.0}


def _inspect_device(
    plan: ParallelPlan, evaluation: Evaluation, request: SolveRequest, position: int
) -> DeviceInspection:
    stage, stages = evaluation.stages[position], plan.stages[position :: plan.pipeline_devices]
    group = next(group for group in request.groups if group.hardware.gpu == stages[0].gpu)
    parts = {name: plan.micro_batches * seconds for name, seconds in asdict(stage.parts).items()}
    parts["other_s"] += max(
        one.hardware.iteration_overhead_s for one in request.groups if _uses_gpu_model(plan, one.hardware.gpu)
    )
    idle_s = max(0.0, evaluation.iteration_time_s - sum(parts.values()))
    return DeviceInspection(
        gpu=stages[0].gpu,
        gpus=stages[0].gpus,
        layers=tuple((stage.first_layer, stage.last_layer) for stage in stages),
        **parts,
        idle_s=idle_s,
        memory_bytes=stage.memory_bytes,
        memory_bytes_max=group.limit_bytes,
        micro_batches_held=stage.in_flight,
        bound=_find_bottleneck(parts, idle_s, slow_link=_is_link_bound(evaluation)),
        memory_near_limit=stage.memory_bytes >= MEMORY_NEAR_LIMIT * group.limit_bytes,
        host_bytes=stage.host_bytes,
        host_bytes_max=group.hardware.host_memory_bytes or None,
        memory_parts=stage.memory,
    )


def _uses_gpu_model(plan: ParallelPlan, gpu: str) -> bool:
    return any(stage.gpu == gpu for stage in plan.stages)


def _is_link_bound(evaluation: Evaluation) -> bool:
    """Return whether a link between devices, and no device, sets the pace."""
    return max(evaluation.hand_overs_s, default=0.0) > max(stage.time_s for stage in evaluation.stages)


def _find_bottleneck(parts_s: Mapping[str, float], idle_s: float, *, slow_link: bool) -> Bound:
    kinds_s = {kind: parts_s[f"{kind}_s"] for kind in (Bound.TENSOR, Bound.SEQUENCE, Bound.EXPERT, Bound.DATA)}
    shares_s = {
        Bound.COMPUTE: parts_s["compute_s"],
        max(kinds_s, key=kinds_s.__getitem__): sum(kinds_s.values()),
        Bound.OTHER: parts_s["other_s"],
        Bound.HAND_OVER if slow_link else Bound.BUBBLE: idle_s,
    }
    return max(shares_s, key=shares_s.__getitem__)
