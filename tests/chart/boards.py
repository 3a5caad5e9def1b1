"""What the dashboards of the chart show: their panels, and the queries of those.

Counters are those of the process that leads, gauges of the present are told alike by every API replica: hence sum for
the one and max for the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

KUBERNETES = "Kubernetes"
"""The row of what operators alone tell."""
_SUPPLY = "max by (pool) (ebbtide_inference_supply_gpus)"


@dataclass(frozen=True, slots=True)
class Graph:
    """A panel: what it shows over time, as legend and query. `about` tells how to read it."""

    title: str
    queries: Mapping[str, str]
    unit: str = "short"
    stacked: bool = False
    about: str = ""


@dataclass(frozen=True, slots=True)
class Board:
    """`rows` come below `graphs`, each under its title."""

    name: str
    title: str
    graphs: tuple[Graph, ...]
    rows: Mapping[str, tuple[Graph, ...]] = field(default_factory=dict)


def _quantiles(metric: str, by: str = "", *, window: str = "1h") -> dict[str, str]:
    """Median and 95th percentile of a histogram; of each `by` the latter alone."""
    rate = f"sum by (le{', ' + by if by else ''}) (rate({metric}_bucket[{window}]))"
    if by:
        return {f"{{{{{by}}}}}": f"histogram_quantile(0.95, {rate})"}
    return {"half": f"histogram_quantile(0.5, {rate})", "95 of 100": f"histogram_quantile(0.95, {rate})"}


def _hourly(counter: str, by: str, legend: str = "") -> dict[str, str]:
    """Without what did not happen: most of what is counted is 0 most of the time."""
    return {legend or _labels(by): f"sum by ({by}) (increase({counter}[1h])) > 0"}


def _present(gauge: str, by: str = "", legend: str = "") -> dict[str, str]:
    return {legend or _labels(by): f"max by ({by}) ({gauge})" if by else f"max({gauge})"}


def _labels(by: str) -> str:
    """A legend of the labels' values."""
    return " ".join(f"{{{{{each.strip()}}}}}" for each in by.split(","))


FLEET = Board(
    "fleet-and-loans",
    "Fleet and loans",
    (
        Graph("GPUs by what uses them", _present("ebbtide_gpus", "pool, state"), stacked=True),
        Graph("Nodes by state", _present("ebbtide_nodes", "pool, state"), stacked=True),
        Graph("Loans", _present("ebbtide_loans", "state"), stacked=True),
        Graph(
            "Pools that may lend",
            _present("ebbtide_lending_enabled", "pool"),
            about="1: their policy lends, and lending is not paused. See `ebbtide lending`.",
        ),
        Graph(
            "Lending and recalling, decisions an hour",
            _hourly('ebbtide_decisions_total{kind=~"LendNode|RecallNode|CancelRecall|ReturnNode"}', "kind"),
        ),
        Graph("Time until a recalled node is home", _quantiles("ebbtide_recall_duration_seconds"), "s"),
        Graph(
            "GPU-seconds held, by use",
            {"{{use}}": "sum by (use) (rate(ebbtide_gpu_seconds_total[10m]))"},
            stacked=True,
            about="In GPUs: running, or moving, which is starting, resizing and leaving.",
        ),
        Graph(
            "Goodput of the last 24 hours",
            _present("ebbtide_goodput_ratio", legend="useful"),
            "percentunit",
            about="Useful GPU-seconds over those held: the part that ran times the part of the work that was kept.",
        ),
        Graph("Work done again, GPU-seconds an hour", _hourly("ebbtide_lost_gpu_seconds_total", "cause")),
    ),
)
JOBS = Board(
    "jobs-and-queues",
    "Jobs and queues",
    (
        Graph("Jobs by state", _present("ebbtide_jobs", "state"), stacked=True),
        Graph("Why jobs wait", {"{{reason}}": "sum by (reason) (ebbtide_pending_jobs)"}, stacked=True),
        Graph("Waiting jobs by queue", {"{{queue}}": "sum by (queue) (ebbtide_pending_jobs)"}, stacked=True),
        Graph("From submission to first start", _quantiles("ebbtide_queueing_seconds"), "s"),
        Graph("Job completion time", _quantiles("ebbtide_jct_seconds", window="6h"), "s"),
        Graph(
            "GPUs of queues, and what they are guaranteed",
            _present("ebbtide_queue_allocated_gpus", "queue")
            | _present("ebbtide_queue_guaranteed_gpus", "queue", "{{queue}}, guaranteed"),
        ),
        Graph("GPUs that queues borrow", _present("ebbtide_queue_borrowed_gpus", "queue"), stacked=True),
        Graph("GPUs of queues, own and lent", _present("ebbtide_queue_gpus", "queue, kind"), stacked=True),
        Graph("Resizes an hour", _hourly("ebbtide_resize_total", "direction, reason")),
        Graph(
            "Time of a resize, and of its phases where workers tell them",
            _quantiles("ebbtide_resize_duration_seconds") | _quantiles("ebbtide_replan_phase_seconds", "phase"),
            "s",
        ),
        Graph(
            "State that re-plans load, an hour",
            _hourly("ebbtide_replan_bytes_total", "kind"),
            "bytes",
            about="What ranks needed, what they read for it, and what of that another node had written.",
        ),
        Graph("Preemptions an hour", _hourly("ebbtide_preemptions_total", "reason")),
        Graph(
            "Restarts that nobody asked for, an hour",
            _hourly("ebbtide_restarts_total", "cause")
            | _present("ebbtide_restarting_jobs", legend="jobs that restart again and again"),
        ),
    ),
    {
        "Each running job, where EBBTIDE_METRICS_BY_JOB asks for it": (
            Graph("Steps done", _present("ebbtide_job_steps", "job")),
            Graph("Loss", _present("ebbtide_job_loss", "job")),
            Graph("Samples a second", _present("ebbtide_job_samples_per_s", "job")),
            Graph("Most memory that a rank has had", _present("ebbtide_job_peak_bytes", "job"), "bytes"),
        )
    },
)
INFERENCE = Board(
    "inference-safety",
    "Inference safety",
    (
        Graph(
            "Demand, what it may become, and what there is beside the loans",
            _present("ebbtide_inference_demand_gpus", "pool", "{{pool}}, demand")
            | _present("ebbtide_forecast_gpus", "pool, quantile", "{{pool}}, at most with {{quantile}}")
            | {"{{pool}}, beside the loans": _SUPPLY},
        ),
        Graph(
            "GPUs to spare above the demand",
            {"{{pool}}": f"{_SUPPLY} - max by (pool) (ebbtide_inference_demand_gpus)"},
            about="Below 0 inference is short of GPUs while some of its own are lent.",
        ),
        Graph(
            "How often demand stayed at or below the forecast",
            _present("ebbtide_forecast_coverage_ratio", "pool, quantile"),
            "percentunit",
            about="Of the forecasts whose horizon passed in the last 24 hours. It should be near the quantile.",
        ),
        Graph("Forecasts judged an hour", _hourly("ebbtide_forecasts_judged_total", "pool")),
        Graph(
            "Promises broken an hour",
            _hourly("ebbtide_breaches_total", "kind")
            | {"recalls late": "sum(increase(ebbtide_recalls_late_total[1h]))"},
        ),
        Graph("Promises that are broken now", _present("ebbtide_standing_breaches", "kind"), stacked=True),
        Graph("Time since the demand was heard", _present("ebbtide_demand_age_seconds", "pool"), "s"),
    ),
)
INTERNALS = Board(
    "solver-and-scheduler",
    "Solver and scheduler internals",
    (
        Graph(
            "Time of a tick by stage, 95th percentile",
            _quantiles("ebbtide_tick_duration_seconds", "stage", window="10m"),
            "s",
        ),
        Graph(
            "Ticks and commits a second",
            {
                "ticks": 'sum(rate(ebbtide_tick_duration_seconds_count{stage="observe"}[10m]))',
                "commits": 'sum(rate(ebbtide_tick_duration_seconds_count{stage="commit"}[10m]))',
            },
        ),
        Graph(
            "Decisions an hour, and illegal ones that were dropped",
            _hourly("ebbtide_decisions_total", "kind") | _hourly("ebbtide_violations_total", "law", "dropped: {{law}}"),
            stacked=True,
        ),
        Graph(
            "Leader, and commands that wait",
            _present("ebbtide_leader", legend="a leader is there")
            | _present("ebbtide_inbox_commands", legend="commands that wait"),
        ),
        Graph("Generation of the state", _present("ebbtide_snapshot_generation", legend="generation")),
        Graph("Time to solve a shape", _quantiles("ebbtide_solve_duration_seconds", window="6h"), "s"),
        Graph(
            "Shapes solved an hour, and the mean proven gap",
            {
                "solved": "sum(increase(ebbtide_solve_duration_seconds_count[1h]))",
                "gap": "sum(increase(ebbtide_solve_optimality_gap_sum[6h]))"
                " / sum(increase(ebbtide_solve_optimality_gap_count[6h]))",
            },
        ),
        Graph(
            "Time of an answer, 95th percentile",
            _quantiles("ebbtide_api_request_duration_seconds", "route", window="10m"),
            "s",
        ),
        Graph(
            "Requests a second by status",
            {"{{status}}": "sum by (status) (rate(ebbtide_api_requests_total[10m]))"},
        ),
        Graph("Version", {"{{version}}": "max by (version) (ebbtide_build_info)"}),
    ),
    {
        "Webhooks, streams, and what is removed": (
            Graph("Attempts to deliver to webhooks, an hour", _hourly("ebbtide_webhook_deliveries_total", "outcome")),
            Graph("Age of the oldest message to a webhook", _present("ebbtide_webhook_lag_seconds", legend="age"), "s"),
            Graph("Event streams that are open", {"open": "sum(ebbtide_streams)"}),
            Graph(
                "Removed because it was old enough, in a day",
                {"{{kind}}": "sum by (kind) (increase(ebbtide_swept_total[1d])) > 0"},
                about="Rows by what they were, and jobs whose logs went. Once a day.",
            ),
        ),
        KUBERNETES: (
            Graph(
                "How the operators stand",
                {"{{standing}}": "sum by (standing) (ebbtide_operator_standing)"},
                stacked=True,
                about="One leads, the others wait. Blind: it was elected and does not see the cluster as it is.",
            ),
            Graph(
                "Time since the API server was heard of, by kind",
                {"{{resource}}": "time() - max by (resource) (ebbtide_kubernetes_heard_timestamp_seconds)"},
                "s",
            ),
            Graph(
                "Requests to the API server a second, by verb and status",
                {"{{verb}} {{status}}": "sum by (verb, status) (rate(ebbtide_kubernetes_requests_total[10m])) > 0"},
                about="Status 0: no answer.",
            ),
            Graph(
                "Requests that failed, an hour, by resource",
                _hourly('ebbtide_kubernetes_requests_total{status!~"2.."}', "resource, status"),
            ),
            Graph(
                "Time of an answer of the API server, 95th percentile",
                _quantiles("ebbtide_kubernetes_request_duration_seconds", "verb", window="10m"),
                "s",
            ),
        ),
    },
)
BOARDS = (FLEET, JOBS, INFERENCE, INTERNALS)
