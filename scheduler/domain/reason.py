"""Reason: why something was decided, or why something waits, with its numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class ReasonCode(StrEnum):
    # why a decision was taken
    FIRST_IN_ORDER = "FirstInOrder"
    GAIN = "GainExceedsCost"
    MAKES_ROOM = "MakesRoomForWaitingJob"
    NODE_RECALLED = "NodeRecalled"
    NODE_DOWN = "NodeDown"
    NODE_DRAINED = "NodeDrained"
    RANGE_CHANGED = "RangeChanged"
    OWNER_ASKED = "OwnerAsked"
    RUN_TIME_EXCEEDED = "RunTimeExceeded"
    OUTRANKED = "Outranked"
    QUOTA_RECLAIMED = "QuotaReclaimed"
    DEFRAGMENTED = "Defragmented"
    LAYERS_FROZE = "LayersFroze"
    INFERENCE_IDLE = "InferenceIdle"
    INFERENCE_NEEDS = "InferenceNeedsNode"
    OPERATOR_ASKED = "OperatorAsked"
    FORECAST_FELL = "ForecastFell"
    OFFER_EXPIRED = "OfferExpired"
    TRAINING_LEFT = "TrainingLeft"
    # why a job waits
    WAITING_FOR_PLAN = "WaitingForPlan"
    BACKING_OFF = "BackingOff"
    NO_FEASIBLE_PLAN = "NoFeasiblePlan"
    INSUFFICIENT_GPUS = "InsufficientGpus"
    NO_MATCHING_FLAVOR = "NoMatchingFlavor"
    WAITING_FOR_RELEASE = "WaitingForPreemptedWorkloads"
    BEHIND_HEAD = "BehindHeadOfQueue"
    WAITING_FOR_QUOTA = "WaitingForQuota"
    EXCEEDS_MAX_QUOTA = "ExceedsMaxQuota"
    WAITING_FOR_USER_LIMIT = "WaitingForUserLimit"
    EXCEEDS_USER_LIMIT = "ExceedsUserLimit"
    TOPOLOGY = "TopologyPlacementFailed"
    HELD_BY_MINIMUM_RUNTIME = "HeldByMinimumRuntime"
    DEADLINE_UNREACHABLE = "DeadlineUnreachable"
    SUSPENDED = "Suspended"


@dataclass(frozen=True, slots=True)
class Reason:
    """`detail` is one sentence for people; `numbers` holds the same figures for programs."""

    code: ReasonCode
    detail: str
    numbers: Mapping[str, float] = field(default_factory=dict)
