"""The values that bounded labels can have, each as it is counted."""

from __future__ import annotations

from typing import get_args

from scheduler.domain.decision import Decision
from scheduler.domain.observation import FailureCause, RunPhase
from scheduler.domain.reason import ReasonCode
from scheduler.domain.tick_report import BreachKind, Law
from scheduler.domain.webhook import DeliveryState

DECISION_KINDS = tuple(kind.__name__ for kind in get_args(Decision))
LAWS = tuple(law.value for law in Law)
BREACH_KINDS = tuple(kind.value for kind in BreachKind)
LOSS_CAUSES = (FailureCause.OUT_OF_MEMORY.value, RunPhase.FAILED.value, RunPhase.LOST.value, RunPhase.LEFT.value)
REPLAN_BYTES_KINDS = ("needed", "read", "moved")
DIRECTIONS = ("grow", "shrink", "move", "rearrange")
_TAKEN_WITH_NODES = (ReasonCode.NODE_DOWN, ReasonCode.NODE_DRAINED, ReasonCode.NODE_RECALLED)
RESIZE_REASONS = tuple(
    code.value
    for code in (
        *(ReasonCode.GAIN, ReasonCode.MAKES_ROOM, ReasonCode.RANGE_CHANGED, ReasonCode.QUOTA_RECLAIMED),
        *(ReasonCode.DEFRAGMENTED, ReasonCode.LAYERS_FROZE, *_TAKEN_WITH_NODES),
    )
)
PREEMPTION_REASONS = tuple(
    code.value for code in (ReasonCode.OUTRANKED, ReasonCode.QUOTA_RECLAIMED, *_TAKEN_WITH_NODES)
)
RESTART_CAUSES = ("workers", "out-of-memory")
GPU_USES = ("running", "moving")
OUTCOMES = (DeliveryState.DELIVERED.value, "failed", DeliveryState.DEAD.value)
SWEPT_KINDS = ("events", "decisions", "audit", "commands", "deliveries", "logs")
