"""Table of a simulation report: one column per policy set, one row per metric; for the terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cli.output import format_duration, format_number, format_percent, make_console, render_table, stack

if TYPE_CHECKING:
    from rich.console import RenderableType


Document = Mapping[str, Any]
Formats = Mapping[str, Callable[[float | None], str]]


@dataclass(frozen=True, slots=True)
class Metric:
    """A row of the comparison table.

    `path` locates the value in a policy's report. `direction` is 1 if higher values are better, -1 if lower values are
    better, 0 otherwise.
    """

    path: str
    unit: str
    direction: int = 0


METRIC_GROUPS: Mapping[str, Mapping[str, Metric]] = {
    "Jobs": {
        "jobs completed": Metric("completed", "count", 1),
        "jobs rejected": Metric("rejected", "count", -1),
        "deadlines met": Metric("deadlines_met_ratio", "ratio", 1),
        "queueing time, mean": Metric("queueing_s.mean", "s", -1),
        "queueing time, median": Metric("queueing_s.p50", "s", -1),
        "queueing time, p95": Metric("queueing_s.p95", "s", -1),
        "queueing time, p99": Metric("queueing_s.p99", "s", -1),
        "completion time, mean": Metric("jct_s.mean", "s", -1),
        "completion time, median": Metric("jct_s.p50", "s", -1),
        "completion time, p95": Metric("jct_s.p95", "s", -1),
        "completion time, p99": Metric("jct_s.p99", "s", -1),
        "completion time, 2+ GPUs, mean": Metric("jct_elastic_s.mean", "s", -1),
        "completion time, lower bound": Metric("jct_bound_s", "s"),
        "makespan": Metric("makespan_s", "s", -1),
    },
    "GPU utilization": {
        "useful work, training pools": Metric("usage_ratio.training", "ratio", 1),
        "useful work, inference pools": Metric("usage_ratio.inference", "ratio", 1),
        "useful work, overall": Metric("usage_ratio.overall", "ratio", 1),
        "idle GPU-hours, jobs pending": Metric("idle_while_waiting_gpu_hours", "count", -1),
        "lost GPU-hours": Metric("lost_gpu_hours", "count", -1),
        "share of work lost": Metric("lost_ratio", "ratio", -1),
        "incomplete saves": Metric("incomplete_saves", "count", -1),
    },
    "Lending": {
        "lent GPU-hours": Metric("loaned_gpu_hours", "count"),
        "unused lent GPU-hours": Metric("unused_loan_gpu_hours", "count", -1),
        "loans": Metric("loans", "count"),
        "recalls": Metric("recalls", "count"),
        "late returns": Metric("recalls_late", "count", -1),
        "collateral GPUs of recalls": Metric("collateral_gpus", "count", -1),
        "inference shortage, first pass": Metric("inference_short_intervals_ratio.first_pass", "ratio", -1),
        "unserved GPU-hours of inference": Metric("unserved_gpu_hours", "count", -1),
    },
    "Disruption": {
        "preemptions": Metric("preemptions", "count", -1),
        "jobs preempted": Metric("preemption_ratio", "ratio", -1),
        "resizes": Metric("resizes", "count", -1),
        "illegal decisions, dropped": Metric("violations", "count", -1),
    },
    "Simulation": {
        "ticks": Metric("ticks", "count"),
        "tick, median": Metric("tick_s.p50", "s"),
        "tick, p99": Metric("tick_s.p99", "s"),
        "tick, longest": Metric("tick_s.max", "s"),
        "wall-clock time": Metric("wall_s", "s"),
    },
}
METRICS: Mapping[str, Metric] = {name: metric for group in METRIC_GROUPS.values() for name, metric in group.items()}
TERMINAL_FORMATS: Formats = {
    "s": format_duration,
    "ratio": format_percent,
    "count": lambda value: format_number(value, 0 if value and value >= 100 else 1),
}
"""Formats for the terminal."""
_HIDDEN_WHEN_ZERO = ("jobs rejected", "illegal decisions, dropped")
"""Metrics that the terminal shows only if they are not 0."""
_COLUMN_GAP = 2


def format_seconds(value: float | None) -> str:
    """`4,222 s`, `34.5 ms`, `-`."""
    if value is None:
        return "-"
    return (
        f"{round(value):,} s"
        if value >= 100
        else f"{value:.3g} s"
        if value >= 1 or not value
        else format_duration(value)
    )


REPORT_FORMATS: Formats = {
    **TERMINAL_FORMATS,
    "s": format_seconds,
    "ratio": lambda value: "-" if value is None else f"{100 * value:.2f}%",
}
"""Formats for reports, in which values are compared and quoted."""


def render_comparison(document: Document) -> RenderableType:
    """Return the table of a report or a sweep, split into several if the terminal is too narrow for all policy sets.

    Metrics without a value for any policy set are omitted.
    """
    rows = [[name, *format_cells(document, metric, TERMINAL_FORMATS)] for name, metric in METRICS.items()]
    rows = [
        row for row in rows if {*row[1:]} - {"-"} and not (row[0] in _HIDDEN_WHEN_ZERO and {*row[1:]} <= {"0", "0 ± 0"})
    ]
    table = [[format_seeds(document), *list_policies(document)], *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return stack(*_render_blocks(table, _split_columns(widths, make_console().width)))


def _render_blocks(table: list[list[str]], blocks: Iterable[Sequence[int]]) -> Iterator[RenderableType]:
    for number_of_block, block in enumerate(blocks):
        heads, *rows = ([line[0], *(line[at] for at in block)] for line in table)
        if number_of_block:
            yield ""
        yield render_table(rows, headers=heads, right_aligned=heads[1:])


def _split_columns(widths: Sequence[int], available_width: int) -> list[list[int]]:
    """Split the columns after the first into groups that fit next to it, with at least one column each."""
    blocks: list[list[int]] = []
    left = 0
    for at, width in enumerate(widths[1:], 1):
        if not blocks or left < _COLUMN_GAP + width:
            blocks.append([])
            left = available_width - widths[0] - _COLUMN_GAP
        blocks[-1].append(at)
        left -= _COLUMN_GAP + width
    return blocks


def render_markdown(document: Document) -> str:
    lines = [[format_seeds(document), *list_policies(document)], ["---", *("---:" for _ in list_policies(document))]]
    lines += [[name, *format_cells(document, metric, REPORT_FORMATS)] for name, metric in METRICS.items()]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def list_policies(document: Document) -> list[str]:
    return [report["policy"] for report in document["policies"]]


def format_seeds(document: Document) -> str:
    listed = document.get("seeds")
    return f"seeds {', '.join(map(str, listed))}" if listed else f"seed {document['seed']}"


def format_cells(document: Document, metric: Metric, formats: Formats) -> Iterator[str]:
    """Return the metric of each policy set; for a sweep, the mean and the half-width of its confidence interval."""
    form = formats[metric.unit]
    for report in document["policies"]:
        value = get_metric_value(report, metric)
        text = form(value)
        if "figures" in report and value is not None:
            text += f" ± {form(report['figures'][metric.path]['high'] - value)}"
        yield f"{text} of {format_number(count_jobs(document))}" if metric.path == "completed" else text


def get_metric_value(report: Document, metric: Metric) -> float | None:
    """Return the metric's value in one policy's report; for a sweep, its mean."""
    if "figures" in report:
        entry = report["figures"].get(metric.path)
        return None if entry is None else float(entry["mean"])
    value: Any = report
    for step in metric.path.split("."):
        value = value[step]
    return None if value is None else float(value)


def count_jobs(document: Document) -> int:
    run = document["runs"][0] if "runs" in document else document
    return int(run["policies"][0]["jobs"])
