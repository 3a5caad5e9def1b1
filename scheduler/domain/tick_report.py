"""Results of one tick: its decisions (TickResult) and the record of their application (TickReport)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from scheduler.domain.decisions import Decision, Reason
from scheduler.domain.events import Event
from scheduler.domain.fleet import DemandReading
from scheduler.domain.gpu_sets import GpuShape
from scheduler.domain.recall_receipts import RecallReceipt
from scheduler.domain.shadow_lending import ShadowLending
from scheduler.domain.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class WantedShape:
    """A missing curve point that a policy looked up. The solver computes it next."""

    curve_key: str
    shape: GpuShape


class Invariant(StrEnum):
    """Invariants that every decision must satisfy. The value is the name under which a violation is reported."""

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
    NOT_RESIZABLE = "job-is-not-resizable"
    LENT_NODE_BARRED = "lent-node-barred"
    GPU_NOT_LENT = "gpu-not-lent"
    QUEUE_LIMIT_EXCEEDED = "over-a-limit-of-its-queue"
    NODE_DOES_NOT_FIT = "node-does-not-fit"
    NODE_STILL_USED = "node-still-used"
    DEADLINE_PASSED = "deadline-in-the-past"
    NOTICE_RUNNING = "notice-of-loan-not-over"
    LOAN_VETOED = "loan-vetoed"
    POOL_IN_SHADOW = "pool-in-shadow-mode"


@dataclass(frozen=True, slots=True)
class Violation:
    """A decision that was dropped because it violates an invariant."""

    invariant: Invariant
    subject: str
    detail: str


class BreachKind(StrEnum):
    RECALL_LATE = "recall-late"
    NODE_DOWN = "node-down"
    INFERENCE_SHORT = "inference-short"
    GPU_HELD_TWICE = "gpu-held-twice"
    ON_UNLENT_NODE = "training-on-unlent-node"
    REPLICA_NOT_AWAKE = "replica-not-awake"


@dataclass(frozen=True, slots=True)
class Breach:
    """An observed violation of a guarantee, for example a node that is returned late."""

    kind: BreachKind
    subject: str
    detail: str


@dataclass(frozen=True, slots=True)
class TickResult:
    """Decisions in the order in which they apply, and the reason why each other job is pending.

    `shadows` are the changed records of pools in shadow mode. They have no effect on nodes or jobs.
    """

    decisions: tuple[Decision, ...] = ()
    waiting: Mapping[str, Reason] = field(default_factory=dict)
    wanted_shapes: tuple[WantedShape, ...] = ()
    next_wake_s: float = float("inf")
    full_pass: bool = False
    shadows: Mapping[str, ShadowLending] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TickReport:
    """Record of a tick. `stage_s` is wall-clock time by stage, for metrics.

    `before` is the snapshot that the tick loaded, `after` the one that it leaves, including jobs and loans that just
    ended. `readings` are all demand readings received, by pool. `settled_recalls` are the receipts of recalls whose
    outcome became known.
    """

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
    settled_recalls: tuple[RecallReceipt, ...] = ()
