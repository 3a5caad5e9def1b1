"""Decisions: complete changes of the desired state. An executor has nothing left to choose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from scheduler.domain.gpu_sets import Gpus, RankPlacement
from scheduler.domain.parallel_plan import ParallelPlan


class ReasonCode(StrEnum):
    # Reasons of a decision
    FIRST_IN_ORDER = "FirstInOrder"
    GAIN_EXCEEDS_COST = "GainExceedsCost"
    MAKES_ROOM_FOR_WAITING_JOB = "MakesRoomForWaitingJob"
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
    STEPS_MEASURED = "StepsMeasured"
    INFERENCE_IDLE = "InferenceIdle"
    INFERENCE_NEEDS_NODE = "InferenceNeedsNode"
    DEMAND_LOST = "DemandLost"
    OPERATOR_ASKED = "OperatorAsked"
    FORECAST_FELL = "ForecastFell"
    UNUSED_BY_TRAINING = "UnusedByTraining"
    OFFER_EXPIRED = "OfferExpired"
    TRAINING_LEFT = "TrainingLeft"
    NO_LONGER_LENDABLE = "NoLongerLendable"
    SHADOW_MODE = "ShadowMode"
    STANDBY_FAILED = "StandbyFailed"
    # Reasons of a pending job
    WAITING_FOR_PLAN = "WaitingForPlan"
    BACKING_OFF = "BackingOff"
    SECRET_MISSING = "SecretMissing"
    NO_FEASIBLE_PLAN = "NoFeasiblePlan"
    INSUFFICIENT_GPUS = "InsufficientGpus"
    NO_MATCHING_FLAVOR = "NoMatchingFlavor"
    NO_FEASIBLE_NODE = "NoFeasibleNode"
    VOLUME_NOT_READY = "VolumeNotReady"
    TEMPLATE_NOT_CHECKED = "TemplateNotChecked"
    TEMPLATE_REJECTED = "TemplateRejected"
    WAITING_FOR_PREEMPTED_WORKLOADS = "WaitingForPreemptedWorkloads"
    BEHIND_HEAD_OF_QUEUE = "BehindHeadOfQueue"
    WAITING_FOR_QUOTA = "WaitingForQuota"
    EXCEEDS_MAX_QUOTA = "ExceedsMaxQuota"
    WAITING_FOR_USER_LIMIT = "WaitingForUserLimit"
    EXCEEDS_USER_LIMIT = "ExceedsUserLimit"
    TOPOLOGY_PLACEMENT_FAILED = "TopologyPlacementFailed"
    HELD_BY_MINIMUM_RUNTIME = "HeldByMinimumRuntime"
    DEADLINE_UNREACHABLE = "DeadlineUnreachable"
    SUSPENDED = "Suspended"


@dataclass(frozen=True, slots=True)
class Reason:
    """Reason of a decision or of a pending job. `detail` is one sentence; `numbers` are the numbers in it."""

    code: ReasonCode
    detail: str
    numbers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StartJob:
    job_id: str
    gpus: Gpus
    plan: ParallelPlan
    reason: Reason


@dataclass(frozen=True, slots=True)
class ResizeJob:
    """Move the job to exactly `gpus` under `plan`. Workers that must exit have until `leave_by_s`.

    Also used for a new plan on the same GPUs and for a move to other GPUs. `seats` is the GPU of each rank; empty means
    the default order.
    """

    job_id: str
    gpus: Gpus
    plan: ParallelPlan
    leave_by_s: float
    reason: Reason
    seats: RankPlacement = ()


@dataclass(frozen=True, slots=True)
class PreemptJob:
    job_id: str
    leave_by_s: float
    reason: Reason


@dataclass(frozen=True, slots=True)
class SuspendRun:
    """Release a job's GPUs because its owner suspended it."""

    job_id: str
    leave_by_s: float
    reason: Reason


@dataclass(frozen=True, slots=True)
class StopJob:
    """End a job because its owner cancelled it."""

    job_id: str
    leave_by_s: float
    reason: Reason


@dataclass(frozen=True, slots=True)
class RejectJob:
    """End a job that can never run."""

    job_id: str
    reason: Reason


@dataclass(frozen=True, slots=True)
class ProposeLoan:
    """Announce that the node will be offered to training at `offer_at_s`. Nothing happens to the node before."""

    node: str
    offer_at_s: float
    reason: Reason


@dataclass(frozen=True, slots=True)
class LendNode:
    """Offer the node to training, at the end of the notice if its loan was proposed."""

    node: str
    reason: Reason


@dataclass(frozen=True, slots=True)
class RecallChoice:
    """Why the nodes of a recall were chosen among a pool's lent nodes.

    `cost_gpu_s` are the GPU-seconds that jobs were expected to lose by leaving all `nodes` that are recalled together.
    `alternatives` is the number of lent nodes that stayed.
    """

    cost_gpu_s: float
    nodes: int
    alternatives: int


@dataclass(frozen=True, slots=True)
class RecallNode:
    """Recall a lent node, which must be free by `return_by_s`. `choice` is None if the reason names the node."""

    node: str
    return_by_s: float
    reason: Reason
    choice: RecallChoice | None = None


@dataclass(frozen=True, slots=True)
class CancelRecall:
    node: str
    reason: Reason


@dataclass(frozen=True, slots=True)
class ReturnNode:
    node: str
    reason: Reason


JobDecision = StartJob | ResizeJob | PreemptJob | SuspendRun | StopJob | RejectJob
NodeDecision = ProposeLoan | LendNode | RecallNode | CancelRecall | ReturnNode
Decision = JobDecision | NodeDecision


def decision_subject(decision: Decision) -> str:
    """Return the job id or node name of the decision."""
    return decision.node if isinstance(decision, NodeDecision) else decision.job_id
