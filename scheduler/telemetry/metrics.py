"""Every metric that is counted while things happen, declared once. Figures of the present state are in `fleet_gauges`.

Controller and API are two processes: `ebbtide serve` sets PROMETHEUS_MULTIPROC_DIR for both, so that a scrape of the
API shows the counters of either.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from scheduler.telemetry.counted_files import CountedFiles
from scheduler.telemetry.text_format import rendered

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
_TICK_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_REPLAN_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0)
_KUBERNETES_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_WAIT_BUCKETS_S = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 1800.0, 3600.0, 7200.0, 21600.0, 86400.0, 259200.0)
_JCT_BUCKETS_S = (60.0, 300.0, 900.0, 1800.0, 3600.0, 7200.0, 14400.0, 28800.0, 86400.0, 259200.0, 604800.0, 2592000.0)
_RESIZE_BUCKETS_S = (1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0)
_REQUEST_BUCKETS_S = (0.005, 0.025, 0.1, 0.25, 1.0, 5.0)
_SOLVE_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
_GAP_BUCKETS = (0.0, 0.0001, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3)

disable_created_metrics()  # type: ignore[no-untyped-call]  # a series more for each counter and histogram, unused

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
RESIZES = Counter(
    "ebbtide_resize_total", "Running jobs given other GPUs or another plan.", ["direction", "reason"], registry=REGISTRY
)
RESIZE_DURATION = Histogram(
    "ebbtide_resize_duration_seconds",
    "From a resize's decision until all workers of the new plan run.",
    registry=REGISTRY,
    buckets=_RESIZE_BUCKETS_S,
)
PREEMPTIONS = Counter(
    "ebbtide_preemptions_total", "Jobs whose GPUs were all taken back.", ["reason"], registry=REGISTRY
)
RESTARTS = Counter(
    "ebbtide_restarts_total", "Runs that ended unasked, whose jobs try again.", ["cause"], registry=REGISTRY
)
RESTARTING_JOBS = Gauge(
    "ebbtide_restarting_jobs",
    "Live jobs whose runs ended unasked three times or more within the last hour.",
    registry=REGISTRY,
    multiprocess_mode="livemostrecent",
)
RECALL_DURATION = Histogram(
    "ebbtide_recall_duration_seconds",
    "From a recall's decision until the node is given back.",
    registry=REGISTRY,
    buckets=_RESIZE_BUCKETS_S,
)
QUEUEING = Histogram(
    "ebbtide_queueing_seconds",
    "From a job's submission to its first start.",
    registry=REGISTRY,
    buckets=_WAIT_BUCKETS_S,
)
JCT = Histogram(
    "ebbtide_jct_seconds",
    "Job completion time: from submission to success.",
    registry=REGISTRY,
    buckets=_JCT_BUCKETS_S,
)
GPU_SECONDS = Counter(
    "ebbtide_gpu_seconds_total",
    "GPU-seconds that jobs held, by use: running, or moving (starting, resizing, leaving).",
    ["use"],
    registry=REGISTRY,
)
GOODPUT = Gauge(
    "ebbtide_goodput_ratio",
    "Useful GPU-seconds over GPU-seconds held, of the last 24 hours.",
    registry=REGISTRY,
    multiprocess_mode="livemostrecent",
)
GOODPUT.set(float("nan"))  # a process that does not lead knows of none, which is not 0
FORECAST_COVERAGE = Gauge(
    "ebbtide_forecast_coverage_ratio",
    "Part of the forecasts of the last 24 hours that demand stayed at or below, by quantile.",
    ["pool", "quantile"],
    registry=REGISTRY,
    multiprocess_mode="livemostrecent",
)
FORECASTS_JUDGED = Counter(
    "ebbtide_forecasts_judged_total", "Forecasts whose horizon has passed.", ["pool"], registry=REGISTRY
)
SOLVE_DURATION = Histogram(
    "ebbtide_solve_duration_seconds",
    "Time to solve a shape of a scaling curve, in its process.",
    registry=REGISTRY,
    buckets=_SOLVE_BUCKETS_S,
)
SOLVE_GAP = Histogram(
    "ebbtide_solve_optimality_gap",
    "Proven gap to the optimum, as a share of the step time, of each plan found.",
    registry=REGISTRY,
    buckets=_GAP_BUCKETS,
)
PENDING_JOBS = Gauge(
    "ebbtide_pending_jobs",
    "Jobs that wait, by declared queue and the reason of the last tick.",
    ["queue", "reason"],
    registry=REGISTRY,
    multiprocess_mode="livemostrecent",
)
REQUEST_DURATION = Histogram(
    "ebbtide_api_request_duration_seconds",
    "Time to answer.",
    ["method", "route"],
    registry=REGISTRY,
    buckets=_REQUEST_BUCKETS_S,
)
REQUESTS = Counter(
    "ebbtide_api_requests_total", "Requests answered, by status.", ["method", "route", "status"], registry=REGISTRY
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
    if folder := os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
        registry.register(CountedFiles(folder))
    else:
        registry.register(REGISTRY)
    for collector in collectors:
        registry.register(collector)
    return rendered(registry)
