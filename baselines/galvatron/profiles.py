"""Galvatron's measurements of a model and of a cluster, and the reading of its JSON fields.

Times are in ms, memory and messages in MB (2^20 bytes).
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from scheduler.solver.profiles.profile_document import ProfileError

_T = TypeVar("_T")
_LARGEST = 1e15
_LARGEST_COUNT = 2**31 - 1
_DEGREE = re.compile(r"[1-9]\d{0,8}", re.ASCII)


class ByDegree(dict[int, _T]):
    """A profiled table by group size. A missing size raises an error that names the profiled ones."""

    def __init__(self, name: str, members: Iterable[tuple[int, _T]]) -> None:
        super().__init__(members)
        self.name = name

    def __missing__(self, degree: int) -> _T:
        raise ProfileError(f"{self.name}: degree {degree} is not profiled; profiled are {sorted(self)}")


@dataclass(frozen=True, slots=True)
class JsonField:
    """A value of a JSON document with its dotted name, which begins with the file. All readers raise ProfileError."""

    name: str
    value: Any

    @classmethod
    def from_file(cls, path: Path) -> JsonField:
        try:
            return cls(path.name, json.loads(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise ProfileError(f"{path.name}: {error.strerror}; it must be a readable file in {path.parent}") from error
        except (ValueError, RecursionError) as error:
            raise ProfileError(f"{path.name}: not JSON: {error}") from error

    def reject(self, allowed: str) -> NoReturn:
        raise ProfileError(f"{self.name} is {reprlib.repr(self.value)}; it must be {allowed}")

    def members(self) -> dict[str, JsonField]:
        if not isinstance(self.value, dict):
            self.reject("a JSON object")
        return {key: JsonField(f"{self.name}.{key}", value) for key, value in self.value.items()}

    def items(self) -> list[JsonField]:
        if not isinstance(self.value, list):
            self.reject("a list")
        return [JsonField(f"{self.name}[{number}]", value) for number, value in enumerate(self.value)]

    def __getitem__(self, key: str) -> JsonField:
        found = self.members().get(key)
        if found is None:
            raise ProfileError(f"{self.name}: field {key!r} is missing")
        return found

    def get(self, key: str, default: Any = None) -> JsonField:
        return self.members().get(key, JsonField(f"{self.name}.{key}", default))

    def read_number(self, minimum: float = 1 / _LARGEST) -> float:
        """Return a number that stays finite in every formula of the cost model."""
        is_number = isinstance(self.value, int | float) and not isinstance(self.value, bool)
        if not (is_number and minimum <= self.value <= _LARGEST):
            self.reject(f"a number from {minimum:g} to {_LARGEST:g}")
        return float(self.value)

    def read_int(self, maximum: int = _LARGEST_COUNT) -> int:
        if type(self.value) is not int or not 1 <= self.value <= maximum:
            self.reject(f"a whole number from 1 to {maximum}")
        return self.value

    def read_choice(self, *allowed: str) -> str:
        if self.value not in allowed:
            self.reject(" or ".join(map(repr, allowed)))
        return str(self.value)

    def read_text(self) -> str:
        if not isinstance(self.value, str):
            self.reject("a string")
        return self.value

    def list_degrees(self) -> list[int]:
        return [int(key) for key in self.members() if _DEGREE.fullmatch(key)]

    def read_by_degree(self) -> ByDegree[float]:
        """Return the members named 1, 2, 4, ..., as positive numbers."""
        return ByDegree(self.name, [(degree, self[str(degree)].read_number()) for degree in self.list_degrees()])


@dataclass(frozen=True, slots=True)
class LinearFit:
    """`slope` x + `intercept`, but never below 0, which a fit may cross near its small points."""

    slope: float
    intercept: float = 0.0

    def evaluate(self, x: float) -> float:
        return max(0.0, self.slope * x + self.intercept)


@dataclass(frozen=True, slots=True)
class LatencyTable:
    """Measured latencies (ms) by message size (MB), with the line through them for all other sizes."""

    measured_ms: Mapping[float, float]
    line: LinearFit

    def get_latency_ms(self, message_mb: float) -> float:
        exact = self.measured_ms.get(message_mb)
        return self.line.evaluate(message_mb) if exact is None else exact


@dataclass(frozen=True, slots=True)
class EmbeddingMemory:
    """Embedding and head on one GPU: states by tensor degree, activations per sample by tensor or Ulysses degree."""

    states_mb: ByDegree[float]
    activation_mb: ByDegree[float]


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """One kind of layer, repeated `layers` times between an embedding and a head.

    Attributes:
        layer_forward_ms, embedding_forward_ms: as functions of the samples of one GPU; the latter is for embedding and
            head together.
        activation_mb, recompute_mb: per sample; `recompute_mb` remain under full recompute.
        alone: memory of embedding and head in one stage; `first` and `last` are for several stages.
    """

    name: str
    layers: int
    hidden: int
    sequence: int
    layer_forward_ms: LinearFit
    embedding_forward_ms: LinearFit
    parameter_mb: float
    activation_mb: ByDegree[float]
    recompute_mb: float
    alone: EmbeddingMemory
    first: EmbeddingMemory
    last: EmbeddingMemory

    @property
    def boundary_mb(self) -> float:
        """Size of one sample's hidden states in bf16."""
        return self.sequence * self.hidden * 2 / 2**20


@dataclass(frozen=True, slots=True)
class ClusterProfile:
    """Group communication on `gpus` GPUs, by group size.

    `neighbour_ms_per_mb` is for an all-reduce among consecutive ranks, `strided_ms_per_mb` among equally spaced ones.
    `overlap` (at least 1) is how much longer computation and communication take while they share a GPU.
    """

    gpus: int
    neighbour_ms_per_mb: ByDegree[float]
    strided_ms_per_mb: ByDegree[float]
    p2p_ms_per_mb: ByDegree[float]
    overlap: float
    all_gather: ByDegree[LatencyTable]
    all_to_all: ByDegree[LatencyTable]

    def all_reduce_ms_per_mb(self, group: int, *, strided: bool) -> float:
        return _get_nearest_measured(
            self.strided_ms_per_mb if strided and group != self.gpus else self.neighbour_ms_per_mb, group
        )

    def hand_over_ms_per_mb(self, stages: int) -> float:
        return _get_nearest_measured(self.p2p_ms_per_mb, stages)


@dataclass(frozen=True, slots=True)
class GalvatronCase:
    """A profile with the question asked of it; `micro_batches` is None if it is free.

    `async_reduce`: gradients are reduced after each micro-batch, in bf16, instead of being kept in fp32.
    """

    model: ModelProfile
    cluster: ClusterProfile
    async_reduce: bool
    memory_gb: float
    global_batch: int
    micro_batches: int | None


def _get_nearest_measured(table: ByDegree[float], degree: int) -> float:
    """Return the cost at `degree`.

    Degrees between powers of two are rarely profiled. They take the higher cost of their two neighbors.
    """
    if degree == 1:
        return 0.0
    if degree in table or degree & (degree - 1) == 0:
        return table[degree]
    below = 1 << (degree.bit_length() - 1)
    return max(table[below], table[2 * below])
