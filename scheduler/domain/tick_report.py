"""What one tick decided (TickResult) and what it did (TickReport)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from scheduler.domain.decisions import Decision, Reason
from scheduler.domain.events import Event
from scheduler.domain.fleet import DemandReading
from scheduler.domain.gpu_sets import GpuShape
from scheduler.domain.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class WantedShape:
    """A point of a curve that a policy looked for and did not find; it is solved next."""

    curve_key: str
    shape: GpuShape


class Invariant(StrEnum):
    """The laws of legality, each with the word that a violation is reported under."""

    UNKNOWN_SUBJECT = "unknown-subject"
    WRONG_STATE = "wrong-state"
    NO_REASON = "no-reason"
    GPU_HELD_TWICE = "gpu-held-twice"
    GPU_UNKNOWN = "gpu-unknown"
    NODE_NOT_SERVING = "node-not-serving-training"
    OUT_OF_RANGE = "gpus-out-of-range"
    WRONG_GPU_MODEL = "wrong-gpu-model"
    PLAN_SIZE_MISMATCH = "plan-world-size"
    RANK_PLACEMENT_MISMATCH = "seats-are-not-the-gpus"
    PEAK_MEMORY_EXCEEDED = "peak-bytes-above-gpu-memory"
    QUEUE_LIMIT_EXCEEDED = "over-a-limit-of-its-queue"
    NODE_STILL_USED = "node-still-used"
    DEADLINE_PASSED = "deadline-in-the-past"


@dataclass(frozen=True, slots=True)
class Violation:
    """An illegal decision: it was dropped."""

    law: Invariant
    subject: str
    detail: str


class BreachKind(StrEnum):
    RECALL_LATE = "recall-late"
    NODE_DOWN = "node-down"
    INFERENCE_SHORT = "inference-short"
    GPU_HELD_TWICE = "gpu-held-twice"
    ON_UNLENT_NODE = "training-on-unlent-node"


@dataclass(frozen=True, slots=True)
class Breach:
    """A broken promise in the world."""

    kind: BreachKind
    subject: str
    detail: str


@dataclass(frozen=True, slots=True)
class TickResult:
    """What `decide` returns: decisions in the order in which they apply, and why every other job waits."""

    decisions: tuple[Decision, ...] = ()
    waiting: Mapping[str, Reason] = field(default_factory=dict)
    wanted_shapes: tuple[WantedShape, ...] = ()
    next_wake_s: float = float("inf")
    full_pass: bool = False


@dataclass(frozen=True, slots=True)
class TickReport:
    """What a tick did. `stage_s` is wall time by stage, for metrics alone. `before` is the state that it loaded,
    `after` the one that it leaves, with what has just ended in it; `readings` are all figures of demand that it heard,
    by pool."""

    generation: int
    now_s: float
    decisions: tuple[Decision, ...]
    violations: tuple[Violation, ...]
    breaches: tuple[Breach, ...]
    waiting: Mapping[str, Reason]
    wanted_shapes: tuple[WantedShape, ...]
    events: tuple[Event, ...]
    next_wake_s: float
    full_pass: bool
    committed: bool
    stage_s: Mapping[str, float] = field(default_factory=dict)
    before: Snapshot = field(default_factory=Snapshot, compare=False, repr=False)
    after: Snapshot = field(default_factory=Snapshot, compare=False, repr=False)
    readings: tuple[tuple[str, DemandReading], ...] = ()
