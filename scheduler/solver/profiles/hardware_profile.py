"""HardwareProfile: one GPU model, the links between its GPUs, and what its training worker can do."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from math import ceil, floor

from scheduler.solver.profiles.profile_document import ProfileError, require_non_negative, require_positive


class Dimension(StrEnum):
    """A way to spread or shrink a model that a worker may support.

    `zero` is ZeRO-1 and ZeRO-2, `fsdp` ZeRO-3 over all replicas, `hybrid_shard` ZeRO-3 inside a node and plain data
    parallelism across nodes. `pipeline` is 1F1B; `gpipe` and `interleave` (interleaved 1F1B) come on top of it.
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


class Precision(StrEnum):
    """Number format of training with AdamW: bf16 with fp32 master weights, or fp32 throughout."""

    BF16 = "bf16"
    FP32 = "fp32"

    @property
    def value_bytes(self) -> int:
        """Bytes of a weight or an activation on its way between GPUs and layers."""
        return 2 if self is Precision.BF16 else 4

    @property
    def gradient_bytes(self) -> int:
        """Of a gradient while it is summed over micro-batches: fp32 (Megatron-LM, distributed optimizer)."""
        return 4

    @property
    def optimizer_bytes(self) -> int:
        """Of a parameter: moments, and in bf16 a master weight (ZeRO, arXiv 1910.02054, section 3.1)."""
        return 12 if self is Precision.BF16 else 8

    @property
    def fsdp_bytes(self) -> int:
        """Of a parameter under ZeRO-3: its fp32 weight is the master too (PyTorch FSDP, arXiv 2304.11277)."""
        return 16


class Collective(StrEnum):
    """What a measured table times. An all-gather and a reduce-scatter count as half an all-reduce."""

    ALL_REDUCE = "all_reduce"
    ALL_TO_ALL = "all_to_all"


@dataclass(frozen=True, slots=True)
class CollectiveTable:
    """Measured times of one collective over `ranks` GPUs: `points` are (message bytes, seconds), bytes ascending."""

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
    """One GPU model. Bandwidths are what a collective reaches, one direction, per GPU.

    Attributes:
        memory_bytes: of one GPU; `reserve_bytes` of it, and `reserve_ratio` of what a plan needs beyond that, are
            never planned (context, communication library, allocator fragmentation).
        peak_flops_per_s: by datasheet, at `precision`; `efficiency` is the share that a matrix product reaches beside
            moving its operands, which makes small and thin products slower than large ones.
        attention_efficiency: the same for a fused attention core; 0 means as `efficiency`.
        unaligned_slowdown: at least 1; by how much longer the head's product takes where the vocabulary is split evenly
            into columns that are no multiple of 8 a tensor rank; uneven ones are padded.
        memory_bandwidth_bytes_per_s: what kernels reach of the GPU's own memory; bounds operands, element-wise
            kernels and the optimizer step.
        launch_s: the host's time to launch the kernels of one layer's forward pass; no pass is faster.
        iteration_overhead_s: once an iteration (data, clipping, host work), whatever the plan.
        intra_latency_s, inter_latency_s: start of a collective or message; `intra_hop_s` and `inter_hop_s` come on
            top for each further step of a ring or tree.
        overlap_coefficient: at least 1; by how much computing and communicating slow each other while they overlap.
        gradient_overlap: share of the gradient reduction that runs beside the backward pass (0 to 1).
        gpus_per_nic: GPUs of a node for each of its network ports; `inter_bandwidth_bytes_per_s` is that of a port, so
            that of a GPU only where each has its own (1).
        expert_imbalance: load of the fullest expert-parallel rank over the mean one, at least 1.
        expert_priority: all-to-alls go before all-reduces on the network (Lina, ATC'23), instead of sharing it.
        host_bandwidth_bytes_per_s: of one GPU to the host and back; `host_optimizer_s_per_parameter` is the host's
            Adam on one GPU's behalf, all GPUs of the node at work. 0 where offload is not supported.
        collectives: measured times, which replace the formulas wherever there is a table for the number of ranks.
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
    reserve_ratio: float = 0.0
    attention_efficiency: float = 0.0
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
    collectives: tuple[CollectiveTable, ...] = ()

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
        timed = [(table.collective.value, table.ranks) for table in self.collectives]
        for name, ranks in timed:
            if timed.count((name, ranks)) > 1:
                raise ProfileError(f"{owner}: collectives has more than one {name} over {ranks} ranks; one is needed")
        if Dimension.DATA not in self.dimensions:
            raise ProfileError(f"{owner}: dimensions must contain {Dimension.DATA.value!r}")
        if self.supports(Dimension.OFFLOAD):
            require_positive(owner, **{name: getattr(self, name) for name in _OFFLOAD_FIELDS})

    def supports(self, dimension: Dimension) -> bool:
        return dimension in self.dimensions

    def nics_per_gpu(self, gpus: int) -> float:
        """Network ports for each of `gpus` GPUs of one node that all send at once; at most 1."""
        return ceil(gpus / self.gpus_per_nic) / gpus

    def network_bandwidth_bytes_per_s(self, gpus: int) -> float:
        """What each of them reaches; what leaves a GPU for the network passes the links inside the node too."""
        return min(self.intra_bandwidth_bytes_per_s, self.nics_per_gpu(gpus) * self.inter_bandwidth_bytes_per_s)

    def plannable_bytes(self, limit_bytes: int) -> int:
        """What a plan may count on of `limit_bytes`; negative if the reserve alone is larger."""
        planned = floor((limit_bytes - self.reserve_bytes) / (1 + self.reserve_ratio))
        return planned - (self.occupied_bytes(planned) > limit_bytes)  # Rounding may differ by one byte.

    def occupied_bytes(self, planned_bytes: int) -> int:
        """What a plan that counts `planned_bytes` takes of the GPU."""
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
    "reserve_ratio",
    "attention_efficiency",
    "launch_s",
    "iteration_overhead_s",
    "intra_hop_s",
    "inter_hop_s",
    "gradient_overlap",
    *_OFFLOAD_FIELDS,
)
_AT_MOST_1 = ("efficiency", "attention_efficiency", "gradient_overlap")
_AT_LEAST_1 = ("overlap_coefficient", "expert_imbalance", "unaligned_slowdown", "gpus_per_nic")
