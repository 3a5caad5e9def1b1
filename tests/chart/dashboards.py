"""`python -m tests.chart.dashboards` writes the dashboards of the chart, the one copy that there is.

Counters are those of the process that leads, gauges of the present are told alike by every API replica: hence sum for
the one and max for the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from string import ascii_uppercase

from grafana_foundation_sdk.builders import timeseries
from grafana_foundation_sdk.builders.common import StackingConfig
from grafana_foundation_sdk.builders.dashboard import Dashboard, DatasourceVariable
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import StackingMode
from grafana_foundation_sdk.models.dashboard import DashboardCursorSync, DataSourceRef, GridPos

FOLDER = Path(__file__).parents[2] / "helm" / "ebbtide" / "dashboards"
_SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
_WIDTH, _HEIGHT = 12, 8
_BESIDE_LOANS = (
    'sum by (pool) (max by (pool, state) (ebbtide_gpus{state!="down"})) - on (pool) max by (pool) (ebbtide_lent_gpus)'
)


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
    name: str
    title: str
    graphs: tuple[Graph, ...]


def _quantiles(metric: str, by: str = "", *, window: str = "1h") -> dict[str, str]:
    """Median and 95th percentile of a histogram; of each `by` the latter alone."""
    rate = f"sum by (le{', ' + by if by else ''}) (rate({metric}_bucket[{window}]))"
    if by:
        return {f"{{{{{by}}}}}": f"histogram_quantile(0.95, {rate})"}
    return {"half": f"histogram_quantile(0.5, {rate})", "95 of 100": f"histogram_quantile(0.95, {rate})"}


def _hourly(counter: str, by: str, legend: str = "") -> dict[str, str]:
    return {legend or _labels(by): f"sum by ({by}) (increase({counter}[1h]))"}


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
        Graph("Preemptions an hour", _hourly("ebbtide_preemptions_total", "reason")),
        Graph(
            "Restarts that nobody asked for, an hour",
            _hourly("ebbtide_restarts_total", "cause")
            | _present("ebbtide_restarting_jobs", legend="jobs that restart again and again"),
        ),
    ),
)
INFERENCE = Board(
    "inference-safety",
    "Inference safety",
    (
        Graph(
            "Demand, what it may become, and what there is beside the loans",
            _present("ebbtide_inference_demand_gpus", "pool", "{{pool}}, demand")
            | _present("ebbtide_forecast_gpus", "pool, quantile", "{{pool}}, at most with {{quantile}}")
            | {"{{pool}}, beside the loans": _BESIDE_LOANS},
        ),
        Graph(
            "GPUs to spare above the demand",
            {"{{pool}}": f"{_BESIDE_LOANS} - max by (pool) (ebbtide_inference_demand_gpus)"},
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
)
BOARDS = (FLEET, JOBS, INFERENCE, INTERNALS)


def rendered() -> Iterator[tuple[str, str]]:
    """File name and content of each dashboard."""
    for board in BOARDS:
        yield f"{board.name}.json", JSONEncoder(sort_keys=True, indent=2).encode(_built(board).build()) + "\n"


def _built(board: Board) -> Dashboard:
    made = (
        Dashboard(f"Ebbtide: {board.title}")
        .uid(f"ebbtide-{board.name}")
        .tags(["ebbtide"])
        .refresh("30s")
        .time("now-6h", "now")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .with_variable(DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
    )
    for at, graph in enumerate(board.graphs):
        place = GridPos(h=_HEIGHT, w=_WIDTH, x=at % 2 * _WIDTH, y=at // 2 * _HEIGHT)
        made.with_panel(_panel(graph).id(at + 1).grid_pos(place))
    return made


def _panel(graph: Graph) -> timeseries.Panel:
    panel = timeseries.Panel().title(graph.title).unit(graph.unit).datasource(_SOURCE).fill_opacity(10)
    if graph.about:
        panel.description(graph.about)
    if graph.stacked:
        panel.stacking(StackingConfig().mode(StackingMode.NORMAL)).fill_opacity(40)
    for name, (legend, query) in zip(ascii_uppercase, graph.queries.items(), strict=False):
        panel.with_target(Dataquery().ref_id(name).expr(query).legend_format(legend))
    return panel


def main() -> None:
    for old in FOLDER.glob("*.json"):
        old.unlink()
    for name, text in rendered():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
