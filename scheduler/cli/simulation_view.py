"""The report of a simulation: one column a policy set, one line a figure; for people, and as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from scheduler.cli.humanise import number, share, span
from scheduler.cli.output import columns, console, stacked

if TYPE_CHECKING:
    from rich.console import RenderableType

Document = Mapping[str, Any]
Forms = Mapping[str, Callable[[float | None], str]]


@dataclass(frozen=True, slots=True)
class Figure:
    """`path` leads to the number in a policy's report. `better`: 1 where more is better, -1 where less is, else 0."""

    path: str
    unit: str
    better: int = 0


GROUPS: Mapping[str, Mapping[str, Figure]] = {
    "Jobs": {
        "jobs completed": Figure("completed", "count", 1),
        "jobs turned away": Figure("rejected", "count", -1),
        "deadlines met": Figure("deadlines_met_ratio", "ratio", 1),
        "waiting, mean": Figure("queueing_s.mean", "s", -1),
        "waiting, median": Figure("queueing_s.p50", "s", -1),
        "waiting, p95": Figure("queueing_s.p95", "s", -1),
        "waiting, p99": Figure("queueing_s.p99", "s", -1),
        "completion time, mean": Figure("jct_s.mean", "s", -1),
        "completion time, median": Figure("jct_s.p50", "s", -1),
        "completion time, p95": Figure("jct_s.p95", "s", -1),
        "completion time, p99": Figure("jct_s.p99", "s", -1),
        "completion, 2 GPUs and more, mean": Figure("jct_elastic_s.mean", "s", -1),
        "bound: no waiting, all GPUs, mean": Figure("jct_bound_s", "s"),
        "makespan": Figure("makespan_s", "s", -1),
    },
    "Use of the GPUs": {
        "useful work, training pools": Figure("usage_ratio.training", "ratio", 1),
        "useful work, inference pools": Figure("usage_ratio.inference", "ratio", 1),
        "useful work, overall": Figure("usage_ratio.overall", "ratio", 1),
        "idle GPU hours while jobs waited": Figure("idle_while_waiting_gpu_hours", "count", -1),
        "lost GPU hours": Figure("lost_gpu_hours", "count", -1),
        "lost of all computed": Figure("lost_ratio", "ratio", -1),
    },
    "Lending": {
        "loaned GPU hours": Figure("loaned_gpu_hours", "count"),
        "loans": Figure("loans", "count"),
        "recalls": Figure("recalls", "count"),
        "recalls that came late": Figure("recalls_late", "count", -1),
        "collateral GPUs of recalls": Figure("collateral_gpus", "count", -1),
        "inference short, first pass": Figure("inference_short_intervals_ratio.first_pass", "ratio", -1),
        "inference short, all": Figure("inference_short_intervals_ratio.all", "ratio", -1),
    },
    "Disturbance": {
        "preemptions": Figure("preemptions", "count", -1),
        "jobs preempted": Figure("preemption_ratio", "ratio", -1),
        "resizes": Figure("resizes", "count", -1),
        "illegal decisions, dropped": Figure("violations", "count", -1),
    },
    "The simulation itself": {
        "ticks": Figure("ticks", "count"),
        "tick, median": Figure("tick_s.p50", "s"),
        "tick, p99": Figure("tick_s.p99", "s"),
        "tick, longest": Figure("tick_s.max", "s"),
        "simulated in": Figure("wall_s", "s"),
    },
}
FIGURES: Mapping[str, Figure] = {name: figure for group in GROUPS.values() for name, figure in group.items()}
TERSE: Forms = {"s": span, "ratio": share, "count": lambda value: number(value, 0 if value and value >= 100 else 1)}
"""For the terminal."""
_RARE = ("jobs turned away", "illegal decisions, dropped")
"""Told on the terminal only where it happened."""
_GAP = 2


def seconds(value: float | None) -> str:
    """`4,222 s`, `34.5 ms`, `-`."""
    if value is None:
        return "-"
    return f"{round(value):,} s" if value >= 100 else f"{value:.3g} s" if value >= 1 or not value else span(value)


EXACT: Forms = {**TERSE, "s": seconds, "ratio": lambda value: "-" if value is None else f"{100 * value:.2f}%"}
"""For reports, in which figures are compared and quoted."""


def comparison(document: Document) -> RenderableType:
    """The table of one seed's report or of a sweep; several, one below the other, where the policies are too many for
    the terminal. What no policy set has a figure of is left out."""
    rows = [[name, *cells(document, figure, TERSE)] for name, figure in FIGURES.items()]
    rows = [row for row in rows if {*row[1:]} - {"-"} and not (row[0] in _RARE and {*row[1:]} <= {"0", "0 ± 0"})]
    table = [[seeds(document), *policies(document)], *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return stacked(*_tables(table, _blocks(widths, console().width)))


def _tables(table: list[list[str]], blocks: Iterable[Sequence[int]]) -> Iterator[RenderableType]:
    for number_of_block, block in enumerate(blocks):
        heads, *rows = ([line[0], *(line[at] for at in block)] for line in table)
        if number_of_block:
            yield ""
        yield columns(rows, heads=heads, right=heads[1:])


def _blocks(widths: Sequence[int], room: int) -> list[list[int]]:
    """The columns after the first in as few groups as fit beside it, at least one in each."""
    blocks: list[list[int]] = []
    left = 0
    for at, width in enumerate(widths[1:], 1):
        if not blocks or left < _GAP + width:
            blocks.append([])
            left = room - widths[0] - _GAP
        blocks[-1].append(at)
        left -= _GAP + width
    return blocks


def markdown(document: Document) -> str:
    lines = [[seeds(document), *policies(document)], ["---", *("---:" for _ in policies(document))]]
    lines += [[name, *cells(document, figure, EXACT)] for name, figure in FIGURES.items()]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def policies(document: Document) -> list[str]:
    return [report["policy"] for report in document["policies"]]


def seeds(document: Document) -> str:
    listed = document.get("seeds")
    return f"seeds {', '.join(map(str, listed))}" if listed else f"seed {document['seed']}"


def cells(document: Document, figure: Figure, forms: Forms) -> Iterator[str]:
    """The figure under each policy set; of a sweep with half the width of its interval."""
    form = forms[figure.unit]
    for report in document["policies"]:
        value = value_of(report, figure)
        text = form(value)
        if "figures" in report and value is not None:
            text += f" ± {form(report['figures'][figure.path]['high'] - value)}"
        yield f"{text} of {number(jobs(document))}" if figure.path == "completed" else text


def value_of(report: Document, figure: Figure) -> float | None:
    """The number in one policy's report; of a sweep its mean."""
    if "figures" in report:
        entry = report["figures"].get(figure.path)
        return None if entry is None else float(entry["mean"])
    value: Any = report
    for step in figure.path.split("."):
        value = value[step]
    return None if value is None else float(value)


def jobs(document: Document) -> int:
    run = document["runs"][0] if "runs" in document else document
    return int(run["policies"][0]["jobs"])
