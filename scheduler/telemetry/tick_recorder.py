"""TickRecorder: what tick reports leave in the metrics."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator

from scheduler.core.legal import breaches
from scheduler.domain.decision import PreemptJob
from scheduler.domain.event import Event, EventCode
from scheduler.domain.job_state import PLACED, JobState
from scheduler.domain.loan import LoanState
from scheduler.domain.observation import Observation
from scheduler.domain.reason import ReasonCode
from scheduler.domain.replan import ReplanPhase
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.tick_report import Breach, BreachKind, TickReport
from scheduler.telemetry.coverage import ForecastCoverage
from scheduler.telemetry.goodput import Goodput
from scheduler.telemetry.label_values import REPLAN_BYTES_KINDS
from scheduler.telemetry.metrics import (
    BREACHES,
    DECISIONS,
    JCT,
    LOST_GPU_SECONDS,
    PENDING_JOBS,
    PREEMPTIONS,
    QUEUEING,
    RECALL_DURATION,
    RECALLS_LATE,
    REPLAN_BYTES,
    REPLAN_PHASE,
    RESIZE_DURATION,
    RESIZES,
    RESTARTING_JOBS,
    RESTARTS,
    STANDING_BREACHES,
    TICK_DURATION,
    VIOLATIONS,
)

RESTARTS_MANY = 3
RESTARTS_WINDOW_S = 3600.0
_DIRECTIONS = {
    EventCode.JOB_GROWN: "grow",
    EventCode.JOB_SHRUNK: "shrink",
    EventCode.JOB_MOVED: "move",
    EventCode.JOB_REARRANGED: "rearrange",
}
_TRIES_AGAIN = {JobState.QUEUED: "workers", JobState.PLANNING: "out-of-memory"}


class TickRecorder:
    """Turns tick reports into metrics, in the one process that ticks. It remembers which breaches stand, so that a
    lasting one counts once, who restarted lately, and what is needed for ratios over a day."""

    def __init__(self) -> None:
        self._standing: frozenset[tuple[BreachKind, str]] | None = None
        self._waited: set[tuple[str, ReasonCode]] = set()
        self._restarts: defaultdict[str, deque[float]] = defaultdict(deque)
        self._goodput = Goodput()
        self._coverage = ForecastCoverage()
        self._show_standing()

    def record(self, report: TickReport) -> None:
        """A report that was not committed changed nothing: only times, what waits and what time brings count."""
        for stage, seconds in report.stage_s.items():
            TICK_DURATION.labels(stage).observe(seconds)
        self._record_breaches(report)
        for violation in report.violations:
            VIOLATIONS.labels(violation.law.value).inc()
        self._record_waiting(report)
        lost_gpu_s = 0.0
        if report.committed:
            for decision in report.decisions:
                DECISIONS.labels(type(decision).__name__).inc()
                if isinstance(decision, PreemptJob):
                    PREEMPTIONS.labels(decision.reason.code.value).inc()
            for event in report.events:
                _record_event(event)
                self._record_job(event, report)
                _record_return(event, report.before)
            lost_gpu_s = sum(_lost_gpu_s(report))
        self._forget_restarts(report)
        self._goodput.record(report.before, report.now_s, lost_gpu_s)
        self._coverage.record(report)

    def rest(self) -> None:
        """Another process may tick from now on: what is known here of the present and of the last day ends."""
        for queue, code in self._waited:
            PENDING_JOBS.labels(queue, code.value).set(0)
        self._standing = None
        self._show_standing()
        self._restarts.clear()
        RESTARTING_JOBS.set(0)
        self._goodput.rest()
        self._coverage.rest()

    def _record_breaches(self, report: TickReport) -> None:
        """Who begins to tick takes those for counted that stood already in the state that it found."""
        if self._standing is None:
            self._standing = _subjects(breaches(report.before, Observation(report.before.now_s, 0)))
        standing = _subjects(report.breaches)
        for kind, _ in standing - self._standing:
            BREACHES.labels(kind.value).inc()
            if kind is BreachKind.RECALL_LATE:
                RECALLS_LATE.inc()
        self._standing = standing
        self._show_standing()

    def _show_standing(self) -> None:
        counts = Counter(kind for kind, _ in self._standing or ())
        for kind in BreachKind:
            STANDING_BREACHES.labels(kind.value).set(counts[kind])

    def _record_waiting(self, report: TickReport) -> None:
        """A reason that no job waits for any more goes to 0: a series that vanishes looks like a fault."""
        jobs, queues = report.after.jobs, report.after.queues
        waiting: Counter[tuple[str, ReasonCode]] = Counter()
        for job_id, reason in report.waiting.items():
            queue = jobs[job_id].spec.queue
            waiting[queue if queue in queues else "", reason.code] += 1
        self._waited.update(waiting)
        for queue, code in self._waited:
            PENDING_JOBS.labels(queue, code.value).set(waiting[queue, code])

    def _record_job(self, event: Event, report: TickReport) -> None:
        """How long a job waited, moved or took, told by the step that ends it."""
        before, job = report.before.jobs.get(event.subject), report.after.jobs.get(event.subject)
        if job is None:
            return
        if event.code is EventCode.JOB_STARTED and job.account.first_started_at_s == report.now_s:
            QUEUEING.observe(report.now_s - job.submitted_at_s)
        if event.code is not EventCode.JOB_STATE or not event.cause or before is None:
            return
        state = JobState(event.cause)
        if state is JobState.SUCCEEDED:
            JCT.observe(report.now_s - job.submitted_at_s)
        elif state is JobState.RUNNING and before.state is JobState.RESIZING:
            RESIZE_DURATION.observe(report.now_s - before.state_since_s)
        elif state in _TRIES_AGAIN and before.state in PLACED:
            RESTARTS.labels(_TRIES_AGAIN[state]).inc()
            self._restarts[job.id].append(report.now_s)

    def _forget_restarts(self, report: TickReport) -> None:
        for job_id, times in tuple(self._restarts.items()):
            while times and times[0] <= report.now_s - RESTARTS_WINDOW_S:
                times.popleft()
            job = report.after.jobs.get(job_id)
            if not times or job is None or job.is_ended:
                del self._restarts[job_id]
        RESTARTING_JOBS.set(sum(len(times) >= RESTARTS_MANY for times in self._restarts.values()))


def _subjects(broken: Iterable[Breach]) -> frozenset[tuple[BreachKind, str]]:
    return frozenset((breach.kind, breach.subject) for breach in broken)


def _record_return(event: Event, before: Snapshot) -> None:
    loan = before.loans.get(event.subject)
    if event.code is EventCode.NODE_RETURNED and loan is not None and loan.state is LoanState.RECALLED:
        RECALL_DURATION.observe(event.at_s - loan.state_since_s)


def _lost_gpu_s(report: TickReport) -> Iterator[float]:
    return (event.numbers.get("gpu_s", 0.0) for event in report.events if event.code is EventCode.JOB_LOST_WORK)


def _record_event(event: Event) -> None:
    if event.code is EventCode.JOB_LOST_WORK:
        LOST_GPU_SECONDS.labels(event.cause).inc(event.numbers.get("gpu_s", 0.0))
    if event.code is EventCode.JOB_REPLANNED:
        _record_replan(event)
    if event.code in _DIRECTIONS:
        RESIZES.labels(_DIRECTIONS[event.code], event.cause).inc()


def _record_replan(event: Event) -> None:
    for phase in ReplanPhase:
        if (seconds := event.numbers.get(f"{phase}_s")) is not None:
            REPLAN_PHASE.labels(phase.value).observe(seconds)
    for kind in REPLAN_BYTES_KINDS:
        REPLAN_BYTES.labels(kind).inc(event.numbers.get(f"{kind}_bytes", 0.0))
