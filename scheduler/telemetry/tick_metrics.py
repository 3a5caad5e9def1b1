"""ForecastCoverage: how often demand stayed at or below what each quantile of a forecast said.

Goodput: how much of the GPU time that jobs held was of use.

Useful are GPU-seconds in which workers ran and whose work was kept: the part of the time held that ran, times the part
of the work that was not lost. Work that is lost is counted in GPU-seconds held (`JobLostWork`), starts and moves
included, so that subtracting it from the running time alone would count those twice.

TickRecorder: what tick reports leave in the metrics.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from scheduler.domain.decisions import PreemptJob, ReasonCode
from scheduler.domain.events import Event, EventCode
from scheduler.domain.fleet import Forecast, LoanState
from scheduler.domain.job_records import ReplanPhase
from scheduler.domain.job_state import PLACED_STATES, JobState
from scheduler.domain.observation import Observation
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.tick_report import Breach, BreachKind, TickReport
from scheduler.scheduling.legality import find_breaches
from scheduler.telemetry.metrics import (
    ACTIVE_BREACHES,
    BREACHES,
    DECISIONS,
    FORECAST_COVERAGE,
    FORECASTS_EVALUATED,
    GOODPUT,
    GPU_SECONDS,
    JCT,
    LOST_GPU_SECONDS,
    PENDING_JOBS,
    PREEMPTIONS,
    QUEUEING,
    RECALL_DURATION,
    RECALLS_LATE,
    REPLAN_BYTES,
    REPLAN_BYTES_KINDS,
    REPLAN_PHASE,
    RESIZE_DURATION,
    RESIZES,
    RESTARTING_JOBS,
    RESTARTS,
    TICK_DURATION,
    VIOLATIONS,
)

COVERAGE_WINDOW_S = 86_400.0


@dataclass(slots=True)
class _OpenForecast:
    """A forecast whose horizon lasts, and the largest demand since it was made."""

    forecast: Forecast
    largest_gpus: float


class ForecastCoverageTracker:
    """Each forecast is judged once, when its horizon has passed, by what was asked for within it, above the pool's
    capacity too. The demand that stood when it was made counts as within it."""

    def __init__(self) -> None:
        self._newest: dict[str, float] = {}
        self._open: defaultdict[str, deque[_OpenForecast]] = defaultdict(deque)
        self._evaluated: defaultdict[tuple[str, float], deque[tuple[float, bool]]] = defaultdict(deque)

    def record(self, report: TickReport) -> None:
        for pool, reading in report.readings:
            for one in self._open[pool]:
                if reading.at_s <= one.forecast.made_at_s + one.forecast.horizon_s:
                    one.largest_gpus = max(one.largest_gpus, reading.asked_gpus)
        for pool, open_ones in self._open.items():
            while open_ones and open_ones[0].forecast.made_at_s + open_ones[0].forecast.horizon_s <= report.now_s:
                self._evaluate(pool, open_ones.popleft(), report.now_s)
        for pool, forecast in report.after.forecasts.items():
            demand = report.after.demand.get(pool)
            if self._newest.get(pool) != forecast.made_at_s and demand is not None:
                self._newest[pool] = forecast.made_at_s
                FORECASTS_EVALUATED.labels(pool)  # shown as 0 until the first is judged
                self._open[pool].append(_OpenForecast(forecast, demand.asked_gpus))

    def reset(self) -> None:
        for pool, quantile in self._evaluated:
            FORECAST_COVERAGE.labels(pool, f"{quantile:g}").set(float("nan"))
        self._evaluated.clear()
        self._open.clear()

    def _evaluate(self, pool: str, one: _OpenForecast, now_s: float) -> None:
        FORECASTS_EVALUATED.labels(pool).inc()
        for quantile, gpus in zip(one.forecast.quantiles, one.forecast.gpus, strict=True):
            judged = self._evaluated[pool, quantile]
            judged.append((now_s, one.largest_gpus <= gpus))
            while judged[0][0] <= now_s - COVERAGE_WINDOW_S:
                judged.popleft()
            FORECAST_COVERAGE.labels(pool, f"{quantile:g}").set(sum(held for _, held in judged) / len(judged))


GOODPUT_WINDOW_S = 86_400.0
_SLOT_S = 3600.0


class GoodputTracker:
    """Adds up what was held between two ticks, by the state that the first of them left; kept by the hour."""

    def __init__(self) -> None:
        self._until_s: float | None = None
        self._slots: deque[list[float]] = deque()

    def record(self, before: Snapshot, now_s: float, lost_gpu_s: float) -> None:
        """`before` has stood since the last call; `lost_gpu_s` came to light now."""
        elapsed_s = 0.0 if self._until_s is None else now_s - self._until_s
        self._until_s = now_s
        held, running = _count_gpus(before) if elapsed_s else (0, 0)
        GPU_SECONDS.labels("running").inc(running * elapsed_s)
        GPU_SECONDS.labels("moving").inc((held - running) * elapsed_s)
        slot_s = now_s // _SLOT_S * _SLOT_S
        if not self._slots or self._slots[-1][0] != slot_s:
            self._slots.append([slot_s, 0.0, 0.0, 0.0])
        for at, added in enumerate((held * elapsed_s, running * elapsed_s, lost_gpu_s), 1):
            self._slots[-1][at] += added
        while self._slots[0][0] <= now_s - GOODPUT_WINDOW_S - _SLOT_S:
            self._slots.popleft()
        GOODPUT.set(self._compute_ratio())

    def reset(self) -> None:
        self._until_s = None
        self._slots.clear()
        GOODPUT.set(float("nan"))

    def _compute_ratio(self) -> float:
        held_s, running_s, lost_s = (sum(slot[at] for slot in self._slots) for at in (1, 2, 3))
        if not held_s:
            return float("nan")
        return running_s / held_s * max(0.0, 1.0 - lost_s / held_s)


def _count_gpus(snapshot: Snapshot) -> tuple[int, int]:
    """GPUs that jobs hold, and those of them under workers that run."""
    ledger = snapshot.index
    held = sum(map(len, ledger.holders.values()))
    return held, sum(snapshot.jobs[job_id].allocation.target_gpus for job_id in ledger.running)


RESTARTING_THRESHOLD = 3
RESTARTS_WINDOW_S = 3600.0
_DIRECTIONS = {
    EventCode.JOB_GROWN: "grow",
    EventCode.JOB_SHRUNK: "shrink",
    EventCode.JOB_MOVED: "move",
    EventCode.JOB_REARRANGED: "rearrange",
}
_RESTART_CAUSES = {JobState.QUEUED: "workers", JobState.PLANNING: "out-of-memory"}


class TickRecorder:
    """Turns tick reports into metrics, in the one process that ticks. It remembers which breaches stand, so that a
    lasting one counts once, who restarted lately, and what is needed for ratios over a day."""

    def __init__(self) -> None:
        self._active_breaches: frozenset[tuple[BreachKind, str]] | None = None
        self._pending_labels: set[tuple[str, ReasonCode]] = set()
        self._restarts: defaultdict[str, deque[float]] = defaultdict(deque)
        self._goodput = GoodputTracker()
        self._coverage = ForecastCoverageTracker()
        self._publish_active_breaches()

    def record(self, report: TickReport) -> None:
        """A report that was not committed changed nothing: only times, what waits and what time brings count."""
        for stage, seconds in report.stage_s.items():
            TICK_DURATION.labels(stage).observe(seconds)
        self._record_breaches(report)
        for violation in report.violations:
            VIOLATIONS.labels(violation.law.value).inc()
        self._record_pending(report)
        lost_gpu_s = 0.0
        if report.committed:
            for decision in report.decisions:
                DECISIONS.labels(type(decision).__name__).inc()
                if isinstance(decision, PreemptJob):
                    PREEMPTIONS.labels(decision.reason.code.value).inc()
            for event in report.events:
                _record_event(event)
                self._record_job_timing(event, report)
                _record_recall(event, report.before)
            lost_gpu_s = sum(_iter_lost_gpu_s(report))
        self._expire_restarts(report)
        self._goodput.record(report.before, report.now_s, lost_gpu_s)
        self._coverage.record(report)

    def reset(self) -> None:
        """Another process may tick from now on: what is known here of the present and of the last day ends."""
        for queue, code in self._pending_labels:
            PENDING_JOBS.labels(queue, code.value).set(0)
        self._active_breaches = None
        self._publish_active_breaches()
        self._restarts.clear()
        RESTARTING_JOBS.set(0)
        self._goodput.reset()
        self._coverage.reset()

    def _record_breaches(self, report: TickReport) -> None:
        """Who begins to tick takes those for counted that stood already in the state that it found."""
        if self._active_breaches is None:
            self._active_breaches = _breach_keys(find_breaches(report.before, Observation(report.before.now_s, 0)))
        standing = _breach_keys(report.breaches)
        for kind, _ in standing - self._active_breaches:
            BREACHES.labels(kind.value).inc()
            if kind is BreachKind.RECALL_LATE:
                RECALLS_LATE.inc()
        self._active_breaches = standing
        self._publish_active_breaches()

    def _publish_active_breaches(self) -> None:
        counts = Counter(kind for kind, _ in self._active_breaches or ())
        for kind in BreachKind:
            ACTIVE_BREACHES.labels(kind.value).set(counts[kind])

    def _record_pending(self, report: TickReport) -> None:
        """A reason that no job waits for any more goes to 0: a series that vanishes looks like a fault."""
        jobs, queues = report.after.jobs, report.after.queues
        waiting: Counter[tuple[str, ReasonCode]] = Counter()
        for job_id, reason in report.waiting.items():
            queue = jobs[job_id].spec.queue
            waiting[queue if queue in queues else "", reason.code] += 1
        self._pending_labels.update(waiting)
        for queue, code in self._pending_labels:
            PENDING_JOBS.labels(queue, code.value).set(waiting[queue, code])

    def _record_job_timing(self, event: Event, report: TickReport) -> None:
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
        elif state in _RESTART_CAUSES and before.state in PLACED_STATES:
            RESTARTS.labels(_RESTART_CAUSES[state]).inc()
            self._restarts[job.id].append(report.now_s)

    def _expire_restarts(self, report: TickReport) -> None:
        for job_id, times in tuple(self._restarts.items()):
            while times and times[0] <= report.now_s - RESTARTS_WINDOW_S:
                times.popleft()
            job = report.after.jobs.get(job_id)
            if not times or job is None or job.is_ended:
                del self._restarts[job_id]
        RESTARTING_JOBS.set(sum(len(times) >= RESTARTING_THRESHOLD for times in self._restarts.values()))


def _breach_keys(breaches: Iterable[Breach]) -> frozenset[tuple[BreachKind, str]]:
    return frozenset((breach.kind, breach.subject) for breach in breaches)


def _record_recall(event: Event, before: Snapshot) -> None:
    loan = before.loans.get(event.subject)
    if event.code is EventCode.NODE_RETURNED and loan is not None and loan.state is LoanState.RECALLED:
        RECALL_DURATION.observe(event.at_s - loan.state_since_s)


def _iter_lost_gpu_s(report: TickReport) -> Iterator[float]:
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
