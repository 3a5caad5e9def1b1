"""The report of a simulation: one column a policy set, one line a figure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from scheduler.cli.humanise import number, share, span
from scheduler.cli.output import columns

if TYPE_CHECKING:
    from rich.console import RenderableType

Report = Mapping[str, Any]
Figure = Callable[[Report], str]


def comparison(document: Report) -> RenderableType:
    reports = document["policies"]
    rows = [[name, *(figure(report) for report in reports)] for name, figure in FIGURES.items()]
    names = [report["policy"] for report in reports]
    return columns(rows, heads=[f"seed {document['seed']}", *names], right=names)


def _spread(field: str, part: str) -> Figure:
    return lambda report: span(report[field][part])


def _span(field: str) -> Figure:
    return lambda report: span(report[field])


def _count(field: str) -> Figure:
    return lambda report: number(report[field], 1)


def _share(field: str, part: str = "") -> Figure:
    return lambda report: share(report[field][part] if part else report[field])


FIGURES: Mapping[str, Figure] = {
    "jobs completed": lambda report: f"{number(report['completed'])} of {number(report['jobs'])}",
    "waiting, mean": _spread("queueing_s", "mean"),
    "waiting, median": _spread("queueing_s", "p50"),
    "waiting, p95": _spread("queueing_s", "p95"),
    "waiting, p99": _spread("queueing_s", "p99"),
    "completion time, mean": _spread("jct_s", "mean"),
    "completion time, median": _spread("jct_s", "p50"),
    "completion time, p95": _spread("jct_s", "p95"),
    "completion time, p99": _spread("jct_s", "p99"),
    "completion time from 2 GPUs on, mean": _spread("jct_elastic_s", "mean"),
    "bound: no waiting, all GPUs, mean": _span("jct_bound_s"),
    "makespan": _span("makespan_s"),
    "useful work, training pools": _share("usage_ratio", "training"),
    "useful work, inference pools": _share("usage_ratio", "inference"),
    "useful work, overall": _share("usage_ratio", "overall"),
    "idle GPU hours while jobs waited": _count("idle_while_waiting_gpu_hours"),
    "loaned GPU hours": _count("loaned_gpu_hours"),
    "loans": _count("loans"),
    "recalls": _count("recalls"),
    "recalls that came late": _count("recalls_late"),
    "preemptions": _count("preemptions"),
    "jobs preempted": _share("preemption_ratio"),
    "resizes": _count("resizes"),
    "collateral GPUs of recalls": _count("collateral_gpus"),
    "lost GPU hours": _count("lost_gpu_hours"),
    "lost of all computed": _share("lost_ratio"),
    "inference short, first pass": _share("inference_short_intervals_ratio", "first_pass"),
    "inference short, all": _share("inference_short_intervals_ratio", "all"),
    "ticks": _count("ticks"),
    "tick, median": _spread("tick_s", "p50"),
    "tick, p99": _spread("tick_s", "p99"),
    "tick, longest": _spread("tick_s", "max"),
    "simulated in": _span("wall_s"),
}
