"""Every metric that is counted while things happen, declared once. Figures of the present state are in `fleet_gauges`.

Controller and API are two processes: `ebbtide serve` sets PROMETHEUS_MULTIPROC_DIR for both, so that a scrape of the
API shows the counters of either.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from itertools import product

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from scheduler.domain.replan import ReplanPhase
from scheduler.telemetry import buckets
from scheduler.telemetry import label_values as known
from scheduler.telemetry.counted_files import CountedFiles, forget_the_dead
from scheduler.telemetry.text_format import rendered

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

disable_created_metrics()  # type: ignore[no-untyped-call]  # a series more for each counter and histogram, unused

if _folder := os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
    forget_the_dead(_folder)
REGISTRY = CollectorRegistry()


def _counter(name: str, text: str, **labels: Iterable[str]) -> Counter:
    """A counter whose labels have these values alone. Each is shown from the start, at 0: one that appears with its
    first 1 has not increased as Prometheus sees it, and no alert would fire."""
    counter = Counter(name, text, list(labels), registry=REGISTRY)
    for values in product(*labels.values()) if labels else ():
        counter.labels(*values)
    return counter


def _latest(name: str, text: str, *labels: str) -> Gauge:
    """A gauge that shows what was set last, by whichever process that is alive."""
    return Gauge(name, text, labels, registry=REGISTRY, multiprocess_mode="livemostrecent")


TICK_DURATION = Histogram(
    "ebbtide_tick_duration_seconds", "Time of a tick by stage.", ["stage"], registry=REGISTRY, buckets=buckets.TICK_S
)
DECISIONS = _counter("ebbtide_decisions_total", "Decisions taken and committed.", kind=known.DECISION_KINDS)
VIOLATIONS = _counter("ebbtide_violations_total", "Illegal decisions that were dropped.", law=known.LAWS)
BREACHES = _counter("ebbtide_breaches_total", "Promises broken, each counted when it begins.", kind=known.BREACH_KINDS)
STANDING_BREACHES = _latest(
    "ebbtide_standing_breaches", "Promises that are broken as of the last tick of the process that ticks.", "kind"
)
RECALLS_LATE = _counter("ebbtide_recalls_late_total", "Lent nodes that were not home in time.")
LOST_GPU_SECONDS = _counter(
    "ebbtide_lost_gpu_seconds_total", "GPU-seconds of work that had to be done again.", cause=known.LOSS_CAUSES
)
REPLAN_PHASE = Histogram(
    "ebbtide_replan_phase_seconds",
    "Time of a re-plan by phase, the slowest rank's.",
    ["phase"],
    registry=REGISTRY,
    buckets=buckets.REPLAN_S,
)
for _phase in ReplanPhase:
    REPLAN_PHASE.labels(_phase.value)
REPLAN_BYTES = _counter(
    "ebbtide_replan_bytes_total",
    "Bytes of state that loads of re-plans needed, read, and read of what another node had written.",
    kind=known.REPLAN_BYTES_KINDS,
)
RESIZES = _counter(
    "ebbtide_resize_total",
    "Running jobs given other GPUs or another plan.",
    direction=known.DIRECTIONS,
    reason=known.RESIZE_REASONS,
)
RESIZE_DURATION = Histogram(
    "ebbtide_resize_duration_seconds",
    "From a resize's decision until all workers of the new plan run.",
    registry=REGISTRY,
    buckets=buckets.RESIZE_S,
)
PREEMPTIONS = _counter(
    "ebbtide_preemptions_total", "Jobs whose GPUs were all taken back.", reason=known.PREEMPTION_REASONS
)
RESTARTS = _counter(
    "ebbtide_restarts_total", "Runs that ended unasked, whose jobs try again.", cause=known.RESTART_CAUSES
)
RESTARTING_JOBS = _latest(
    "ebbtide_restarting_jobs", "Live jobs whose runs ended unasked three times or more within the last hour."
)
RECALL_DURATION = Histogram(
    "ebbtide_recall_duration_seconds",
    "From a recall's decision until the node is given back.",
    registry=REGISTRY,
    buckets=buckets.RESIZE_S,
)
QUEUEING = Histogram(
    "ebbtide_queueing_seconds",
    "From a job's submission to its first start.",
    registry=REGISTRY,
    buckets=buckets.WAIT_S,
)
JCT = Histogram(
    "ebbtide_jct_seconds",
    "Job completion time: from submission to success.",
    registry=REGISTRY,
    buckets=buckets.JCT_S,
)
GPU_SECONDS = _counter(
    "ebbtide_gpu_seconds_total",
    "GPU-seconds that jobs held, by use: running, or moving (starting, resizing, leaving).",
    use=known.GPU_USES,
)
GOODPUT = _latest("ebbtide_goodput_ratio", "Useful GPU-seconds over GPU-seconds held, of the last 24 hours.")
GOODPUT.set(float("nan"))  # a process that does not lead knows of none, which is not 0
FORECAST_COVERAGE = _latest(
    "ebbtide_forecast_coverage_ratio",
    "Part of the forecasts of the last 24 hours that demand stayed at or below, by quantile.",
    "pool",
    "quantile",
)
FORECASTS_JUDGED = Counter(
    "ebbtide_forecasts_judged_total", "Forecasts whose horizon has passed.", ["pool"], registry=REGISTRY
)
SOLVE_DURATION = Histogram(
    "ebbtide_solve_duration_seconds",
    "Time to solve a shape of a scaling curve, in its process.",
    registry=REGISTRY,
    buckets=buckets.SOLVE_S,
)
SOLVE_GAP = Histogram(
    "ebbtide_solve_optimality_gap",
    "Proven gap to the optimum, as a share of the step time, of each plan found.",
    registry=REGISTRY,
    buckets=buckets.GAP,
)
PENDING_JOBS = _latest(
    "ebbtide_pending_jobs", "Jobs that wait, by declared queue and the reason of the last tick.", "queue", "reason"
)
REQUEST_DURATION = Histogram(
    "ebbtide_api_request_duration_seconds",
    "Time to answer.",
    ["method", "route"],
    registry=REGISTRY,
    buckets=buckets.REQUEST_S,
)
REQUESTS = Counter(
    "ebbtide_api_requests_total", "Requests answered, by status.", ["method", "route", "status"], registry=REGISTRY
)
STREAMS = Gauge("ebbtide_streams", "Event streams that are open.", registry=REGISTRY, multiprocess_mode="livesum")
WEBHOOK_DELIVERIES = _counter(
    "ebbtide_webhook_deliveries_total",
    "Attempts to deliver to webhooks, as they ended; dead: the last one that is made.",
    outcome=known.OUTCOMES,
)
WEBHOOK_LAG = _latest(
    "ebbtide_webhook_lag_seconds", "Age of the oldest message that waits to be delivered to a webhook."
)
SWEPT = _counter(
    "ebbtide_swept_total",
    "What was removed because it was old enough: rows of logs, and jobs whose logs went.",
    kind=known.SWEPT_KINDS,
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
    buckets=buckets.KUBERNETES_S,
)
KUBERNETES_HEARD_AT = _latest(
    "ebbtide_kubernetes_heard_timestamp_seconds",
    "When the API server was last heard of a kind that is watched, Unix time.",
    "resource",
)
OPERATOR_STANDING = _latest(
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
