"""Counters, histograms and gauges that the processes record. `fleet_gauges` computes the gauges of the current state.

Controller and API are two processes. `ebbtide serve` sets PROMETHEUS_MULTIPROC_DIR for both, so that a scrape of the
API includes the metrics of the controller.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from itertools import product
from pathlib import Path
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from scheduler.domain.decisions import Decision, ReasonCode
from scheduler.domain.events import DeliveryState
from scheduler.domain.job_records import ReplanPhase
from scheduler.domain.observation import FailureCause, RunPhase
from scheduler.domain.prefetch import PrefetchPurpose
from scheduler.domain.savings_comparison import ComparisonState
from scheduler.domain.tick_report import BreachKind, Invariant
from scheduler.telemetry.exposition import ExemplarStore, Exposition, TracedHistogram, attach_exemplars, expose
from scheduler.telemetry.multiprocess_files import MetricFilesCollector, drop_stale_files

# Upper bounds of histogram buckets: seconds, except for GAP_BUCKETS, which are fractions.
TICK_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
REPLAN_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0)
KUBERNETES_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
QUEUEING_BUCKETS = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 1800.0, 3600.0, 7200.0, 21600.0, 86400.0, 259200.0)
JCT_BUCKETS = (60.0, 300.0, 900.0, 1800.0, 3600.0, 7200.0, 14400.0, 28800.0, 86400.0, 259200.0, 604800.0, 2592000.0)
RESIZE_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0)
REQUEST_BUCKETS = (0.005, 0.025, 0.1, 0.25, 1.0, 5.0)
SOLVE_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
GAP_BUCKETS = (0.0, 0.0001, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3)


# Values of bounded labels.
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
        *(ReasonCode.DEFRAGMENTED, ReasonCode.LAYERS_FROZE, ReasonCode.STEPS_MEASURED, *_NODE_LOSS_REASONS),
    )
)
PREEMPTION_REASONS = tuple(
    code.value for code in (ReasonCode.OUTRANKED, ReasonCode.QUOTA_RECLAIMED, *_NODE_LOSS_REASONS)
)
RESTART_CAUSES = ("workers", "out-of-memory")
GPU_USES = ("running", "moving")
OWN, LENT = GPU_OWNERS = ("own", "lent")
DELIVERY_OUTCOMES = (DeliveryState.DELIVERED.value, "failed", DeliveryState.DEAD.value)
COMPARISON_OUTCOMES = tuple(
    state.value for state in (ComparisonState.SUCCEEDED, ComparisonState.FAILED, ComparisonState.SKIPPED)
)
RETENTION_KINDS = (
    *("events", "decisions", "audit", "commands", "deliveries", "ended_jobs", "ended_loans", "readings", "usage"),
    *("logs", "archives", "recall_receipts", "allocations"),
    *("capacity_minutes", "capacity_ten_minutes", "capacity_hours"),
    *("checkpoints", "hourly_checkpoints", "fleet_changes", "problems", "comparisons"),
)


class ConnectionEnd(StrEnum):
    """Why the API closed a connection or refused it."""

    HEADER_TIMEOUT = "header-timeout"
    IDLE_TIMEOUT = "idle-timeout"
    HEADER_SIZE = "header-size"
    ADDRESS_LIMIT = "address-limit"
    TOTAL_LIMIT = "total-limit"
    REFUSED = "refused"


disable_created_metrics()  # type: ignore[no-untyped-call]  # saves an unused series per counter and histogram

if _folder := os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
    drop_stale_files(_folder)  # before the first gauge of this process creates its file
REGISTRY = CollectorRegistry()
_EXEMPLARS = ExemplarStore(Path(_folder) if _folder else None)


def _declare_counter(name: str, text: str, **labels: Iterable[str]) -> Counter:
    """Declare a counter and export all its label values as 0 from the start.

    Prometheus sees no increase if a series appears with the value 1: an alert on the first event would not fire.
    """
    counter = Counter(name, text, list(labels), registry=REGISTRY)
    for values in product(*labels.values()) if labels else ():
        counter.labels(*values)
    return counter


def _declare_latest_gauge(name: str, text: str, *labels: str) -> Gauge:
    """Declare a gauge that exports the value set last by any live process."""
    return Gauge(name, text, labels, registry=REGISTRY, multiprocess_mode="livemostrecent")


def _declare_histogram(name: str, text: str, *labels: str, buckets: tuple[float, ...]) -> TracedHistogram:
    histogram = Histogram(name, text, labels, registry=REGISTRY, buckets=buckets)
    return TracedHistogram(name, buckets, labels, histogram, _EXEMPLARS)


TICK_DURATION = _declare_histogram(
    "ebbtide_tick_duration_seconds",
    "Seconds that each stage of a scheduling tick took, such as decide or commit.",
    "stage",
    buckets=TICK_BUCKETS,
)
DECISIONS = _declare_counter(
    "ebbtide_decisions_total",
    "Scheduling actions that ticks have committed, by type such as StartJob or LendNode.",
    kind=DECISION_KINDS,
)
VIOLATIONS = _declare_counter("ebbtide_violations_total", "Dropped illegal decisions, by violated invariant.", law=LAWS)
BREACHES = _declare_counter(
    "ebbtide_breaches_total", "Breaches of guarantees, counted when they begin.", kind=BREACH_KINDS
)
ACTIVE_BREACHES = _declare_latest_gauge(
    "ebbtide_standing_breaches", "Breaches of guarantees that were active at the last tick of the leader.", "kind"
)
RECALLS_LATE = _declare_counter("ebbtide_recalls_late_total", "Lent nodes that were not returned by their deadline.")
RECALLS = Counter(
    "ebbtide_recalls_total",
    "Recalls of lent nodes, by pool and outcome: in_time, late, cancelled or lost.",
    ["pool", "outcome"],
    registry=REGISTRY,
)
LOST_GPU_SECONDS = _declare_counter(
    "ebbtide_lost_gpu_seconds_total",
    "GPU-seconds of work lost since the last checkpoint, by cause and by owner of the GPUs: own or lent.",
    cause=LOSS_CAUSES,
    gpus=GPU_OWNERS,
)
REPLAN_PHASE = _declare_histogram(
    "ebbtide_replan_phase_seconds",
    "Seconds of each phase of a re-plan on its slowest rank.",
    "phase",
    buckets=REPLAN_BUCKETS,
)
for _phase in ReplanPhase:
    REPLAN_PHASE.histogram.labels(_phase.value)
REPLAN_BYTES = _declare_counter(
    "ebbtide_replan_bytes_total",
    "Bytes of state that re-plans needed, read, and read from files of other nodes.",
    kind=REPLAN_BYTES_KINDS,
)
RESIZES = _declare_counter(
    "ebbtide_resize_total",
    "Resizes of running jobs: other GPUs or another plan.",
    direction=RESIZE_DIRECTIONS,
    reason=RESIZE_REASONS,
)
RESIZE_DURATION = _declare_histogram(
    "ebbtide_resize_duration_seconds",
    "Seconds from the decision to resize until all workers of the new plan run.",
    buckets=RESIZE_BUCKETS,
)
PREEMPTIONS = _declare_counter(
    "ebbtide_preemptions_total",
    "Running jobs that had to release all GPUs, by reason code.",
    reason=PREEMPTION_REASONS,
)
RESTARTS = _declare_counter(
    "ebbtide_restarts_total", "Runs that ended unexpectedly and are retried.", cause=RESTART_CAUSES
)
RESTARTING_JOBS = _declare_latest_gauge(
    "ebbtide_restarting_jobs", "Live jobs with three or more unexpected ends of runs within the last hour."
)
RECALL_DURATION = _declare_histogram(
    "ebbtide_recall_duration_seconds",
    "Seconds from the decision to recall a node until its return.",
    buckets=RESIZE_BUCKETS,
)
PREFETCH_OUTCOMES = ("loaded", "failed")
PREFETCH_DURATION = _declare_histogram(
    "ebbtide_prefetch_duration_seconds",
    "Seconds of prefetches of images and weights onto nodes, by purpose and outcome: loaded or failed.",
    "purpose",
    "outcome",
    buckets=RESIZE_BUCKETS,
)
for _purpose in PrefetchPurpose:
    for _outcome in PREFETCH_OUTCOMES:
        PREFETCH_DURATION.histogram.labels(_purpose.value, _outcome)
QUEUEING = _declare_histogram(
    "ebbtide_queueing_seconds",
    "Seconds from submission of a job to its first start.",
    buckets=QUEUEING_BUCKETS,
)
JCT = _declare_histogram(
    "ebbtide_jct_seconds",
    "Job completion time: seconds from submission to successful end.",
    buckets=JCT_BUCKETS,
)
JOBS_ENDED = Counter(
    "ebbtide_jobs_ended_total",
    "Ended jobs by outcome, declared queue and reason: Completed, code of a decision, or cause of the failure.",
    ["outcome", "queue", "reason"],
    registry=REGISTRY,
)
GPU_SECONDS = _declare_counter(
    "ebbtide_gpu_seconds_total",
    "GPU-seconds allocated to jobs, by use: running, or moving (starting, resizing, leaving).",
    use=GPU_USES,
)
CAPACITY_GPU_SECONDS = Counter(
    "ebbtide_capacity_gpu_seconds_total",
    "GPU-seconds of all GPUs of a pool by use: inference, used, lent_used, lent_idle, free, other or down.",
    ["pool", "use"],
    registry=REGISTRY,
)
IDLE_GPU_SECONDS = Counter(
    "ebbtide_idle_while_waiting_gpu_seconds_total",
    "GPU-seconds of unused GPUs that training owned or had on loan while a pending job accepted their model.",
    ["pool", "gpus"],
    registry=REGISTRY,
)
INFERENCE_INTERVALS = Counter(
    "ebbtide_inference_intervals_total",
    "Five-minute intervals with demand readings, by pool, and whether loans left inference short: met or short.",
    ["pool", "outcome"],
    registry=REGISTRY,
)
GOODPUT = _declare_latest_gauge(
    "ebbtide_goodput_ratio", "Useful GPU-seconds divided by allocated GPU-seconds, over the last 24 hours."
)
GOODPUT.set(float("nan"))  # unknown, not 0, while this process does not lead
FORECAST_COVERAGE = _declare_latest_gauge(
    "ebbtide_forecast_coverage_ratio",
    "Fraction of the forecasts of the last 24 hours that demand did not exceed, by quantile.",
    "pool",
    "quantile",
)
FORECASTS_EVALUATED = Counter(
    "ebbtide_forecasts_judged_total", "Forecasts compared with demand after their horizon.", ["pool"], registry=REGISTRY
)
SOLVE_DURATION = _declare_histogram(
    "ebbtide_solve_duration_seconds",
    "Seconds to solve one shape of a scaling curve.",
    buckets=SOLVE_BUCKETS,
)
SOLVE_GAP = _declare_histogram(
    "ebbtide_solve_optimality_gap",
    "Proven gap of each plan to the optimum, as a fraction of the step time.",
    buckets=GAP_BUCKETS,
)
PENDING_JOBS = _declare_latest_gauge(
    "ebbtide_pending_jobs", "Pending jobs, by declared queue and the reason at the last tick.", "queue", "reason"
)
REQUEST_DURATION = _declare_histogram(
    "ebbtide_api_request_duration_seconds",
    "Seconds to answer an HTTP request, by method and path template.",
    "method",
    "route",
    buckets=REQUEST_BUCKETS,
)
REQUESTS = Counter(
    "ebbtide_api_requests_total",
    "HTTP requests answered, by method, path template and status code.",
    ["method", "route", "status"],
    registry=REGISTRY,
)
STREAMS = Gauge(
    "ebbtide_streams",
    "Open event streams of clients that follow events or logs.",
    registry=REGISTRY,
    multiprocess_mode="livesum",
)
CONNECTIONS = Gauge(
    "ebbtide_connections", "Open connections to the API.", registry=REGISTRY, multiprocess_mode="livesum"
)
CONNECTIONS_CLOSED = _declare_counter(
    "ebbtide_connections_closed_total",
    "Connections that the API closed before they had a response, or refused, by reason.",
    reason=tuple(end.value for end in ConnectionEnd),
)
WEBHOOK_DELIVERIES = _declare_counter(
    "ebbtide_webhook_deliveries_total",
    "Delivery attempts to webhooks, by outcome. After an attempt that ends dead there are no retries.",
    outcome=DELIVERY_OUTCOMES,
)
WEBHOOK_LAG = _declare_latest_gauge(
    "ebbtide_webhook_lag_seconds", "Age of the oldest pending webhook delivery, in seconds. 0: none is pending."
)
HISTORY_DELETED = _declare_counter(
    "ebbtide_swept_total",
    "Rows of history, jobs with log files, and archives of working directories, deleted by retention.",
    kind=RETENTION_KINDS,
)
SAVINGS_COMPARISONS = _declare_counter(
    "ebbtide_savings_comparisons_total",
    "Daily comparisons of savings, by outcome: succeeded, failed or skipped.",
    outcome=COMPARISON_OUTCOMES,
)

KUBERNETES_REQUESTS = Counter(
    "ebbtide_kubernetes_requests_total",
    "Requests to the Kubernetes API server, by status. Status 0: no response.",
    ["verb", "resource", "status"],
    registry=REGISTRY,
)
KUBERNETES_REQUEST_DURATION = _declare_histogram(
    "ebbtide_kubernetes_request_duration_seconds",
    "Seconds that requests to the Kubernetes API server took, including those that timed out.",
    "verb",
    buckets=KUBERNETES_BUCKETS,
)
KUBERNETES_LAST_RESPONSE = _declare_latest_gauge(
    "ebbtide_kubernetes_heard_timestamp_seconds",
    "Time of the last response of the Kubernetes API server, in seconds since 1970, by watched resource.",
    "resource",
)
OPERATOR_STATUS = _declare_latest_gauge(
    "ebbtide_operator_standing", "1 for the current state of this operator, 0 for its other states.", "standing"
)


def record_request(
    *, method: str, route: str, status: int, seconds: float, trace_id: str = "", at_s: float = 0.0
) -> None:
    """Record an API request that ended at `at_s`. `route` is the path template, which bounds the label values."""
    REQUEST_DURATION.observe(seconds, method, route, trace_id=trace_id, at_s=at_s)
    REQUESTS.labels(method, route, str(status)).inc()


def record_connections(count: int) -> None:
    CONNECTIONS.set(count)


def record_connection_end(reason: ConnectionEnd) -> None:
    CONNECTIONS_CLOSED.labels(reason.value).inc()


def record_solve(seconds: float, gaps: Iterable[float]) -> None:
    """Record the solution of one shape, with the optimality gap of each plan."""
    SOLVE_DURATION.observe(seconds)
    for gap in gaps:
        SOLVE_GAP.observe(gap)


def record_delivery(outcome: str) -> None:
    """Record a delivery attempt: "delivered", "failed" (will be retried) or "dead" (will not)."""
    WEBHOOK_DELIVERIES.labels(outcome).inc()


def record_webhook_lag(seconds: float) -> None:
    WEBHOOK_LAG.set(seconds)


def record_history_deletion(kind: str, count: int) -> None:
    """Record deleted rows of a log; with kind "logs", jobs whose log files were deleted; with "archives", archives."""
    HISTORY_DELETED.labels(kind).inc(count)


def record_savings_comparison(outcome: str) -> None:
    """Record the end of a daily comparison: "succeeded", "failed" or "skipped"."""
    SAVINGS_COMPARISONS.labels(outcome).inc()


def record_kubernetes_request(*, verb: str, resource: str, status: int, seconds: float) -> None:
    KUBERNETES_REQUESTS.labels(verb, resource, str(status)).inc()
    KUBERNETES_REQUEST_DURATION.observe(seconds, verb)


def record_operator_status(
    *, status: str, statuses: Iterable[str], silence_s: Mapping[str, float], now_s: float
) -> None:
    """Record the operator's status and, by resource, when the API server last responded.

    The metric is a timestamp, not an age: a hanging operator could not increase an age.
    """
    for each in statuses:
        OPERATOR_STATUS.labels(each).set(each == status)
    for resource, ago_s in silence_s.items():
        KUBERNETES_LAST_RESPONSE.labels(resource).set(now_s - ago_s)


class _OwnCollector(Collector):
    """Metrics of this process, with exemplars."""

    def collect(self) -> Iterator[Metric]:
        yield from attach_exemplars(REGISTRY.collect(), _EXEMPLARS.snapshot())


def render_metrics(*collectors: Collector, accept: str = "", cluster: str = "") -> Exposition:
    """Render all metrics and those of `collectors`.

    Args:
        accept: the header `Accept` of the scrape; empty asks for the text format.
        cluster: value of the label `cluster` of all samples; empty leaves the label out.
    """
    folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    own: Collector = MetricFilesCollector(folder) if folder else _OwnCollector()
    return expose((own, *collectors), accept=accept, cluster=cluster)
