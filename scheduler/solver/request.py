"""SolveRequest: one question to the solver, checked."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from scheduler.domain.gpu_shape import GpuShape
from scheduler.solver.profiles.hardware_profile import HardwareProfile
from scheduler.solver.profiles.model_profile import ModelProfile


class RequestError(ValueError):
    """A request that contradicts itself; the message names the field, the value and what is allowed."""


@dataclass(frozen=True, slots=True)
class SolveRequest:
    """The fastest plan for `model` on `shape` of `hardware` is wanted.

    Attributes:
        global_batch: samples of one optimizer step over all GPUs.
        memory_bytes_max: what a plan may take of one GPU, reserve included; 0 means all that the GPU has.
    """

    model: ModelProfile
    hardware: HardwareProfile
    shape: GpuShape
    global_batch: int
    memory_bytes_max: int = 0

    def __post_init__(self) -> None:
        if not self.shape.groups:
            raise RequestError("shape is empty; it needs at least one group of GPUs")
        if self.hardware.gpu not in {group.gpu for group in self.shape.groups}:
            raise RequestError(f"shape is {self.shape}; it must contain the profiled GPU {self.hardware.gpu!r}")
        if self.global_batch < 1:
            raise RequestError(f"global_batch is {self.global_batch}; it must be at least 1")
        if self.memory_bytes_max < 0:
            raise RequestError(f"memory_bytes_max is {self.memory_bytes_max}; it must be 0 (the GPU's) or above")

    @property
    def gpus(self) -> int:
        return self.shape.gpus

    @property
    def node_gpus(self) -> int:
        """GPUs that every node can give to one group: the greatest common divisor of the nodes' shares.

        On 1x2 + 2x1 this is 1: a tensor-parallel group of 2 would have to cross nodes in one place.
        """
        return gcd(*(group.gpus_per_node for group in self.shape.groups))

    @property
    def memory_limit_bytes(self) -> int:
        return self.memory_bytes_max or self.hardware.memory_bytes


@dataclass(frozen=True, slots=True)
class Infeasible:
    """No plan exists. `constraint` is "memory", "batch" or "shape" ("budget": none was found within the budget of
    work, so there may be one); `reason` says so with numbers."""

    reason: str
    constraint: str
