"""HardwareProfile: one GPU model, the links between its GPUs, and the strategies that its training worker supports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from math import ceil, floor
from types import MappingProxyType

from scheduler.solver.profiles.profile_document import (
    ProfileError,
    require_non_negative,
    require_positive,
    require_range,
)
from scheduler.solver.profiles.training_software import KERNEL_SPEEDS


class Dimension(StrEnum):
    """A way to parallelise or shrink a model that a worker may support.

    `zero` is ZeRO-1 and ZeRO-2, `fsdp` is ZeRO-3 over all replicas. `hybrid_shard` is ZeRO-3 within a node and plain
    data parallelism between nodes. `pipeline` is 1F1B; `gpipe` and `interleave` (interleaved 1F1B) require it.
    `offload_parameters` requires `offload`, and `offload_activations` requires `recompute`.
    """

    DATA = "data"
    FSDP = "fsdp"
    ZERO = "zero"
    HYBRID_SHARD = "hybrid_shard"
    TENSOR = "tensor"
    SEQUENCE_SHARDING = "sequence_sharding"
    ULYSSES = "ulysses"
    RING = "ring"
    EXPERT = "expert"
    PIPELINE = "pipeline"
    INTERLEAVE = "interleave"
    GPIPE = "gpipe"
    RECOMPUTE = "recompute"
    SELECTIVE_RECOMPUTE = "selective_recompute"
    OFFLOAD = "offload"
    OFFLOAD_PARAMETERS = "offload_parameters"
    OFFLOAD_ACTIVATIONS = "offload_activations"


STREAMED_DIMENSIONS = MappingProxyType(
    {Dimension.OFFLOAD_PARAMETERS: Dimension.OFFLOAD, Dimension.OFFLOAD_ACTIVATIONS: Dimension.RECOMPUTE}
)
"""Dimensions that move data over the host link in every micro-batch, and the one that each of them requires."""


class Precision(StrEnum):
    """Number format of training: bf16 or fp16 with fp32 master weights, or fp32 throughout.

    fp16 takes as many bytes as bf16 and as much time.
    """

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"

    @property
    def value_bytes(self) -> int:
        """Bytes of a weight or an activation as it is sent between GPUs and layers."""
        return 4 if self is Precision.FP32 else 2

    @property
    def gradient_bytes(self) -> int:
        """Bytes of a gradient that is accumulated over micro-batches: fp32 (Megatron-LM, distributed optimizer)."""
        return 4

    @property
    def master_bytes(self) -> int:
        """Bytes per parameter of the fp32 master weight of a 16-bit weight (ZeRO, arXiv 1910.02054, section 3.1)."""
        return 0 if self is Precision.FP32 else 4

    @property
    def fsdp_bytes(self) -> int:
        """Bytes per parameter of weight and gradient under ZeRO-3, where the fp32 weight is the master weight.

        Source: PyTorch FSDP, arXiv 2304.11277.
        """
        return 8


class Collective(StrEnum):
    """The collective that a measured table times. An all-gather and a reduce-scatter count as half an all-reduce."""

    ALL_REDUCE = "all_reduce"
    ALL_TO_ALL = "all_to_all"


@dataclass(frozen=True, slots=True)
class CollectiveTable:
    """Measured times of one collective over `ranks` GPUs:

    `points` are (message bytes, seconds), in ascending order of bytes.
    """

    collective: Collective
    ranks: int
    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        owner = f"measured {self.collective.value} over {self.ranks} ranks"
        if self.ranks < 2:
            raise ProfileError(f"measured {self.collective.value}: ranks is {self.ranks}; it must be at least 2")
        if len(self.points) < 2:
            raise ProfileError(f"{owner}: points has {len(self.points)} entries; at least 2 are needed")
        for size_bytes, time_s in self.points:
            require_positive(owner, bytes=size_bytes, seconds=time_s)
        for (small, quick), (large, slow) in pairwise(self.points):
            if not (small < large and quick <= slow):
                raise ProfileError(f"{owner}: points must rise from ({small}, {quick}) to ({large}, {slow})")


@dataclass(frozen=True, slots=True)
class HardwareProfile:
    """One GPU model. Bandwidths are those that a collective achieves, in one direction, per GPU.

    Attributes:
        memory_bytes: of one GPU. A plan never uses `reserve_bytes` of it, nor `reserve_ratio` times what the plan
            itself needs: they cover context, communication library and allocator fragmentation.
        peak_flops_per_s: by datasheet, at `precision`. `efficiency` is the share of it that a matrix product achieves
            apart from moving its operands, so small and thin products are slower than large ones.
        attention_efficiency: the same for a fused attention core; 0 means the same as `efficiency`. Other kernels are
            relative to it, up to `attention_generation`, the newest one for this GPU (`AttentionKernel`).
        unaligned_slowdown: at least 1; how much longer the head's product takes if each tensor-parallel rank has a
            number of vocabulary columns that is no multiple of 8. A vocabulary that does not divide evenly is padded
            instead.
        memory_bandwidth_bytes_per_s: achieved by kernels on the GPU's own memory; limits operands, element-wise kernels
            and the optimizer step.
        launch_s: time of the host to launch the kernels of one layer's forward pass; no pass is faster.
        iteration_overhead_s: fixed time per iteration for data, clipping and host work.
        intra_latency_s, inter_latency_s: start-up time of a collective or message within a node and between nodes;
            `intra_hop_s` and `inter_hop_s` are added for each further step of a ring or tree.
        overlap_coefficient: at least 1; how much computation and communication slow each other down while they overlap.
        gradient_overlap: share of the gradient reduction that overlaps with the backward pass, from 0 to 1.
        gpus_per_nic: GPUs of a node per network port. `inter_bandwidth_bytes_per_s` is that of a port, and so that of a
            GPU only if each GPU has its own port (1).
        expert_imbalance: load of the fullest expert-parallel rank over the mean, at least 1.
        expert_priority: all-to-alls take precedence over all-reduces on the network (Lina, ATC'23), instead of sharing
            it.
        host_bandwidth_bytes_per_s: between one GPU and the host. `host_optimizer_s_per_parameter` is the time of Adam
            on the host for one GPU while all GPUs of the node do the same. 0 if offload is not supported.
        host_memory_bytes: share of one GPU in the memory of its node, for state that plans keep on the host; 0 if
            unknown, and then without a limit.
        fp8_speedup: peak rate of matrix products in fp8 over that in `precision`; 0 if the chip has no fp8.
        prediction_error: 95th percentile of the relative errors of predicted step times, on runs that were not used for
            the profile where it can be; 0 if unknown.
        collectives: measured times, which replace the formulas for these numbers of ranks: between nodes if they are
            more than the GPUs of a node, else within a node.
        dimensions: the strategies that the worker for this GPU supports.
        precisions: the number formats that matrix products of the chip support; empty if the profile does not say.
        kept_bytes: memory of one GPU that sleeping replicas of inference keep on lent nodes, which no plan uses. It
            comes from the pools of the fleet, not from the profile.
        estimated: the profile was derived from what a machine reports, not written for this GPU model.
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
    reserve_ratio: float = 0.0
    attention_efficiency: float = 0.0
    attention_generation: int = 1
    unaligned_slowdown: float = 1.0
    launch_s: float = 0.0
    iteration_overhead_s: float = 0.0
    intra_hop_s: float = 0.0
    inter_hop_s: float = 0.0
    gradient_overlap: float = 1.0
    gpus_per_nic: float = 1.0
    expert_imbalance: float = 1.0
    expert_priority: bool = False
    host_bandwidth_bytes_per_s: float = 0.0
    host_optimizer_s_per_parameter: float = 0.0
    host_memory_bytes: int = 0
    fp8_speedup: float = 0.0
    prediction_error: float = 0.0
    collectives: tuple[CollectiveTable, ...] = ()
    estimated: bool = False
    precisions: frozenset[Precision] = frozenset()
    kept_bytes: int = 0

    def __post_init__(self) -> None:
        owner = f"GPU {self.gpu!r}"
        require_positive(owner, **{name: getattr(self, name) for name in _POSITIVE_FIELDS})
        require_non_negative(owner, **{name: getattr(self, name) for name in _NON_NEGATIVE_FIELDS})
        for name in _AT_MOST_1:
            if not getattr(self, name) <= 1:
                raise ProfileError(f"{owner}: {name} is {getattr(self, name)}; it must be at most 1")
        for name in _AT_LEAST_1:
            if not getattr(self, name) >= 1:
                raise ProfileError(f"{owner}: {name} is {getattr(self, name)}; it must be at least 1")
        if self.attention_generation not in range(1, len(KERNEL_SPEEDS)):
            allowed = f"it must be a whole number from 1 to {len(KERNEL_SPEEDS) - 1}"
            raise ProfileError(f"{owner}: attention_generation is {self.attention_generation}; {allowed}")
        timed = [(table.collective.value, table.ranks) for table in self.collectives]
        for name, ranks in timed:
            if timed.count((name, ranks)) > 1:
                raise ProfileError(f"{owner}: collectives has more than one {name} over {ranks} ranks; keep one")
        if self.precisions and self.precision not in self.precisions:
            raise ProfileError(
                f"{owner}: precision is {self.precision.value!r}, which the GPU does not support; "
                f"allowed are {', '.join(sorted(self.precisions))}"
            )
        if Dimension.DATA not in self.dimensions:
            raise ProfileError(f"{owner}: dimensions must contain {Dimension.DATA.value!r}")
        if self.dimensions & {Dimension.OFFLOAD, *STREAMED_DIMENSIONS}:
            require_positive(owner, **{name: getattr(self, name) for name in _OFFLOAD_FIELDS})

    def supports(self, dimension: Dimension) -> bool:
        return dimension in self.dimensions

    def with_host_memory(self, host_memory_bytes: int) -> HardwareProfile:
        """Return the profile for plans that may use this much host memory per GPU, also for streamed state.

        A streamed dimension is added if the one that it requires is supported, and the speed of the host link is known.
        """
        has_link = self.host_bandwidth_bytes_per_s > 0 and self.host_optimizer_s_per_parameter > 0
        streamed = {each for each, required in STREAMED_DIMENSIONS.items() if has_link and self.supports(required)}
        return replace(self, host_memory_bytes=host_memory_bytes, dimensions=self.dimensions | streamed)

    def without_streaming(self) -> HardwareProfile:
        """Return the profile without the dimensions that use the host link in every micro-batch."""
        return replace(self, dimensions=self.dimensions.difference(STREAMED_DIMENSIONS))

    def trains_in(self, precision: Precision) -> bool:
        """Return whether the profile's figures hold for training in `precision`.

        They hold for formats of the same width. A chip with bf16 also has fp16, unless `precisions` says otherwise.
        """
        supported = self.precisions or {self.precision, Precision.FP16}
        return precision.value_bytes == self.precision.value_bytes and precision in supported

    def nics_per_gpu(self, gpus: int) -> float:
        """Return the network ports per GPU, at most 1, while `gpus` GPUs of one node send at the same time."""
        return ceil(gpus / self.gpus_per_nic) / gpus

    def network_bandwidth_bytes_per_s(self, gpus: int) -> float:
        """Return the network bandwidth of each of `gpus` GPUs of one node.

        Traffic to the network also passes the links within the node.
        """
        return min(self.intra_bandwidth_bytes_per_s, self.nics_per_gpu(gpus) * self.inter_bandwidth_bytes_per_s)

    def plannable_bytes(self, limit_bytes: int) -> int:
        """Return the bytes that a plan may use out of `limit_bytes`; negative if the reserve alone is larger."""
        planned = floor((limit_bytes - self.reserve_bytes) / (1 + self.reserve_ratio))
        return planned - (self.occupied_bytes(planned) > limit_bytes)  # Rounding can be off by one byte.

    def occupied_bytes(self, planned_bytes: int) -> int:
        """Return the GPU memory that a plan of `planned_bytes` occupies, reserve included."""
        return self.reserve_bytes + ceil(planned_bytes * (1 + self.reserve_ratio))


_POSITIVE_FIELDS = (
    "memory_bytes",
    "peak_flops_per_s",
    "efficiency",
    "memory_bandwidth_bytes_per_s",
    "intra_bandwidth_bytes_per_s",
    "intra_latency_s",
    "inter_bandwidth_bytes_per_s",
    "inter_latency_s",
    "overlap_coefficient",
    "expert_imbalance",
    "unaligned_slowdown",
    "gpus_per_nic",
)
_OFFLOAD_FIELDS = ("host_bandwidth_bytes_per_s", "host_optimizer_s_per_parameter")
_NON_NEGATIVE_FIELDS = (
    "reserve_bytes",
    "kept_bytes",
    "reserve_ratio",
    "attention_efficiency",
    "launch_s",
    "iteration_overhead_s",
    "intra_hop_s",
    "inter_hop_s",
    "gradient_overlap",
    "fp8_speedup",
    "prediction_error",
    "host_memory_bytes",
    *_OFFLOAD_FIELDS,
)
_AT_MOST_1 = ("efficiency", "attention_efficiency", "gradient_overlap")
_AT_LEAST_1 = ("overlap_coefficient", "expert_imbalance", "unaligned_slowdown", "gpus_per_nic")
_BANDWIDTHS, _TIMES = (1e3, 1e14), (0.0, 60.0)
_PLAUSIBLE: Mapping[str, tuple[float, float, str]] = MappingProxyType(
    {
        "memory_bytes": (1e8, 1e13, "bytes"),
        "peak_flops_per_s": (1e6, 1e18, "flop/s"),
        "memory_bandwidth_bytes_per_s": (1e6, 1e15, "bytes/s"),
        "intra_bandwidth_bytes_per_s": (*_BANDWIDTHS, "bytes/s"),
        "inter_bandwidth_bytes_per_s": (*_BANDWIDTHS, "bytes/s"),
        "host_bandwidth_bytes_per_s": (0.0, _BANDWIDTHS[1], "bytes/s"),
        "intra_latency_s": (*_TIMES, "s"),
        "inter_latency_s": (*_TIMES, "s"),
        "intra_hop_s": (*_TIMES, "s"),
        "inter_hop_s": (*_TIMES, "s"),
        "launch_s": (*_TIMES, "s"),
        "iteration_overhead_s": (*_TIMES, "s"),
        "host_optimizer_s_per_parameter": (0.0, 1e-3, "s/parameter"),
        "host_memory_bytes": (0.0, 1e14, "bytes"),
        "fp8_speedup": (0.0, 8.0, "(a ratio)"),
        "reserve_ratio": (0.0, 1.0, "(a share)"),
    }
)
"""Limits that no device is near to. Figures outside them are mostly in another unit, such as GB/s or milliseconds."""


def require_plausible(hardware: HardwareProfile) -> None:
    """Check that the figures of a GPU profile are those of a possible device.

    Raises:
        ProfileError: a figure is out of the range of any device, or the reserve leaves no memory.
    """
    owner = f"GPU {hardware.gpu!r}"
    for name, (lower, upper, unit) in _PLAUSIBLE.items():
        require_range(owner, name, getattr(hardware, name), (lower, upper), unit)
    if hardware.reserve_bytes >= hardware.memory_bytes:
        raise ProfileError(
            f"{owner}: reserve_bytes is {hardware.reserve_bytes}; it must be less than memory_bytes, "
            f"which is {hardware.memory_bytes}"
        )
