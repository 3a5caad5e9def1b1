"""HardwareProfile: one GPU model, the links between its GPUs, and what its training worker can do."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from scheduler.solver.profiles.profile_error import ProfileError, require_not_negative, require_positive


class Dimension(StrEnum):
    """A way to spread or shrink a model that a worker may support."""

    DATA = "data"
    FSDP = "fsdp"
    TENSOR = "tensor"
    PIPELINE = "pipeline"
    RECOMPUTE = "recompute"


class Precision(StrEnum):
    """Number format of training with AdamW: bf16 with fp32 master weights, or fp32 throughout."""

    BF16 = "bf16"
    FP32 = "fp32"

    @property
    def value_bytes(self) -> int:
        """Bytes of a weight, a gradient or an activation on its way between GPUs and layers."""
        return 2 if self is Precision.BF16 else 4

    @property
    def state_bytes_per_parameter(self) -> int:
        """Weight, gradient and optimizer state: 2 + 2 + 12 in bf16 (ZeRO, arXiv 1910.02054, section 3.1),
        4 + 4 + 8 in fp32, which needs no master copy."""
        return 16


@dataclass(frozen=True, slots=True)
class HardwareProfile:
    """One GPU model. Bandwidths are what a collective reaches, one direction, per GPU.

    Attributes:
        memory_bytes: of one GPU; `reserve_bytes` of it are never planned (context, buffers, fragmentation).
        peak_flops_per_s: by datasheet, at `precision`; `efficiency` is the share that dense layers reach.
        memory_bandwidth_bytes_per_s: of the GPU's own memory, which bounds the optimizer step.
        overlap_coefficient: at least 1; by how much computing and communicating slow each other while they overlap.
        dimensions: the strategies that the worker for this GPU supports.
    """

    gpu: str
    memory_bytes: int
    reserve_bytes: int
    precision: Precision
    peak_flops_per_s: float
    efficiency: float
    memory_bandwidth_bytes_per_s: float
    intra_bandwidth_bytes_per_s: float
    intra_latency_s: float
    inter_bandwidth_bytes_per_s: float
    inter_latency_s: float
    overlap_coefficient: float
    dimensions: frozenset[Dimension]

    def __post_init__(self) -> None:
        owner = f"GPU {self.gpu!r}"
        require_positive(
            owner,
            memory_bytes=self.memory_bytes,
            peak_flops_per_s=self.peak_flops_per_s,
            efficiency=self.efficiency,
            memory_bandwidth_bytes_per_s=self.memory_bandwidth_bytes_per_s,
            intra_bandwidth_bytes_per_s=self.intra_bandwidth_bytes_per_s,
            intra_latency_s=self.intra_latency_s,
            inter_bandwidth_bytes_per_s=self.inter_bandwidth_bytes_per_s,
            inter_latency_s=self.inter_latency_s,
        )
        require_not_negative(owner, reserve_bytes=self.reserve_bytes)
        if self.efficiency > 1:
            raise ProfileError(f"{owner}: efficiency is {self.efficiency}; it must be at most 1")
        if not self.overlap_coefficient >= 1:
            raise ProfileError(f"{owner}: overlap_coefficient is {self.overlap_coefficient}; it must be at least 1")
        if Dimension.DATA not in self.dimensions:
            raise ProfileError(f"{owner}: dimensions must contain {Dimension.DATA.value!r}")

    @property
    def flops_per_s(self) -> float:
        """What dense layers reach."""
        return self.peak_flops_per_s * self.efficiency

    def supports(self, dimension: Dimension) -> bool:
        return dimension in self.dimensions
