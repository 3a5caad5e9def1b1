"""Metrics recorded from tick reports: counters and durations, forecast coverage and goodput."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from scheduler.domain import gpu_sets
from scheduler.domain.capacity_history import GPU_USES
from scheduler.domain.decisions import PreemptJob, ReasonCode
from scheduler.domain.events import Event, EventCode
from scheduler.domain.fleet import Forecast, LoanState, PoolKind
from scheduler.domain.job import Job
from scheduler.domain.job_records import ReplanPhase
from scheduler.domain.job_state import PLACED_STATES, JobState
from scheduler.domain.observation import Observation
from scheduler.domain.recall_receipts import RecallOutcome
from scheduler.domain.shortages import ShortageDay
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.tick_report import Breach, BreachKind, TickReport
from scheduler.scheduling.capacity_use import integrate_capacity
from scheduler.scheduling.legality import find_breaches
from scheduler.telemetry.exposition import TracedHistogram
from scheduler.telemetry.job_ends import declare_job_ends, record_job_ends
from scheduler.telemetry.metrics import (
    ACTIVE_BREACHES,
    BREACHES,
    CAPACITY_GPU_SECONDS,
    DECISIONS,
    FORECAST_COVERAGE,
    FORECASTS_EVALUATED,
    GOODPUT,
    GPU_SECONDS,
    IDLE_GPU_SECONDS,
    INFERENCE_INTERVALS,
    JCT,
    LENT,
    LOST_GPU_SECONDS,
    OWN,
    PENDING_JOBS,
    PREEMPTIONS,
    PREFETCH_DURATION,
    QUEUEING,
    RECALL_DURATION,
    RECALLS,
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
from scheduler.telemetry.traces import get_job_trace_id

COVERAGE_WINDOW_S = 86_400.0
GOODPUT_WINDOW_S = 86_400.0
_GOODPUT_SLOT_S = 3600.0
RESTARTING_THRESHOLD = 3
RESTARTS_WINDOW_S = 3600.0
_DIRECTIONS = {
    EventCode.JOB_GROWN: "grow",
    EventCode.JOB_SHRUNK: "shrink",
    EventCode.JOB_MOVED: "move",
    EventCode.JOB_REARRANGED: "rearrange",
}
_PREFETCH_OUTCOMES = {EventCode.NODE_PREFETCHED: "loaded", EventCode.PREFETCH_FAILED: "failed"}
_RESTART_CAUSES = {JobState.QUEUED: "workers", JobState.PLANNING: "out-of-memory"}


class TickRecorder:
    """Recorder of tick reports in the process that leads.

    It keeps the active breaches, so that each is counted once, recent restarts, and sums for the ratios over a day.
    """

    def __init__(self) -> None:
        self._active_breaches: frozenset[tuple[BreachKind, str]] | None = None
        self._pending_labels: set[tuple[str, ReasonCode]] = set()
        self._restarts: defaultdict[str, deque[float]] = defaultdict(deque)
        self._goodput = GoodputTracker()
        self._coverage = ForecastCoverageTracker()
        self._is_traced = False
        self._publish_active_breaches()

    def record(self, report: TickReport, trace_id: str = "") -> None:
        """Record a report. Decisions and events count only if it was committed.

        `trace_id` is the trace of the tick, empty if it has none: durations of its jobs have exemplars only with it.
        """
        self._is_traced = bool(trace_id)
        for stage, seconds in report.stage_s.items():
            TICK_DURATION.observe(seconds, stage, trace_id=trace_id, at_s=report.now_s)
        self._record_breaches(report)
        for violation in report.violations:
            VIOLATIONS.labels(violation.invariant.value).inc()
        self._record_pending(report)
        _declare_recalls(report.after)
        declare_job_ends(report)
        lost_gpu_s = 0.0
        if report.committed:
            for decision in report.decisions:
                DECISIONS.labels(type(decision).__name__).inc()
                if isinstance(decision, PreemptJob):
                    PREEMPTIONS.labels(decision.reason.code.value).inc()
            _record_intervals(report)
            record_job_ends(report)
            record_capacity(report)
            for event in report.events:
                _record_event(event, report.before)
                self._record_job_timing(event, report)
                _record_recall(event, report.before)
            for receipt in report.settled_recalls:
                assert receipt.outcome is not None, "a settled recall has an outcome"
                RECALLS.labels(receipt.pool, receipt.outcome.value).inc()
            lost_gpu_s = sum(_iter_lost_gpu_s(report))
        self._expire_restarts(report)
        self._goodput.record(report.before, report.now_s, lost_gpu_s)
        self._coverage.record(report)

    def reset(self) -> None:
        """Clear the current state after losing leadership: another process exports it from now on."""
        for queue, code in self._pending_labels:
            PENDING_JOBS.labels(queue, code.value).set(0)
        self._active_breaches = None
        self._publish_active_breaches()
        self._restarts.clear()
        RESTARTING_JOBS.set(0)
        self._goodput.reset()
        self._coverage.reset()

    def _record_breaches(self, report: TickReport) -> None:
        if self._active_breaches is None:  # a new leader: its predecessor has counted the breaches of the stored state
            self._active_breaches = _breach_keys(find_breaches(report.before, Observation(report.before.now_s, 0)))
        active = _breach_keys(report.breaches)
        for kind, _ in active - self._active_breaches:
            BREACHES.labels(kind.value).inc()
            if kind is BreachKind.RECALL_LATE:
                RECALLS_LATE.inc()
        self._active_breaches = active
        self._publish_active_breaches()

    def _publish_active_breaches(self) -> None:
        counts = Counter(kind for kind, _ in self._active_breaches or ())
        for kind in BreachKind:
            ACTIVE_BREACHES.labels(kind.value).set(counts[kind])

    def _record_pending(self, report: TickReport) -> None:
        """Set the number of pending jobs per reason. Reasons without jobs go to 0, so that no series disappears."""
        jobs, queues = report.after.jobs, report.after.queues
        pending: Counter[tuple[str, ReasonCode]] = Counter()
        for job_id, reason in report.waiting.items():
            queue = jobs[job_id].spec.queue
            pending[queue if queue in queues else "", reason.code] += 1
        self._pending_labels.update(pending)
        for queue, code in self._pending_labels:
            PENDING_JOBS.labels(queue, code.value).set(pending[queue, code])

    def _record_job_timing(self, event: Event, report: TickReport) -> None:
        """Record durations when they end: queueing, resize and completion; count restarts."""
        before, job = report.before.jobs.get(event.subject), report.after.jobs.get(event.subject)
        if job is None:
            return
        if event.code is EventCode.JOB_STARTED and job.account.first_started_at_s == report.now_s:
            self._observe(QUEUEING, report.now_s - job.submitted_at_s, job, report)
        if event.code is not EventCode.JOB_STATE or not event.cause or before is None:
            return
        state = JobState(event.cause)
        if state is JobState.SUCCEEDED:
            self._observe(JCT, report.now_s - job.submitted_at_s, job, report)
        elif state is JobState.RUNNING and before.state is JobState.RESIZING:
            self._observe(RESIZE_DURATION, report.now_s - before.state_since_s, job, report)
        elif state in _RESTART_CAUSES and before.state in PLACED_STATES:
            RESTARTS.labels(_RESTART_CAUSES[state]).inc()
            self._restarts[job.id].append(report.now_s)

    def _observe(self, histogram: TracedHistogram, seconds: float, job: Job, report: TickReport) -> None:
        trace_id = get_job_trace_id(job.id) if self._is_traced else ""
        histogram.observe(seconds, trace_id=trace_id, at_s=report.now_s)

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


def _declare_recalls(snapshot: Snapshot) -> None:
    """Export the recalls of all inference pools as 0 before the first: Prometheus sees no increase of a new series."""
    for pool in snapshot.pools.values():
        if pool.kind is PoolKind.INFERENCE:
            for outcome in RecallOutcome:
                RECALLS.labels(pool.name, outcome.value)


def _record_intervals(report: TickReport) -> None:
    """Count the five-minute intervals that this tick closed, as the record of the pool's shortages counts them."""
    for pool, reading in report.after.demand.items():
        for outcome in ("met", "short"):
            INFERENCE_INTERVALS.labels(pool, outcome)  # exports 0 before the first
        before = report.before.demand.get(pool)
        if before is None or before.shortages is reading.shortages:
            continue
        known = {day.day: day for day in before.shortages.days}
        for day in reading.shortages.days:
            old = known.get(day.day, ShortageDay(day.day, 0, 0))
            short = day.short - old.short
            INFERENCE_INTERVALS.labels(pool, "short").inc(short)
            INFERENCE_INTERVALS.labels(pool, "met").inc(day.intervals - old.intervals - short)


def _record_recall(event: Event, before: Snapshot) -> None:
    loan = before.loans.get(event.subject)
    if event.code is EventCode.NODE_RETURNED and loan is not None and loan.state is LoanState.RECALLED:
        RECALL_DURATION.observe(event.at_s - loan.state_since_s)


def _iter_lost_gpu_s(report: TickReport) -> Iterator[float]:
    return (event.numbers.get("gpu_s", 0.0) for event in report.events if event.code is EventCode.JOB_LOST_WORK)


def _record_event(event: Event, before: Snapshot) -> None:
    if event.code is EventCode.JOB_LOST_WORK:
        _record_lost_work(event, before)
    if event.code is EventCode.JOB_REPLANNED:
        _record_replan(event)
    if event.code in _DIRECTIONS:
        RESIZES.labels(_DIRECTIONS[event.code], event.cause).inc()
    if event.code in _PREFETCH_OUTCOMES:
        outcome = _PREFETCH_OUTCOMES[event.code]
        PREFETCH_DURATION.observe(event.numbers["seconds"], event.cause, outcome)


def _record_lost_work(event: Event, before: Snapshot) -> None:
    """Count lost work by the GPUs that the job held when the loss was observed, own ones and lent ones."""
    gpu_s, job = event.numbers.get("gpu_s", 0.0), before.jobs.get(event.subject)
    held = {} if job is None else job.allocation.held
    lent = sum(len(indices) for node, indices in held.items() if before.is_lent(before.nodes[node]))
    lent_gpu_s = gpu_s * lent / max(1, gpu_sets.count(held))
    LOST_GPU_SECONDS.labels(event.cause, OWN).inc(gpu_s - lent_gpu_s)
    LOST_GPU_SECONDS.labels(event.cause, LENT).inc(lent_gpu_s)


def _record_replan(event: Event) -> None:
    for phase in ReplanPhase:
        if (seconds := event.numbers.get(f"{phase}_s")) is not None:
            REPLAN_PHASE.observe(seconds, phase.value)
    for kind in REPLAN_BYTES_KINDS:
        REPLAN_BYTES.labels(kind).inc(event.numbers.get(f"{kind}_bytes", 0.0))


@dataclass(slots=True)
class _OpenForecast:
    """A forecast whose horizon has not passed, and the largest demand so far."""

    forecast: Forecast
    largest_gpus: float


class ForecastCoverageTracker:
    """Share of the last day's forecasts for which demand stayed at or below each quantile.

    A forecast is evaluated once, after its horizon, with the largest requested demand within it, including demand above
    the capacity of the pool and the demand at the time of the forecast. A forecast that a known event raises is not the
    model's, and does not count.
    """

    def __init__(self) -> None:
        self._newest: dict[str, float] = {}
        self._open: defaultdict[str, deque[_OpenForecast]] = defaultdict(deque)
        self._evaluated: defaultdict[tuple[str, float], deque[tuple[float, bool]]] = defaultdict(deque)

    def record(self, report: TickReport) -> None:
        for pool, reading in report.readings:
            for pending in self._open[pool]:
                if reading.at_s <= pending.forecast.made_at_s + pending.forecast.horizon_s:
                    pending.largest_gpus = max(pending.largest_gpus, reading.asked_gpus)
        for pool, queue in self._open.items():
            while queue and queue[0].forecast.made_at_s + queue[0].forecast.horizon_s <= report.now_s:
                self._evaluate(pool, queue.popleft(), report.now_s)
        for pool, forecast in report.after.forecasts.items():
            demand = report.after.demand.get(pool)
            if self._newest.get(pool) != forecast.made_at_s and demand is not None and not forecast.event:
                self._newest[pool] = forecast.made_at_s
                FORECASTS_EVALUATED.labels(pool)  # exports 0 before the first evaluation
                self._open[pool].append(_OpenForecast(forecast, demand.asked_gpus))

    def reset(self) -> None:
        for pool, quantile in self._evaluated:
            FORECAST_COVERAGE.labels(pool, f"{quantile:g}").set(float("nan"))
        self._evaluated.clear()
        self._open.clear()

    def _evaluate(self, pool: str, pending: _OpenForecast, now_s: float) -> None:
        FORECASTS_EVALUATED.labels(pool).inc()
        for quantile, gpus in zip(pending.forecast.quantiles, pending.forecast.gpus, strict=True):
            outcomes = self._evaluated[pool, quantile]
            outcomes.append((now_s, pending.largest_gpus <= gpus))
            while outcomes[0][0] <= now_s - COVERAGE_WINDOW_S:
                outcomes.popleft()
            covered = sum(is_covered for _, is_covered in outcomes)
            FORECAST_COVERAGE.labels(pool, f"{quantile:g}").set(covered / len(outcomes))


class GoodputTracker:
    """Goodput over the last day: the fraction of allocated GPU time that was useful.

    Goodput is the fraction of the allocated time in which workers ran, times the fraction of the work that was kept.
    Lost work is measured in allocated GPU-seconds (`JobLostWork`), which include starts and moves: subtracting it from
    the running time would count those twice. GPU-seconds are summed per hour.
    """

    def __init__(self) -> None:
        self._until_s: float | None = None
        self._slots: deque[list[float]] = deque()

    def record(self, before: Snapshot, now_s: float, lost_gpu_s: float) -> None:
        """Add the time since the last call, in which the cluster had the state `before`, and newly detected losses."""
        elapsed_s = 0.0 if self._until_s is None else now_s - self._until_s
        self._until_s = now_s
        held, running = _count_gpus(before) if elapsed_s else (0, 0)
        GPU_SECONDS.labels("running").inc(running * elapsed_s)
        GPU_SECONDS.labels("moving").inc((held - running) * elapsed_s)
        slot_s = now_s // _GOODPUT_SLOT_S * _GOODPUT_SLOT_S
        if not self._slots or self._slots[-1][0] != slot_s:
            self._slots.append([slot_s, 0.0, 0.0, 0.0])
        for index, added in enumerate((held * elapsed_s, running * elapsed_s, lost_gpu_s), 1):
            self._slots[-1][index] += added
        while self._slots[0][0] <= now_s - GOODPUT_WINDOW_S - _GOODPUT_SLOT_S:
            self._slots.popleft()
        GOODPUT.set(self._compute_ratio())

    def reset(self) -> None:
        self._until_s = None
        self._slots.clear()
        GOODPUT.set(float("nan"))

    def _compute_ratio(self) -> float:
        held_s, running_s, lost_s = (sum(slot[index] for slot in self._slots) for index in (1, 2, 3))
        if not held_s:
            return float("nan")
        return running_s / held_s * max(0.0, 1.0 - lost_s / held_s)


def _count_gpus(snapshot: Snapshot) -> tuple[int, int]:
    """Return the GPUs held by jobs, and those of them whose workers run."""
    index = snapshot.index
    held = sum(map(len, index.holders.values()))
    return held, sum(snapshot.jobs[job_id].allocation.target_gpus for job_id in index.running)


def record_capacity(report: TickReport) -> None:
    """Count the use since the previous commit. Call it for committed ticks only, which store the same bins."""
    pools = report.before.pools
    for name, pool in pools.items():
        for use in GPU_USES:
            CAPACITY_GPU_SECONDS.labels(name, use)  # exports 0 before the first
        IDLE_GPU_SECONDS.labels(name, OWN if pool.kind is PoolKind.TRAINING else LENT)
    for each in integrate_capacity(report.before, report.after.now_s):
        for use, gpu_s in each.uses_gpu_s.items():
            CAPACITY_GPU_SECONDS.labels(each.pool, use).inc(gpu_s)
        if pools[each.pool].kind is PoolKind.TRAINING:
            IDLE_GPU_SECONDS.labels(each.pool, OWN).inc(each.free_waited_gpu_s)
        else:
            IDLE_GPU_SECONDS.labels(each.pool, LENT).inc(each.lent_idle_waited_gpu_s)
