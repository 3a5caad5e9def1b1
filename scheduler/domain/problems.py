"""Problems of the service and its fleet, as the console's strip, the alerts page and `ebbtide problems` list them.

`scheduler.scheduling.problems` finds them. Each code has a section of the same name in docs/how-to/runbook.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Severity(StrEnum):
    """How soon an operator must act.

    CRITICAL: a promise to inference is broken, or nothing is scheduled. WARNING: work or capacity is being lost.
    NOTICE: nothing is lost, but a state may have been forgotten.
    """

    CRITICAL = "critical"
    WARNING = "warning"
    NOTICE = "notice"


class SubjectKind(StrEnum):
    SERVICE = "service"
    POOL = "pool"
    NODE = "node"
    MACHINE = "machine"
    QUEUE = "queue"
    JOB = "job"
    WEBHOOK = "webhook"


class ProblemCode(StrEnum):
    """Kinds of problems, in the order in which those of one severity are listed."""

    CONTROLLER_MISSING = "ControllerMissing"
    INFERENCE_SHORT = "InferenceShort"
    RECALL_LATE = "RecallLate"
    RECALL_AT_RISK = "RecallAtRisk"
    DEMAND_LOST = "DemandLost"
    DEMAND_STALE = "DemandStale"
    DEMAND_MISSING = "DemandMissing"
    FORECAST_MISSING = "ForecastMissing"
    NODE_DOWN = "NodeDown"
    NODE_QUARANTINED = "NodeQuarantined"
    NODE_SLOW = "NodeSlow"
    AGENT_SILENT = "AgentSilent"
    GOODPUT_LOW = "GoodputLow"
    GUARANTEE_UNSERVED = "GuaranteeUnserved"
    QUEUE_STUCK = "QueueStuck"
    JOB_OUT_OF_MEMORY = "JobOutOfMemory"
    JOB_THRASHING = "JobThrashing"
    JOB_LOSES_WORK = "JobLosesWork"
    JOB_FAILED = "JobFailed"
    WEBHOOK_FAILING = "WebhookFailing"
    LENDING_STOPPED = "LendingStopped"


MEANINGS: Mapping[ProblemCode, str] = {
    ProblemCode.CONTROLLER_MISSING: "No controller leads: nothing is started, lent or recalled.",
    ProblemCode.INFERENCE_SHORT: "An inference pool needs more GPUs than it has now.",
    ProblemCode.RECALL_LATE: "A recalled node is past its deadline.",
    ProblemCode.RECALL_AT_RISK: "Jobs still hold GPUs of a recalled node shortly before its deadline.",
    ProblemCode.DEMAND_LOST: "The demand of a pool is unknown for so long that all its loans are recalled.",
    ProblemCode.DEMAND_STALE: "The newest demand reading of a pool is too old for new loans.",
    ProblemCode.DEMAND_MISSING: "The demand of a pool that may lend was never reported.",
    ProblemCode.FORECAST_MISSING: "A pool reports demand, but has no current forecast, so it lends nothing more.",
    ProblemCode.NODE_DOWN: "A node is down.",
    ProblemCode.NODE_QUARANTINED: "A node failed or slowed several jobs and takes no more.",
    ProblemCode.NODE_SLOW: "A node slows a running job: it computes more slowly than the job's other nodes.",
    ProblemCode.AGENT_SILENT: "The agent of a machine has not reported for several minutes.",
    ProblemCode.GOODPUT_LOW: "Too much of the recent GPU time of all jobs was lost work.",
    ProblemCode.GUARANTEE_UNSERVED: "A pending job has waited long for GPUs that its queue is guaranteed.",
    ProblemCode.QUEUE_STUCK: "No job of a queue starts, although enough GPUs for one of them are free.",
    ProblemCode.JOB_OUT_OF_MEMORY: "A job ran out of memory more than once and is about to fail.",
    ProblemCode.JOB_THRASHING: "A job is interrupted or resized so often that it makes little progress.",
    ProblemCode.JOB_LOSES_WORK: "A job loses much of its work when it is resized, preempted or restarted.",
    ProblemCode.JOB_FAILED: "A job failed in the last 24 hours.",
    ProblemCode.WEBHOOK_FAILING: "A webhook's receiver does not accept messages.",
    ProblemCode.LENDING_STOPPED: "Lending was paused, or all loans were recalled, hours ago.",
}


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of one subject.

    Args:
        subject: id of the job or webhook, or name of the pool, node, machine or queue; empty for the service.
        cause: one sentence with figures. It has no ages, because those change without any news.
        advice: one sentence that says what helps.
        command: the command that does it, or shows more; empty if there is none.
        since_s: when the problem began; None if that is not recorded.
        queue: queue whose readers may see the problem. Empty: all viewers, if the subject is part of the fleet.
        numbers: the figures in `cause`.
    """

    code: ProblemCode
    severity: Severity
    kind: SubjectKind
    subject: str
    cause: str
    advice: str
    command: str = ""
    since_s: float | None = None
    queue: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)


_SEVERITY_RANKS = {severity: rank for rank, severity in enumerate(Severity)}
_CODE_RANKS = {code: rank for rank, code in enumerate(ProblemCode)}


def get_problem_order(problem: Problem) -> tuple[int, int, float, str]:
    """Return the sort key of a list of problems: by severity, then code, newest first within a code."""
    since_s = problem.since_s or 0.0
    return _SEVERITY_RANKS[problem.severity], _CODE_RANKS[problem.code], -since_s, problem.subject


@dataclass(frozen=True, slots=True)
class ProblemEpisode:
    """The time in which a problem was present. A problem that returns soon after its end continues its episode.

    Args:
        id: unique label, derived from the problem and its begin.
        severity, cause: those when the problem was at its worst.
        queue: as in `Problem`.
        pool: pool whose GPUs it concerned; empty for jobs, queues, webhooks and the service.
        times: how often it began in this episode.
        end_s: when it ended; None while it is present.
        ending: one sentence that says what ended it; empty while it is present.
        is_closed: whether a return of the problem begins another episode.
    """

    id: str
    code: ProblemCode
    severity: Severity
    kind: SubjectKind
    subject: str
    cause: str
    queue: str
    pool: str
    begin_s: float
    times: int = 1
    end_s: float | None = None
    ending: str = ""
    is_closed: bool = False


ProblemKey = tuple[ProblemCode, SubjectKind, str]


def get_problem_key(problem: Problem | ProblemEpisode) -> ProblemKey:
    """Return the key by which a problem is recognized: its code and its subject."""
    return problem.code, problem.kind, problem.subject


def is_worse(severity: Severity, other: Severity) -> bool:
    return _SEVERITY_RANKS[severity] < _SEVERITY_RANKS[other]
