"""Event: something that happened, kept for people, audit and dashboards.

Webhook: a URL that is told of events; Delivery: one message to it, from its first attempt to its end.
"""

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
    NODE_LENT = "NodeLent"
    NODE_RECALLED = "NodeRecalled"
    NODE_RECALL_CANCELLED = "NodeRecallCancelled"
    NODE_RETURNED = "NodeReturned"
    NODE_CHANGED = "NodeChanged"
    LOAN_ACTIVE = "LoanActive"
    LOAN_LOST = "LoanLost"
    POOL_CHANGED = "PoolChanged"
    QUEUE_CHANGED = "QueueChanged"
    CURVES_DROPPED = "CurvesDropped"
    DEMAND_CLAMPED = "DemandClamped"
    LENDING_SWITCHED = "LendingSwitched"
    COMMAND_REFUSED = "CommandRefused"
    DECISION_DROPPED = "DecisionDropped"
    BREACH = "Breach"


@dataclass(frozen=True, slots=True)
class JobStep:
    """Where a job stands once its state or its GPUs have changed. `gpus`: those of its generation's target, 0 where it
    has none; `lent_gpus`: those among them that inference pools lent; `plan`: in one line, empty where it has none."""

    state: JobState
    generation: int = 0
    gpus: int = 0
    lent_gpus: int = 0
    plan: str = ""


@dataclass(frozen=True, slots=True)
class Event:
    """`subject` is a job id, node, pool, queue or loan; `numbers` are the figures behind `message`. `cause` says in one
    word, for counters, what brought about a loss of work, the code of a decision's reason, or a job's new state; of a
    precondition that was not met it is the command's id. `job`: where the job stands then, if that changed."""

    at_s: float
    code: EventCode
    subject: str
    message: str
    numbers: Mapping[str, float] = field(default_factory=dict)
    cause: str = ""
    job: JobStep | None = None


TEST_CODE = "Test"
"""The code of a message that somebody asked for, to see whether it arrives; it is of no event."""


class DeliveryState(StrEnum):
    PENDING = "pending"
    DELIVERED = "delivered"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class Webhook:
    """Told of the events after `cursor` that `codes`, `queue` and `subject` let pass; each of them empty lets all.

    `number` ascends with creation. Its secret is derived from the service's own by `secret_number`; that of the number
    before is signed with as well until `old_secret_until_s`. `dead_in_a_row` deliveries have died since one arrived.
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


@dataclass(frozen=True, slots=True)
class Delivery:
    """`body` is the JSON text that is sent, the same at every attempt. `status` is the last answer's, None where none
    came, and `error` says what was wrong with it. `event_number` is 0 for a message that somebody asked for."""

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
