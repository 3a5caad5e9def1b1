"""Panels and queries of the chart's Grafana dashboards.

Only the leader increments counters: aggregate them with sum. Every API replica exports the same gauges: aggregate them
with max.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

KUBERNETES = "Kubernetes"
"""Row of the metrics that only operators export."""
_SUPPLY = "max by (pool) (ebbtide_inference_supply_gpus)"


@dataclass(frozen=True, slots=True)
class Graph:
    """A time series panel. `queries` maps legends to PromQL; `about` is the panel's description."""

    title: str
    queries: Mapping[str, str]
    unit: str = "short"
    stacked: bool = False
    about: str = ""


@dataclass(frozen=True, slots=True)
class Board:
    """A dashboard: `graphs` first, then titled rows of graphs."""

    name: str
    title: str
    graphs: tuple[Graph, ...]
    rows: Mapping[str, tuple[Graph, ...]] = field(default_factory=dict)


def _quantiles(metric: str, by: str = "", *, window: str = "1h") -> dict[str, str]:
    """Return queries for the median and the 95th percentile of a histogram; with `by`, the latter per label."""
    rate = f"sum by (le{', ' + by if by else ''}) (rate({metric}_bucket[{window}]))"
    if by:
        return {f"{{{{{by}}}}}": f"histogram_quantile(0.95, {rate})"}
    return {"median": f"histogram_quantile(0.5, {rate})", "95th percentile": f"histogram_quantile(0.95, {rate})"}


def _hourly(counter: str, by: str, legend: str = "") -> dict[str, str]:
    """Return the increase per hour, without zero series."""
    return {legend or _labels(by): f"sum by ({by}) (increase({counter}[1h])) > 0"}


def _present(gauge: str, by: str = "", legend: str = "") -> dict[str, str]:
    return {legend or _labels(by): f"max by ({by}) ({gauge})" if by else f"max({gauge})"}


def _labels(by: str) -> str:
    """Return a legend that shows the values of the labels."""
    return " ".join(f"{{{{{each.strip()}}}}}" for each in by.split(","))


FLEET = Board(
    "fleet-and-loans",
    "Fleet and loans",
    (
        Graph("GPUs by use", _present("ebbtide_gpus", "pool, state"), stacked=True),
        Graph("Nodes by state", _present("ebbtide_nodes", "pool, state"), stacked=True),
        Graph("Loans", _present("ebbtide_loans", "state"), stacked=True),
        Graph(
            "Pools with lending enabled",
            _present("ebbtide_lending_enabled", "pool"),
            about="1: the pool's lending policy is enabled and lending is not paused. See `ebbtide lending`.",
        ),
        Graph(
            "Lending decisions per hour",
            _hourly('ebbtide_decisions_total{kind=~"LendNode|RecallNode|CancelRecall|ReturnNode"}', "kind"),
        ),
        Graph("Time from recall to return", _quantiles("ebbtide_recall_duration_seconds"), "s"),
        Graph("Recalls per hour by outcome", _hourly("ebbtide_recalls_total", "pool, outcome")),
        Graph(
            "Allocated GPUs by use",
            {"{{use}}": "sum by (use) (rate(ebbtide_gpu_seconds_total[10m]))"},
            stacked=True,
            about="running: training. moving: starting, resizing or leaving.",
        ),
        Graph(
            "Goodput, last 24 hours",
            _present("ebbtide_goodput_ratio", legend="useful"),
            "percentunit",
            about="Useful GPU-seconds divided by allocated GPU-seconds.",
        ),
        Graph("Lost GPU-seconds per hour", _hourly("ebbtide_lost_gpu_seconds_total", "cause")),
    ),
)
JOBS = Board(
    "jobs-and-queues",
    "Jobs and queues",
    (
        Graph("Jobs by state", _present("ebbtide_jobs", "state"), stacked=True),
        Graph("Pending jobs by reason", {"{{reason}}": "sum by (reason) (ebbtide_pending_jobs)"}, stacked=True),
        Graph("Pending jobs by queue", {"{{queue}}": "sum by (queue) (ebbtide_pending_jobs)"}, stacked=True),
        Graph("Time from submission to first start", _quantiles("ebbtide_queueing_seconds"), "s"),
        Graph("Job completion time", _quantiles("ebbtide_jct_seconds", window="6h"), "s"),
        Graph(
            "Allocated and guaranteed GPUs by queue",
            _present("ebbtide_queue_allocated_gpus", "queue")
            | _present("ebbtide_queue_guaranteed_gpus", "queue", "{{queue}}, guaranteed"),
        ),
        Graph("Borrowed GPUs by queue", _present("ebbtide_queue_borrowed_gpus", "queue"), stacked=True),
        Graph("GPUs by queue and pool kind", _present("ebbtide_queue_gpus", "queue, kind"), stacked=True),
        Graph("Resizes per hour", _hourly("ebbtide_resize_total", "direction, reason")),
        Graph(
            "Resize duration, total and by phase",
            _quantiles("ebbtide_resize_duration_seconds") | _quantiles("ebbtide_replan_phase_seconds", "phase"),
            "s",
        ),
        Graph(
            "Checkpoint bytes loaded by re-plans, per hour",
            _hourly("ebbtide_replan_bytes_total", "kind"),
            "bytes",
            about="Bytes that ranks needed, bytes read, and the part of these that another node wrote.",
        ),
        Graph("Preemptions per hour", _hourly("ebbtide_preemptions_total", "reason")),
        Graph(
            "Unplanned restarts per hour",
            _hourly("ebbtide_restarts_total", "cause")
            | _present("ebbtide_restarting_jobs", legend="jobs in a restart loop"),
        ),
    ),
    {
        "Running jobs (requires EBBTIDE_METRICS_BY_JOB)": (
            Graph("Completed steps", _present("ebbtide_job_steps", "job")),
            Graph("Loss", _present("ebbtide_job_loss", "job")),
            Graph("Samples per second", _present("ebbtide_job_samples_per_s", "job")),
            Graph("Peak memory of a rank", _present("ebbtide_job_peak_bytes", "job"), "bytes"),
        )
    },
)
INFERENCE = Board(
    "inference-safety",
    "Inference safety",
    (
        Graph(
            "Demand, forecast and supply",
            _present("ebbtide_inference_demand_gpus", "pool", "{{pool}}, demand")
            | _present("ebbtide_forecast_gpus", "pool, quantile", "{{pool}}, forecast {{quantile}}")
            | {"{{pool}}, supply without loans": _SUPPLY},
        ),
        Graph(
            "Spare GPUs above demand",
            {"{{pool}}": f"{_SUPPLY} - max by (pool) (ebbtide_inference_demand_gpus)"},
            about="Below 0, inference is short of GPUs while nodes are on loan.",
        ),
        Graph(
            "Forecast coverage",
            _present("ebbtide_forecast_coverage_ratio", "pool, quantile"),
            "percentunit",
            about="Share of forecasts of the last 24 hours that demand did not exceed. Expect the quantile.",
        ),
        Graph(
            "Short intervals of two weeks",
            _present("ebbtide_lending_shortage_ratio", "pool", "{{pool}}, short")
            | _present("ebbtide_lending_shortage_target_ratio", "pool", "{{pool}}, promised"),
            "percentunit",
            about="Share of five-minute intervals in which loans left inference short.",
        ),
        Graph(
            "Budget of short intervals that is left",
            _present("ebbtide_lending_budget_ratio", "pool"),
            "percentunit",
            about="At 0, loans follow the most cautious quantile until a short interval is two weeks old.",
        ),
        Graph(
            "GPUs that shadow mode would lend",
            _present("ebbtide_shadow_gpus", "pool"),
            about="As many as jobs would use. No node is lent.",
        ),
        Graph("GPU-hours that shadow mode would have lent", _present("ebbtide_shadow_gpu_hours", "pool"), "h"),
        Graph(
            "Replicas of served models",
            _present("ebbtide_serving_needed_replicas", "pool, model", "{{pool}}, {{model}}, needed")
            | _present("ebbtide_serving_proposed_replicas", "pool, model", "{{pool}}, {{model}}, proposed"),
        ),
        Graph(
            "Requests per second of served models",
            _present("ebbtide_serving_requests_per_second", "pool, model"),
        ),
        Graph("Evaluated forecasts per hour", _hourly("ebbtide_forecasts_judged_total", "pool")),
        Graph(
            "Invariant violations per hour",
            _hourly("ebbtide_breaches_total", "kind")
            | {"late recalls": "sum(increase(ebbtide_recalls_late_total[1h]))"},
        ),
        Graph("Current invariant violations", _present("ebbtide_standing_breaches", "kind"), stacked=True),
        Graph("Age of the newest demand reading", _present("ebbtide_demand_age_seconds", "pool"), "s"),
    ),
)
INTERNALS = Board(
    "solver-and-scheduler",
    "Solver and scheduler internals",
    (
        Graph(
            "Tick duration by stage, 95th percentile",
            _quantiles("ebbtide_tick_duration_seconds", "stage", window="10m"),
            "s",
        ),
        Graph(
            "Ticks and commits per second",
            {
                "ticks": 'sum(rate(ebbtide_tick_duration_seconds_count{stage="observe"}[10m]))',
                "commits": 'sum(rate(ebbtide_tick_duration_seconds_count{stage="commit"}[10m]))',
            },
        ),
        Graph(
            "Decisions and dropped decisions per hour",
            _hourly("ebbtide_decisions_total", "kind") | _hourly("ebbtide_violations_total", "law", "dropped: {{law}}"),
            stacked=True,
        ),
        Graph(
            "Leader and pending commands",
            _present("ebbtide_leader", legend="leader") | _present("ebbtide_inbox_commands", legend="pending commands"),
        ),
        Graph("Snapshot generation", _present("ebbtide_snapshot_generation", legend="generation")),
        Graph("Solve duration", _quantiles("ebbtide_solve_duration_seconds", window="6h"), "s"),
        Graph(
            "Solves per hour and mean optimality gap",
            {
                "solved": "sum(increase(ebbtide_solve_duration_seconds_count[1h]))",
                "gap": "sum(increase(ebbtide_solve_optimality_gap_sum[6h]))"
                " / sum(increase(ebbtide_solve_optimality_gap_count[6h]))",
            },
        ),
        Graph(
            "API request duration, 95th percentile",
            _quantiles("ebbtide_api_request_duration_seconds", "route", window="10m"),
            "s",
        ),
        Graph(
            "API requests per second by status",
            {"{{status}}": "sum by (status) (rate(ebbtide_api_requests_total[10m]))"},
        ),
        Graph("Version", {"{{version}}": "max by (version) (ebbtide_build_info)"}),
    ),
    {
        "Webhooks, streams and retention": (
            Graph("Webhook delivery attempts per hour", _hourly("ebbtide_webhook_deliveries_total", "outcome")),
            Graph("Age of the oldest pending webhook", _present("ebbtide_webhook_lag_seconds", legend="age"), "s"),
            Graph("Open event streams", {"open": "sum(ebbtide_streams)"}),
            Graph("Open connections", {"open": "sum(ebbtide_connections)"}),
            Graph("Connections closed early (per hour)", _hourly("ebbtide_connections_closed_total", "reason")),
            Graph(
                "Removed by retention, per day",
                {"{{kind}}": "sum by (kind) (increase(ebbtide_swept_total[1d])) > 0"},
                about="Rows by kind, and jobs whose logs were removed. Retention runs once a day.",
            ),
        ),
        KUBERNETES: (
            Graph(
                "Operators by state",
                {"{{standing}}": "sum by (standing) (ebbtide_operator_standing)"},
                stacked=True,
                about="leading: holds the lease. waiting: standby. blind: elected, but its cluster view is stale.",
            ),
            Graph(
                "Time since the last contact with the API server, by kind",
                {"{{resource}}": "time() - max by (resource) (ebbtide_kubernetes_heard_timestamp_seconds)"},
                "s",
            ),
            Graph(
                "API server requests per second, by verb and status",
                {"{{verb}} {{status}}": "sum by (verb, status) (rate(ebbtide_kubernetes_requests_total[10m])) > 0"},
                about="Status 0: no response.",
            ),
            Graph(
                "Failed API server requests per hour, by resource",
                _hourly('ebbtide_kubernetes_requests_total{status!~"2.."}', "resource, status"),
            ),
            Graph(
                "API server request duration, 95th percentile",
                _quantiles("ebbtide_kubernetes_request_duration_seconds", "verb", window="10m"),
                "s",
            ),
        ),
    },
)
BOARDS = (FLEET, JOBS, INFERENCE, INTERNALS)
