"""Problems of the service and its fleet, for the console's strip and `ebbtide problems`.

They are found once for all clients that poll for them.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, TypeVar

from fastapi import Query, Request
from pydantic import Field
from typing_extensions import TypedDict

from api.alert_rules import AlertRuleView, load_alert_rules
from api.explanations import CPU_SHARE_MAX
from api.http.dependencies import ContextDep, Service, ServiceDep, create_router
from api.identity.authorization import VIEWER, Visibility, requires
from api.identity.principals import Principal, Role
from api.state import RequestContext
from scheduler.domain.problems import MEANINGS, Problem, ProblemCode, ProblemEpisode, Severity, SubjectKind
from scheduler.domain.snapshot import Snapshot
from scheduler.runtime.problem_recorder import EvidenceReader
from scheduler.scheduling.problems.detection import find_problems
from scheduler.scheduling.problems.episodes import SETTLE_S, find_pool_of

RUNBOOK = "/docs/runbook"
REFRESH_S = 5.0
"""Age at which problems are found again although no tick was committed: demand grows old, or the leader is gone."""
LISTED_PER_CODE_MAX = 100
RESOLVED_MAX = 1000


class ProblemSubjectView(TypedDict):
    """Kind and subject of a problem."""

    code: Annotated[ProblemCode, Field(description="Kind of the problem, one word for comparison.")]
    kind: Annotated[
        SubjectKind,
        Field(description="Whether the subject is a job, node, pool, queue, machine or webhook, or the service."),
    ]
    subject: Annotated[
        str,
        Field(description="Id of the job or webhook, or name of the pool, node, machine or queue. Empty: the service."),
    ]


class ProblemView(ProblemSubjectView):
    """One problem of one subject."""

    severity: Annotated[
        Severity,
        Field(
            description="`critical`: a promise to inference is broken, or nothing is scheduled. `warning`: work or "
            "capacity is being lost. `notice`: a state that may have been forgotten."
        ),
    ]
    pool: Annotated[
        str, Field(description="Pool whose GPUs it concerns. Empty: a job, a queue, a webhook or the whole service.")
    ]
    cause: Annotated[str, Field(description="The problem as one sentence with the figures in `numbers`.")]
    numbers: Annotated[dict[str, float], Field(description="Figures in `cause`, by name.")]
    advice: Annotated[str, Field(description="Remedy, as one sentence.")]
    command: Annotated[str, Field(description="Command that does it, or shows more. Empty: none.")]
    since_s: Annotated[
        float | None, Field(description="When it began, in seconds since 1970 (UTC). Null: not recorded.")
    ]
    meaning: Annotated[str, Field(description="Explanation of the code, for any subject.")]
    runbook: Annotated[str, Field(description="Path of the section of the runbook about this code.")]


class ResolvedProblemView(ProblemSubjectView):
    """A problem that has ended, as the leading controller recorded it."""

    id: Annotated[str, Field(description="Unique label.")]
    severity: Annotated[Severity, Field(description="Its severity when it was at its worst.")]
    pool: Annotated[
        str, Field(description="Pool whose GPUs it concerned. Empty: a job, a queue, a webhook or the whole service.")
    ]
    cause: Annotated[str, Field(description="The problem as one sentence, from when it was at its worst.")]
    begin_s: Annotated[float, Field(description="When it began, in seconds since 1970 (UTC).")]
    end_s: Annotated[float, Field(description="When it last ended, in seconds since 1970 (UTC).")]
    duration_s: Annotated[float, Field(description="Seconds from its begin to its end.")]
    times: Annotated[
        int, Field(description=f"How often it was present in this time. Absences below {SETTLE_S:.0f} s are no end.")
    ]
    ending: Annotated[str, Field(description="Event or state that ended it, as one sentence.")]
    settled: Annotated[
        bool, Field(description="Whether a return would be another problem. False: it has ended moments ago.")
    ]
    meaning: Annotated[str, Field(description="Explanation of the code, for any subject.")]
    runbook: Annotated[str, Field(description="Path of the section of the runbook about this code.")]


class ProblemsView(TypedDict):
    """Problems that the caller may see. A healthy fleet has none."""

    generation: Annotated[
        int, Field(description="Snapshot in which they were found. It may be slightly older than the newest.")
    ]
    as_of_s: Annotated[float, Field(description="When they were found, in seconds since 1970 (UTC).")]
    counts: Annotated[dict[str, int], Field(description="Number of all problems by code.")]
    severities: Annotated[dict[str, int], Field(description="Number of all problems by severity; each is a key.")]
    items: Annotated[
        list[ProblemView],
        Field(description=f"Problems, the most severe first; at most {LISTED_PER_CODE_MAX} of each code."),
    ]
    resolved: Annotated[
        list[ResolvedProblemView],
        Field(description=f"Problems that ended since `resolved_since_s`, at most {RESOLVED_MAX}, the latest first."),
    ]


class AlertRulesView(TypedDict):
    """Alert rules for Prometheus that come with this release."""

    items: Annotated[list[AlertRuleView], Field(description="The rules, the most severe first.")]


def problem_view(problem: Problem, pool: str) -> ProblemView:
    return {
        "code": problem.code,
        "severity": problem.severity,
        "kind": problem.kind,
        "subject": problem.subject,
        "pool": pool,
        "cause": problem.cause,
        "numbers": dict(problem.numbers),
        "advice": problem.advice,
        "command": problem.command,
        "since_s": problem.since_s,
        "meaning": MEANINGS[problem.code],
        "runbook": f"{RUNBOOK}#{problem.code.lower()}",
    }


def resolved_problem_view(episode: ProblemEpisode) -> ResolvedProblemView:
    assert episode.end_s is not None, "a problem that is present is not resolved"
    return {
        "id": episode.id,
        "code": episode.code,
        "severity": episode.severity,
        "kind": episode.kind,
        "subject": episode.subject,
        "pool": episode.pool,
        "cause": episode.cause,
        "begin_s": episode.begin_s,
        "end_s": episode.end_s,
        "duration_s": episode.end_s - episode.begin_s,
        "times": episode.times,
        "ending": episode.ending,
        "settled": episode.is_closed,
        "meaning": MEANINGS[episode.code],
        "runbook": f"{RUNBOOK}#{episode.code.lower()}",
    }


Visible = TypeVar("Visible", Problem, ProblemEpisode)


def _select_visible(problems: Iterable[Visible], principal: Principal, visibility: Visibility) -> Iterator[Visible]:
    """Yield the problems that a caller may see.

    Problems of jobs and queues are for readers of the queue, and those of webhooks for its admins. Nodes, pools,
    machines and the controller belong to the fleet, which every viewer sees. Goodput is a figure of all queues.
    """
    for problem in problems:
        if problem.kind is SubjectKind.WEBHOOK:
            is_visible = principal.has_role(Role.QUEUE_ADMIN, problem.queue)
        elif problem.queue:
            is_visible = principal.has_role(Role.VIEWER, problem.queue)
        else:
            is_visible = visibility.is_unrestricted or problem.code is not ProblemCode.GOODPUT_LOW
        if is_visible:
            yield problem


def _limit_per_code(problems: Iterable[Problem]) -> Iterator[Problem]:
    listed: Counter[ProblemCode] = Counter()
    for problem in problems:
        listed[problem.code] += 1
        if listed[problem.code] <= LISTED_PER_CODE_MAX:
            yield problem


@dataclass(frozen=True, slots=True)
class FoundProblems:
    """Problems in the state of a generation, as of `at_s`."""

    generation: int = -1
    at_s: float = float("-inf")
    problems: tuple[Problem, ...] = ()

    def is_current(self, generation: int, now_s: float) -> bool:
        return self.generation == generation and now_s - self.at_s < REFRESH_S


@dataclass(slots=True)
class ProblemCache:
    """Cache of the problems that all clients share. Thread-safe.

    `clock_s` measures the cost of a refresh: all of them together use at most CPU_SHARE_MAX of one core.
    """

    clock_s: Callable[[], float] = time.monotonic
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _latest: FoundProblems = FoundProblems()
    _next_refresh_at_s: float = 0.0
    _evidence: EvidenceReader = field(default_factory=EvidenceReader)

    def read(self, service: Service, committed: Snapshot, now_s: float) -> FoundProblems:
        """Return the problems in the newest committed state, or slightly older ones while they are found again."""
        if self._latest.is_current(committed.generation, now_s):
            return self._latest
        if not self._lock.acquire(blocking=self._latest.generation < 0):
            return self._latest
        try:
            started_s = self.clock_s()
            is_due = started_s >= self._next_refresh_at_s and not self._latest.is_current(committed.generation, now_s)
            if is_due:
                evidence = self._evidence.read(
                    service.store, service.policies, committed, now_s, has_leader=service.has_leader
                )
                self._latest = FoundProblems(committed.generation, now_s, find_problems(committed, evidence))
                ended_s = self.clock_s()
                self._next_refresh_at_s = ended_s + (ended_s - started_s) / CPU_SHARE_MAX
        finally:
            self._lock.release()
        return self._latest


router = create_router("fleet")


@router.get("/problems")
@requires(VIEWER)
def list_problems(
    context: ContextDep,
    service: ServiceDep,
    request: Request,
    resolved_since_s: Annotated[
        float | None,
        Query(
            ge=0,
            allow_inf_nan=False,
            description="Also list problems that ended since then, in seconds since 1970 (UTC). Default: none.",
        ),
    ] = None,
) -> ProblemsView:
    """List what is wrong now, each problem with its cause and what helps. The state may be slightly older than the
    newest."""
    cache = request.app.state.problems
    assert isinstance(cache, ProblemCache)
    found = cache.read(service, context.committed, context.now_s)
    visible = list(_select_visible(found.problems, context.principal, context.visibility))
    severities = Counter(problem.severity for problem in visible)
    machines = service.store.machines.list_machines()
    ended = () if resolved_since_s is None else _list_resolved(context, resolved_since_s)
    view: ProblemsView = {
        "generation": found.generation,
        "as_of_s": found.at_s,
        "counts": dict(Counter(problem.code.value for problem in visible)),
        "severities": {severity.value: severities[severity] for severity in Severity},
        "items": [
            problem_view(problem, find_pool_of(problem, context.committed, machines))
            for problem in _limit_per_code(visible)
        ],
        "resolved": [],
    }
    resolved = context.visibility.redact_all([resolved_problem_view(episode) for episode in ended])
    return {**context.redact(view), "resolved": resolved}


def _list_resolved(context: RequestContext, since_s: float) -> Iterator[ProblemEpisode]:
    ended = context.store.problems.list_ended(since_s=since_s, limit=RESOLVED_MAX)
    return _select_visible(ended, context.principal, context.visibility)


@router.get("/alert-rules")
@requires(VIEWER)
def list_alert_rules() -> AlertRulesView:
    """List the alert rules for Prometheus that come with this release, with the sections of the runbook about them."""
    return {"items": load_alert_rules()}
