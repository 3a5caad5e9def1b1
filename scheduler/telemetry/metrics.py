"""Every metric that is counted while things happen, declared once. Figures of the present state are in `fleet_gauges`.

Controller and API are two processes: `ebbtide serve` sets PROMETHEUS_MULTIPROC_DIR for both, so that a scrape of the
API shows the counters of either.
"""

from __future__ import annotations

import os
from collections import Counter as Tally
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from scheduler.domain.decision import PreemptJob
from scheduler.domain.event import Event, EventCode
from scheduler.domain.reason import ReasonCode
from scheduler.domain.replan import ReplanPhase
from scheduler.domain.tick_report import Breach, BreachKind, TickReport

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
_TICK_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_REPLAN_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0)
_KUBERNETES_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_DIRECTIONS = {EventCode.JOB_GROWN: "grow", EventCode.JOB_SHRUNK: "shrink", EventCode.JOB_MOVED: "move"}

REGISTRY = CollectorRegistry()
TICK_DURATION = Histogram(
    "ebbtide_tick_duration_seconds", "Time of a tick by stage.", ["stage"], registry=REGISTRY, buckets=_TICK_BUCKETS_S
)
DECISIONS = Counter("ebbtide_decisions_total", "Decisions taken and committed.", ["kind"], registry=REGISTRY)
VIOLATIONS = Counter("ebbtide_violations_total", "Illegal decisions that were dropped.", ["law"], registry=REGISTRY)
BREACHES = Counter(
    "ebbtide_breaches_total", "Promises broken, each counted when it begins.", ["kind"], registry=REGISTRY
)
RECALLS_LATE = Counter("ebbtide_recalls_late_total", "Lent nodes that were not home in time.", registry=REGISTRY)
LOST_GPU_SECONDS = Counter(
    "ebbtide_lost_gpu_seconds_total", "GPU-seconds of work that had to be done again.", ["cause"], registry=REGISTRY
)
REPLAN_PHASE = Histogram(
    "ebbtide_replan_phase_seconds",
    "Time of a re-plan by phase, the slowest rank's.",
    ["phase"],
    registry=REGISTRY,
    buckets=_REPLAN_BUCKETS_S,
)
REPLAN_BYTES = Counter(
    "ebbtide_replan_bytes_total",
    "Bytes of state that loads of re-plans needed, read, and read of what another node had written.",
    ["kind"],
    registry=REGISTRY,
)
RESIZES = Counter("ebbtide_resizes_total", "Running jobs moved to other GPUs.", ["direction"], registry=REGISTRY)
PREEMPTIONS = Counter("ebbtide_preemptions_total", "Jobs whose GPUs were all taken back.", registry=REGISTRY)
PENDING_JOBS = Gauge(
    "ebbtide_pending_jobs",
    "Jobs that wait, by the reason of the last tick.",
    ["reason"],
    registry=REGISTRY,
    multiprocess_mode="livemostrecent",
)
REQUEST_DURATION = Histogram(
    "ebbtide_api_request_duration_seconds", "Time to answer.", ["method", "route", "status"], registry=REGISTRY
)
STREAMS = Gauge("ebbtide_streams", "Event streams that are open.", registry=REGISTRY, multiprocess_mode="livesum")
WEBHOOK_DELIVERIES = Counter(
    "ebbtide_webhook_deliveries_total",
    "Attempts to deliver to webhooks, as they ended; dead: the last one that is made.",
    ["outcome"],
    registry=REGISTRY,
)
WEBHOOK_LAG = Gauge(
    "ebbtide_webhook_lag_seconds",
    "Age of the oldest message that waits to be delivered to a webhook.",
    registry=REGISTRY,
    multiprocess_mode="livemostrecent",
)
SWEPT = Counter(
    "ebbtide_swept_total",
    "What was removed because it was old enough: rows of logs, and jobs whose logs went.",
    ["kind"],
    registry=REGISTRY,
)

KUBERNETES_REQUESTS = Counter(
    "ebbtide_kubernetes_requests_total",
    "Requests to the API server of Kubernetes as they ended; status 0: no answer.",
    ["verb", "resource", "status"],
    registry=REGISTRY,
)
KUBERNETES_REQUEST_DURATION = Histogram(
    "ebbtide_kubernetes_request_duration_seconds",
    "Time until the API server of Kubernetes answered, or until the wait was given up.",
    ["verb"],
    registry=REGISTRY,
    buckets=_KUBERNETES_BUCKETS_S,
)
KUBERNETES_HEARD_AT = Gauge(
    "ebbtide_kubernetes_heard_timestamp_seconds",
    "When the API server was last heard of a kind that is watched, Unix time.",
    ["resource"],
    registry=REGISTRY,
    multiprocess_mode="livemostrecent",
)
OPERATOR_STANDING = Gauge(
    "ebbtide_operator_standing",
    "1 for how this operator stands now, 0 for the other ways.",
    ["standing"],
    registry=REGISTRY,
    multiprocess_mode="livemostrecent",
)


class TickRecorder:
    """Turns tick reports into metrics. It remembers which breaches stand, so that a lasting one counts once."""

    def __init__(self) -> None:
        self._standing: frozenset[tuple[BreachKind, str]] = frozenset()
        self._reasons: set[ReasonCode] = set()

    def record(self, report: TickReport) -> None:
        """A report that was not committed changed nothing: only its times count."""
        for stage, seconds in report.stage_s.items():
            TICK_DURATION.labels(stage).observe(seconds)
        self._record_breaches(report.breaches)
        for violation in report.violations:
            VIOLATIONS.labels(violation.law.value).inc()
        if report.committed:
            _record_committed(report)
            self._record_waiting(report)

    def _record_breaches(self, breaches: tuple[Breach, ...]) -> None:
        standing = frozenset((breach.kind, breach.subject) for breach in breaches)
        for kind, _ in standing - self._standing:
            BREACHES.labels(kind.value).inc()
            if kind is BreachKind.RECALL_LATE:
                RECALLS_LATE.inc()
        self._standing = standing

    def _record_waiting(self, report: TickReport) -> None:
        """A reason that no job waits for any more goes to 0: a series that vanishes looks like a fault."""
        waiting = Tally(reason.code for reason in report.waiting.values())
        self._reasons.update(waiting)
        for code in self._reasons:
            PENDING_JOBS.labels(code.value).set(waiting[code])


def _record_committed(report: TickReport) -> None:
    for decision in report.decisions:
        DECISIONS.labels(type(decision).__name__).inc()
        if isinstance(decision, PreemptJob):
            PREEMPTIONS.inc()
    for event in report.events:
        if event.code is EventCode.JOB_LOST_WORK:
            LOST_GPU_SECONDS.labels(event.cause).inc(event.numbers.get("gpu_s", 0.0))
        if event.code is EventCode.JOB_REPLANNED:
            _record_replan(event)
        if event.code in _DIRECTIONS:
            RESIZES.labels(_DIRECTIONS[event.code]).inc()


def _record_replan(event: Event) -> None:
    for phase in ReplanPhase:
        if (seconds := event.numbers.get(f"{phase}_s")) is not None:
            REPLAN_PHASE.labels(phase.value).observe(seconds)
    for kind in ("needed", "read", "moved"):
        REPLAN_BYTES.labels(kind).inc(event.numbers.get(f"{kind}_bytes", 0.0))


def record_request(*, method: str, route: str, status: int, seconds: float) -> None:
    """One answered request. `route` is the template, never the path, so that its labels stay few."""
    REQUEST_DURATION.labels(method, route, str(status)).observe(seconds)


def record_delivery(outcome: str) -> None:
    """One attempt for a webhook: delivered, failed (and made again) or dead."""
    WEBHOOK_DELIVERIES.labels(outcome).inc()


def record_webhook_lag(seconds: float) -> None:
    WEBHOOK_LAG.set(seconds)


def record_swept(kind: str, count: int) -> None:
    """Rows of a log, or jobs whose logs went (`logs`)."""
    SWEPT.labels(kind).inc(count)


def record_asked(*, verb: str, resource: str, status: int, took_s: float) -> None:
    """One request. Verbs and resources are those of our own code, so that labels stay few."""
    KUBERNETES_REQUESTS.labels(verb, resource, str(status)).inc()
    KUBERNETES_REQUEST_DURATION.labels(verb).observe(took_s)


def record_round(*, standing: str, among: Iterable[str], silent_s: Mapping[str, float], now_s: float) -> None:
    """How an operator stands, and how long ago the API server was heard, by resource. Kept as a point in time: where
    the operator hangs, nobody is left to let an age grow."""
    for each in among:
        OPERATOR_STANDING.labels(each).set(each == standing)
    for resource, ago_s in silent_s.items():
        KUBERNETES_HEARD_AT.labels(resource).set(now_s - ago_s)


def exposition(*collectors: Collector) -> bytes:
    """All metrics in the text format of Prometheus, with those of `collectors` in this moment."""
    registry = CollectorRegistry()
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]  # prometheus_client leaves it untyped
    else:
        registry.register(REGISTRY)
    for collector in collectors:
        registry.register(collector)
    return generate_latest(registry)
