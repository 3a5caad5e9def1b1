"""Event: something that happened, kept for people, audit and dashboards."""

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
