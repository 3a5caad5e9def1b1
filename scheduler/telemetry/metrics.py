"""Upper bounds of the buckets of histograms; in seconds, those of gaps as a share.

The values that bounded labels can have, each as it is counted.

Every metric that is counted while things happen, declared once. Figures of the present state are in `fleet_gauges`.

Controller and API are two processes: `ebbtide serve` sets PROMETHEUS_MULTIPROC_DIR for both, so that a scrape of the
API shows the counters of either.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from itertools import product
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from scheduler.domain.decisions import Decision, ReasonCode
from scheduler.domain.events import DeliveryState
from scheduler.domain.job_records import ReplanPhase
from scheduler.domain.observation import FailureCause, RunPhase
from scheduler.domain.tick_report import BreachKind, Invariant
from scheduler.telemetry.multiprocess_files import MetricFilesCollector, drop_stale_gauges
from scheduler.telemetry.text_format import render

TICK_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
REPLAN_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0)
KUBERNETES_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
QUEUEING_BUCKETS = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 1800.0, 3600.0, 7200.0, 21600.0, 86400.0, 259200.0)
JCT_BUCKETS = (60.0, 300.0, 900.0, 1800.0, 3600.0, 7200.0, 14400.0, 28800.0, 86400.0, 259200.0, 604800.0, 2592000.0)
RESIZE_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0)
REQUEST_BUCKETS = (0.005, 0.025, 0.1, 0.25, 1.0, 5.0)
SOLVE_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
GAP_BUCKETS = (0.0, 0.0001, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3)


DECISION_KINDS = tuple(kind.__name__ for kind in get_args(Decision))
LAWS = tuple(law.value for law in Invariant)
BREACH_KINDS = tuple(kind.value for kind in BreachKind)
LOSS_CAUSES = (FailureCause.OUT_OF_MEMORY.value, RunPhase.FAILED.value, RunPhase.LOST.value, RunPhase.LEFT.value)
REPLAN_BYTES_KINDS = ("needed", "read", "moved")
RESIZE_DIRECTIONS = ("grow", "shrink", "move", "rearrange")
_NODE_LOSS_REASONS = (ReasonCode.NODE_DOWN, ReasonCode.NODE_DRAINED, ReasonCode.NODE_RECALLED)
RESIZE_REASONS = tuple(
    code.value
    for code in (
        *(
            ReasonCode.GAIN_EXCEEDS_COST,
            ReasonCode.MAKES_ROOM_FOR_WAITING_JOB,
            ReasonCode.RANGE_CHANGED,
            ReasonCode.QUOTA_RECLAIMED,
        ),
        *(ReasonCode.DEFRAGMENTED, ReasonCode.LAYERS_FROZE, *_NODE_LOSS_REASONS),
    )
)
PREEMPTION_REASONS = tuple(
    code.value for code in (ReasonCode.OUTRANKED, ReasonCode.QUOTA_RECLAIMED, *_NODE_LOSS_REASONS)
)
RESTART_CAUSES = ("workers", "out-of-memory")
GPU_USES = ("running", "moving")
DELIVERY_OUTCOMES = (DeliveryState.DELIVERED.value, "failed", DeliveryState.DEAD.value)
RETENTION_KINDS = ("events", "decisions", "audit", "commands", "deliveries", "logs")


CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

disable_created_metrics()  # type: ignore[no-untyped-call]  # a series more for each counter and histogram, unused

if _folder := os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
    drop_stale_gauges(_folder)
REGISTRY = CollectorRegistry()


def _declare_counter(name: str, text: str, **labels: Iterable[str]) -> Counter:
    """A counter whose labels have these values alone. Each is shown from the start, at 0: one that appears with its
    first 1 has not increased as Prometheus sees it, and no alert would fire."""
    counter = Counter(name, text, list(labels), registry=REGISTRY)
    for values in product(*labels.values()) if labels else ():
        counter.labels(*values)
    return counter


def _declare_latest_gauge(name: str, text: str, *labels: str) -> Gauge:
    """A gauge that shows what was set last, by whichever process that is alive."""
    return Gauge(name, text, labels, registry=REGISTRY, multiprocess_mode="livemostrecent")


TICK_DURATION = Histogram(
    "ebbtide_tick_duration_seconds",
    "Time of a tick by stage.",
    ["stage"],
    registry=REGISTRY,
    buckets=TICK_BUCKETS,
)
DECISIONS = _declare_counter("ebbtide_decisions_total", "Decisions taken and committed.", kind=DECISION_KINDS)
VIOLATIONS = _declare_counter("ebbtide_violations_total", "Illegal decisions that were dropped.", law=LAWS)
BREACHES = _declare_counter(
    "ebbtide_breaches_total", "Promises broken, each counted when it begins.", kind=BREACH_KINDS
)
ACTIVE_BREACHES = _declare_latest_gauge(
    "ebbtide_standing_breaches", "Promises that are broken as of the last tick of the process that ticks.", "kind"
)
RECALLS_LATE = _declare_counter("ebbtide_recalls_late_total", "Lent nodes that were not home in time.")
LOST_GPU_SECONDS = _declare_counter(
    "ebbtide_lost_gpu_seconds_total", "GPU-seconds of work that had to be done again.", cause=LOSS_CAUSES
)
REPLAN_PHASE = Histogram(
    "ebbtide_replan_phase_seconds",
    "Time of a re-plan by phase, the slowest rank's.",
    ["phase"],
    registry=REGISTRY,
    buckets=REPLAN_BUCKETS,
)
for _phase in ReplanPhase:
    REPLAN_PHASE.labels(_phase.value)
REPLAN_BYTES = _declare_counter(
    "ebbtide_replan_bytes_total",
    "Bytes of state that loads of re-plans needed, read, and read of what another node had written.",
    kind=REPLAN_BYTES_KINDS,
)
RESIZES = _declare_counter(
    "ebbtide_resize_total",
    "Running jobs given other GPUs or another plan.",
    direction=RESIZE_DIRECTIONS,
    reason=RESIZE_REASONS,
)
RESIZE_DURATION = Histogram(
    "ebbtide_resize_duration_seconds",
    "From a resize's decision until all workers of the new plan run.",
    registry=REGISTRY,
    buckets=RESIZE_BUCKETS,
)
PREEMPTIONS = _declare_counter(
    "ebbtide_preemptions_total", "Jobs whose GPUs were all taken back.", reason=PREEMPTION_REASONS
)
RESTARTS = _declare_counter(
    "ebbtide_restarts_total", "Runs that ended unasked, whose jobs try again.", cause=RESTART_CAUSES
)
RESTARTING_JOBS = _declare_latest_gauge(
    "ebbtide_restarting_jobs", "Live jobs whose runs ended unasked three times or more within the last hour."
)
RECALL_DURATION = Histogram(
    "ebbtide_recall_duration_seconds",
    "From a recall's decision until the node is given back.",
    registry=REGISTRY,
    buckets=RESIZE_BUCKETS,
)
QUEUEING = Histogram(
    "ebbtide_queueing_seconds",
    "From a job's submission to its first start.",
    registry=REGISTRY,
    buckets=QUEUEING_BUCKETS,
)
JCT = Histogram(
    "ebbtide_jct_seconds",
    "Job completion time: from submission to success.",
    registry=REGISTRY,
    buckets=JCT_BUCKETS,
)
GPU_SECONDS = _declare_counter(
    "ebbtide_gpu_seconds_total",
    "GPU-seconds that jobs held, by use: running, or moving (starting, resizing, leaving).",
    use=GPU_USES,
)
GOODPUT = _declare_latest_gauge(
    "ebbtide_goodput_ratio", "Useful GPU-seconds over GPU-seconds held, of the last 24 hours."
)
GOODPUT.set(float("nan"))  # a process that does not lead knows of none, which is not 0
FORECAST_COVERAGE = _declare_latest_gauge(
    "ebbtide_forecast_coverage_ratio",
    "Part of the forecasts of the last 24 hours that demand stayed at or below, by quantile.",
    "pool",
    "quantile",
)
FORECASTS_EVALUATED = Counter(
    "ebbtide_forecasts_judged_total", "Forecasts whose horizon has passed.", ["pool"], registry=REGISTRY
)
SOLVE_DURATION = Histogram(
    "ebbtide_solve_duration_seconds",
    "Time to solve a shape of a scaling curve, in its process.",
    registry=REGISTRY,
    buckets=SOLVE_BUCKETS,
)
SOLVE_GAP = Histogram(
    "ebbtide_solve_optimality_gap",
    "Proven gap to the optimum, as a share of the step time, of each plan found.",
    registry=REGISTRY,
    buckets=GAP_BUCKETS,
)
PENDING_JOBS = _declare_latest_gauge(
    "ebbtide_pending_jobs", "Jobs that wait, by declared queue and the reason of the last tick.", "queue", "reason"
)
REQUEST_DURATION = Histogram(
    "ebbtide_api_request_duration_seconds",
    "Time to answer.",
    ["method", "route"],
    registry=REGISTRY,
    buckets=REQUEST_BUCKETS,
)
REQUESTS = Counter(
    "ebbtide_api_requests_total", "Requests answered, by status.", ["method", "route", "status"], registry=REGISTRY
)
STREAMS = Gauge("ebbtide_streams", "Event streams that are open.", registry=REGISTRY, multiprocess_mode="livesum")
WEBHOOK_DELIVERIES = _declare_counter(
    "ebbtide_webhook_deliveries_total",
    "Attempts to deliver to webhooks, as they ended; dead: the last one that is made.",
    outcome=DELIVERY_OUTCOMES,
)
WEBHOOK_LAG = _declare_latest_gauge(
    "ebbtide_webhook_lag_seconds", "Age of the oldest message that waits to be delivered to a webhook."
)
HISTORY_DELETED = _declare_counter(
    "ebbtide_swept_total",
    "What was removed because it was old enough: rows of logs, and jobs whose logs went.",
    kind=RETENTION_KINDS,
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
    buckets=KUBERNETES_BUCKETS,
)
KUBERNETES_LAST_RESPONSE = _declare_latest_gauge(
    "ebbtide_kubernetes_heard_timestamp_seconds",
    "When the API server was last heard of a kind that is watched, Unix time.",
    "resource",
)
OPERATOR_STATUS = _declare_latest_gauge(
    "ebbtide_operator_standing", "1 for how this operator stands now, 0 for the other ways.", "standing"
)


def record_request(*, method: str, route: str, status: int, seconds: float) -> None:
    """One answered request. `route` is the template, never the path, so that its labels stay few."""
    REQUEST_DURATION.labels(method, route).observe(seconds)
    REQUESTS.labels(method, route, str(status)).inc()


def record_solve(seconds: float, gaps: Iterable[float]) -> None:
    """One shape of a curve, solved in `seconds`; the gap of each plan found."""
    SOLVE_DURATION.observe(seconds)
    for gap in gaps:
        SOLVE_GAP.observe(gap)


def record_delivery(outcome: str) -> None:
    """One attempt for a webhook: delivered, failed (and made again) or dead."""
    WEBHOOK_DELIVERIES.labels(outcome).inc()


def record_webhook_lag(seconds: float) -> None:
    WEBHOOK_LAG.set(seconds)


def record_history_deletion(kind: str, count: int) -> None:
    """Rows of a log, or jobs whose logs went (`logs`)."""
    HISTORY_DELETED.labels(kind).inc(count)


def record_kubernetes_request(*, verb: str, resource: str, status: int, seconds: float) -> None:
    """One request. Verbs and resources are those of our own code, so that labels stay few."""
    KUBERNETES_REQUESTS.labels(verb, resource, str(status)).inc()
    KUBERNETES_REQUEST_DURATION.labels(verb).observe(seconds)


def record_operator_status(
    *, status: str, statuses: Iterable[str], silence_s: Mapping[str, float], now_s: float
) -> None:
    """How an operator stands, and how long ago the API server was heard, by resource. Kept as a point in time: where
    the operator hangs, nobody is left to let an age grow."""
    for each in statuses:
        OPERATOR_STATUS.labels(each).set(each == status)
    for resource, ago_s in silence_s.items():
        KUBERNETES_LAST_RESPONSE.labels(resource).set(now_s - ago_s)


def render_metrics(*collectors: Collector) -> bytes:
    """All metrics in the text format of Prometheus, with those of `collectors` in this moment."""
    registry = CollectorRegistry()
    if folder := os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
        registry.register(MetricFilesCollector(folder))
    else:
        registry.register(REGISTRY)
    for collector in collectors:
        registry.register(collector)
    return render(registry)
