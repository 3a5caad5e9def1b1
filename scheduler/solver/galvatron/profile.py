"""What Galvatron measured of a model and of a cluster. Times in ms, memory and messages in MB (2^20 bytes)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from scheduler.solver.galvatron.entry import ByDegree


@dataclass(frozen=True, slots=True)
class Line:
    """`slope` x + `intercept`, but never below 0, which a fit may cross near its small points."""

    slope: float
    intercept: float = 0.0

    def at(self, x: float) -> float:
        return max(0.0, self.slope * x + self.intercept)


@dataclass(frozen=True, slots=True)
class LatencyTable:
    """Measured latencies (ms) by message size (MB), with the line through them for sizes in between and beyond."""

    measured_ms: Mapping[float, float]
    line: Line

    def ms(self, message_mb: float) -> float:
        exact = self.measured_ms.get(message_mb)
        return self.line.at(message_mb) if exact is None else exact


@dataclass(frozen=True, slots=True)
class EmbeddingMemory:
    """Embedding and head on one GPU: states by tensor degree, activation per sample by tensor or Ulysses degree."""

    states_mb: ByDegree[float]
    activation_mb: ByDegree[float]


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """One kind of layer repeated `layers` times, between an embedding and a head.

    `layer_forward_ms` and `embedding_forward_ms` (embedding and head together) take the samples of one GPU.
    `activation_mb` and `recompute_mb` (what recompute keeps) are per sample. Embedding and head are measured `alone`
    in one stage, and as the `first` and the `last` of several.
    """

    name: str
    layers: int
    hidden: int
    sequence: int
    layer_forward_ms: Line
    embedding_forward_ms: Line
    parameter_mb: float
    activation_mb: ByDegree[float]
    recompute_mb: float
    alone: EmbeddingMemory
    first: EmbeddingMemory
    last: EmbeddingMemory

    @property
    def boundary_mb(self) -> float:
        """One sample's hidden states in bf16."""
        return self.sequence * self.hidden * 2 / 2**20


@dataclass(frozen=True, slots=True)
class ClusterProfile:
    """Group communication on `gpus` GPUs, by group size.

    `neighbour_ms_per_mb` is all-reduce among consecutive ranks, `strided_ms_per_mb` among equally spaced ones;
    `overlap` (1 or more) is how much longer computation and communication take while they share a GPU.
    """

    gpus: int
    neighbour_ms_per_mb: ByDegree[float]
    strided_ms_per_mb: ByDegree[float]
    p2p_ms_per_mb: ByDegree[float]
    overlap: float
    all_gather: ByDegree[LatencyTable]
    all_to_all: ByDegree[LatencyTable]

    def all_reduce_ms_per_mb(self, group: int, *, strided: bool) -> float:
        return _measured(self.strided_ms_per_mb if strided and group != self.gpus else self.neighbour_ms_per_mb, group)

    def hand_over_ms_per_mb(self, stages: int) -> float:
        return _measured(self.p2p_ms_per_mb, stages)


@dataclass(frozen=True, slots=True)
class GalvatronCase:
    """A profile with the question asked of it; `micro_batches` is None where it is free.

    `async_reduce`: gradients are reduced after each micro-batch, in bf16, instead of kept in fp32.
    """

    model: ModelProfile
    cluster: ClusterProfile
    async_reduce: bool
    memory_gb: float
    global_batch: int
    micro_batches: int | None


def _measured(table: ByDegree[float], degree: int) -> float:
    """Cost at `degree`; between powers of two (seldom profiled) the dearer of the two neighbours."""
    if degree == 1:
        return 0.0
    if degree in table or degree & (degree - 1) == 0:
        return table[degree]
    below = 1 << (degree.bit_length() - 1)
    return max(table[below], table[2 * below])
