"""Events for users, audit and dashboards, and the webhooks that deliver them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from scheduler.domain.job_state import JobState


class EventCode(StrEnum):
    JOB_STATE = "JobState"
    JOB_STARTED = "JobStarted"
    JOB_GROWN = "JobGrown"
    JOB_SHRUNK = "JobShrunk"
    JOB_MOVED = "JobMoved"
    JOB_REARRANGED = "JobRearranged"
    JOB_PREEMPTED = "JobPreempted"
    JOB_SUSPENDED = "JobSuspended"
    JOB_STOPPED = "JobStopped"
    JOB_REJECTED = "JobRejected"
    JOB_LOST_WORK = "JobLostWork"
    JOB_FROZE = "JobFroze"
    JOB_REPLANNED = "JobReplanned"
    JOB_HUNG = "JobHung"
    JOB_STRAGGLER = "JobStraggler"
    JOB_HAS_NO_SESSION = "JobHasNoSession"
    NODE_LENT = "NodeLent"
    NODE_RECALLED = "NodeRecalled"
    NODE_RECALL_CANCELLED = "NodeRecallCancelled"
    NODE_RETURNED = "NodeReturned"
    NODE_CHANGED = "NodeChanged"
    NODE_QUARANTINED = "NodeQuarantined"
    LOAN_ACTIVE = "LoanActive"
    LOAN_LOST = "LoanLost"
    LOAN_PROPOSED = "LoanProposed"
    LOAN_VETOED = "LoanVetoed"
    LOAN_WITHDRAWN = "LoanWithdrawn"
    SHADOW_CHANGED = "ShadowChanged"
    POOL_CHANGED = "PoolChanged"
    QUEUE_CHANGED = "QueueChanged"
    HARDWARE_CHANGED = "HardwareChanged"
    CURVES_DROPPED = "CurvesDropped"
    DEMAND_CLAMPED = "DemandClamped"
    DEMAND_UNKNOWN = "DemandUnknown"
    DEMAND_UNMET = "DemandUnmet"
    LENDING_SWITCHED = "LendingSwitched"
    COMMAND_REFUSED = "CommandRefused"
    DECISION_DROPPED = "DecisionDropped"
    BREACH = "Breach"
    RECALL_RECEIPT = "RecallReceipt"
    REPLICAS_PROPOSED = "ReplicasProposed"
    STANDBY_CHANGED = "StandbyChanged"
    NODE_PREFETCHED = "NodePrefetched"
    PREFETCH_FAILED = "PrefetchFailed"


@dataclass(frozen=True, slots=True)
class JobStep:
    """State of a job after a change of its state or its GPUs.

    `gpus` is the size of its generation's target, and `lent_gpus` the part of it on lent nodes. `plan` is a one-line
    summary. All are zero or empty without an allocation.
    """

    state: JobState
    generation: int = 0
    gpus: int = 0
    lent_gpus: int = 0
    plan: str = ""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened. `subject` is a job id, node, pool, queue, loan or GPU model.

    `numbers` are the numbers in `message`. `cause` is one word for counters: the cause of lost work, the reason code of
    a decision, the new state of a job or node, the outcome of a recall, or the purpose of a prefetch. For a failed
    precondition it is the command's id. `job` is the job's state after the event, if it changed.
    """

    at_s: float
    code: EventCode
    subject: str
    message: str
    numbers: Mapping[str, float] = field(default_factory=dict)
    cause: str = ""
    job: JobStep | None = None


TEST_CODE = "Test"
"""Code of a test message, which belongs to no event."""


class DeliveryState(StrEnum):
    PENDING = "pending"
    DELIVERED = "delivered"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class Webhook:
    """A URL that receives events after `cursor` that match `codes`, `queue` and `subject`; an empty filter matches all.

    `number` ascends with creation. `owner` is the display name of its creator, `owner_id` the stable id. The secret is
    derived from the service's secret and `secret_number`. Until `old_secret_until_s`, deliveries are signed with the
    previous secret as well. `dead_in_a_row` counts dead deliveries since the last successful one. With `may_veto`, the
    receiver's answer can veto a proposed loan.
    """

    id: str
    owner: str
    url: str
    created_at_s: float
    codes: tuple[str, ...] = ()
    queue: str = ""
    subject: str = ""
    enabled: bool = True
    disabled_reason: str = ""
    cursor: int = 0
    dead_in_a_row: int = 0
    secret_number: int = 1
    old_secret_until_s: float = 0.0
    number: int = 0
    owner_id: str = ""
    may_veto: bool = False


@dataclass(frozen=True, slots=True)
class Delivery:
    """One message to a webhook, with its attempts. `body` is the JSON text, the same in every attempt.

    `status` is the HTTP status of the last response, or None without one, and `error` describes the last failure.
    `event_number` is 0 for a test message.
    """

    id: str
    webhook_id: str
    event_number: int
    code: str
    subject: str
    created_at_s: float
    body: str
    state: DeliveryState = DeliveryState.PENDING
    attempts: int = 0
    next_at_s: float = 0.0
    ended_at_s: float | None = None
    status: int | None = None
    error: str = ""
    number: int = 0
