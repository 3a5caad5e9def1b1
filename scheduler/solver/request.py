"""SolveRequest: a validated question to the solver, and the answer if there is no plan."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import combinations
from math import gcd

from scheduler.domain.gpu_sets import GpuShape
from scheduler.domain.job_records import MEMORY_PERCENT_MIN
from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.domain.plan_limits import NO_LIMITS, PlanLimits
from scheduler.solver.costs.collectives import StageSetting
from scheduler.solver.profiles.hardware_profile import STREAMED_DIMENSIONS, HardwareProfile, Precision
from scheduler.solver.profiles.model_profile import ModelProfile
from scheduler.solver.profiles.training_software import MatrixProducts


class RequestError(ValueError):
    """A request that contradicts itself. The message names the field, the value and the accepted values."""


@dataclass(frozen=True, slots=True)
class DeviceGroup:
    """All GPUs of one model in a shape.

    `node_gpus` is the number of GPUs that every node can give to one group of ranks: the greatest common divisor of the
    nodes' shares. On 1x2 + 2x1 this is 1, because a tensor-parallel group of 2 would have to cross nodes somewhere.
    `node_gpus_min` is the smallest share: a group that spans all nodes can use the network ports of that many GPUs in
    each.
    """

    hardware: HardwareProfile
    gpus: int
    node_gpus: int
    node_gpus_min: int
    limit_bytes: int

    @property
    def capacity_bytes(self) -> int:
        """Memory of one GPU that a plan may use, without the reserve."""
        return self.hardware.plannable_bytes(self.limit_bytes)

    def build_stage_setting(self, gpus: int, global_batch: int) -> StageSetting:
        """Return the cost setting of stages with `gpus` of these GPUs."""
        least = self.node_gpus_min if gpus == self.gpus else 0
        return StageSetting.for_stage(
            self.hardware, node_gpus=self.node_gpus, gpus=gpus, global_batch=global_batch, node_gpus_min=least
        )


@dataclass(frozen=True, slots=True)
class SolveRequest:
    """A request for the fastest plan for `model` on `shape`.

    Attributes:
        hardware: one profile for each GPU model of the shape.
        global_batch: samples of one optimizer step over all GPUs.
        memory_bytes_max: memory per GPU that a plan may use, reserve included; 0: all that sleeping replicas leave.
        memory_percent: actual memory of a plan in percent of its predicted peak; a plan must fit with it.
        limits: what the plans may use.
    """

    model: ModelProfile
    hardware: tuple[HardwareProfile, ...]
    shape: GpuShape
    global_batch: int
    memory_bytes_max: int = 0
    memory_percent: int = 100
    limits: PlanLimits = NO_LIMITS

    def __post_init__(self) -> None:
        if self.limits == NO_LIMITS:
            object.__setattr__(self, "limits", NO_LIMITS)  # The search compares by identity, which is faster.
        if not self.shape.groups:
            raise RequestError("shape is empty; it must have at least one group of GPUs")
        profiled = [profile.gpu for profile in self.hardware]
        if sorted(profiled) != sorted({group.gpu for group in self.shape.groups}):
            raise RequestError(
                f"hardware is {', '.join(profiled)}; it must have one profile per GPU model of {self.shape}"
            )
        if self.precision is None:
            precisions = sorted({f"{profile.precision.value} ({profile.gpu})" for profile in self.hardware})
            raise RequestError(
                f"hardware has precisions {' and '.join(precisions)}; use GPU models that can train in the same one"
            )
        lacking = [profile.gpu for profile in self.hardware if not profile.fp8_speedup]
        if self.model.software.products is MatrixProducts.FP8 and lacking:
            raise RequestError(
                f"software.products is 'fp8', and {', '.join(lacking)} has no fp8; "
                "use 'plain', or GPU models whose profiles have fp8_speedup"
            )
        if self.global_batch < 1:
            raise RequestError(f"global_batch is {self.global_batch}; it must be at least 1")
        if self.memory_bytes_max < 0:
            raise RequestError(
                f"memory_bytes_max is {self.memory_bytes_max}; it must be 0 (all memory of the GPU) or above"
            )
        if self.memory_percent < MEMORY_PERCENT_MIN:
            raise RequestError(f"memory_percent is {self.memory_percent}; it must be at least {MEMORY_PERCENT_MIN}")

    @property
    def gpus(self) -> int:
        return self.shape.gpus

    @property
    def precision(self) -> Precision | None:
        """The number format that every GPU can train in, such as fp16 where only some have bf16; None if none is."""
        wanted = dict.fromkeys(profile.precision for profile in self.hardware)
        return next((each for each in wanted if all(profile.trains_in(each) for profile in self.hardware)), None)

    @property
    def groups(self) -> tuple[DeviceGroup, ...]:
        """One group per GPU model, in the order of the shape."""
        by_name = {profile.gpu: profile for profile in self.hardware}
        return tuple(
            self._build_device_group(by_name[gpu]) for gpu in dict.fromkeys(group.gpu for group in self.shape.groups)
        )

    def restrict_to_gpus(self, gpus: Collection[str]) -> SolveRequest:
        """Return the same request for the GPUs of these models only."""
        groups = tuple(group for group in self.shape.groups if group.gpu in gpus)
        hardware = tuple(profile for profile in self.hardware if profile.gpu in gpus)
        return replace(self, hardware=hardware, shape=GpuShape(groups))

    @property
    def may_stream(self) -> bool:
        """Whether a worker may use the host link in every micro-batch."""
        return any(profile.dimensions.intersection(STREAMED_DIMENSIONS) for profile in self.hardware)

    def for_plans_like(self, plan: ParallelPlan) -> SolveRequest:
        """Return the request whose plans use the host link in every micro-batch only if `plan` does."""
        is_streamed = any(
            strategy.offload_parameters or strategy.offload_activations
            for stage in plan.stages
            for strategy in stage.strategies
        )
        return self if is_streamed or not self.may_stream else self.without_streaming()

    def without_streaming(self) -> SolveRequest:
        """Return the same request for plans that use the host link at most once in a step."""
        return replace(self, hardware=tuple(profile.without_streaming() for profile in self.hardware))

    def list_parts(self) -> tuple[SolveRequest, ...]:
        """Return the same request for each proper subset of its GPU models, smallest first; none for one model."""
        gpus = [group.hardware.gpu for group in self.groups]
        sizes = range(1, len(gpus))
        return tuple(self.restrict_to_gpus(chosen) for size in sizes for chosen in combinations(gpus, size))

    def _build_device_group(self, hardware: HardwareProfile) -> DeviceGroup:
        members = [group for group in self.shape.groups if group.gpu == hardware.gpu]
        usable_bytes = max(1, hardware.memory_bytes - hardware.kept_bytes)
        limit_bytes = min(self.memory_bytes_max or usable_bytes, usable_bytes)
        limit_bytes = limit_bytes * 100 // self.memory_percent
        shares = [group.gpus_per_node for group in members]
        return DeviceGroup(hardware, sum(group.gpus for group in members), gcd(*shares), min(shares), limit_bytes)


@dataclass(frozen=True, slots=True)
class Infeasibility:
    """The reason why there is no plan.

    `constraint` is "memory", "batch" or "shape"; or "budget" if none was found within the budget of work, so that there
    may be one. `reason` gives the numbers and the smallest change that would help.
    """

    reason: str
    constraint: str
