"""Usage of a service: who held how many GPU-hours, of training's own GPUs and of lent ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scheduler.cli.failure import refuse
from scheduler.cli.humanise import HOUR_S, clock, number, share
from scheduler.cli.output import Format, OutputOption, columns, emit, stacked
from scheduler.cli.service import DEFAULT_URL, UrlOption, service

if TYPE_CHECKING:
    from rich.console import RenderableType

FromOption = Annotated[str, typer.Option("--from", metavar="TIME", help="A date or time (UTC); else 30 days ago.")]
ToOption = Annotated[str, typer.Option("--to", metavar="TIME", help="A date or time (UTC); else now.")]
ByOption = Annotated[str, typer.Option("--by", help="One or more of day, hour, queue, owner, gpu, with commas.")]
CsvOption = Annotated[bool, typer.Option("--csv", help="Print comma-separated values, in GPU-seconds.")]


def usage(
    since: FromOption = "",
    until: ToOption = "",
    by: ByOption = "queue",
    *,
    csv: CsvOption = False,
    url: UrlOption = DEFAULT_URL,
    output: OutputOption = Format.TABLE,
) -> None:
    """Say how many GPU-hours jobs have held, those that run now included."""
    from api.answers.usage import usage_csv

    if csv and output is not Format.TABLE:
        refuse(f"--csv and -o {output} exclude each other")
    with service(url) as client:
        report = client.usage(since=since, until=until, by=by.split(","))
    if csv:
        typer.echo(usage_csv(report), nl=False)
        return
    emit(report, output, lambda: usage_view(report))


def usage_view(report: Mapping[str, Any]) -> RenderableType:
    from rich.text import Text

    by, total = report["by"], report["total"]
    until_s = min(report["to_s"], report["as_of_s"])
    said = (
        f"{_hours(total['gpu_s'])} GPU-hours from {clock(report['from_s'])} to {clock(until_s)} (UTC), "
        f"{share(_part(total, 'lent_gpu_s'))} of them on lent GPUs; the work of {_hours(total['lost_gpu_s'])} was lost."
    )
    numbers = ["GPU-hours", "own", "lent", "lost work"]
    table = columns(
        (
            [*(_named(name, item[name]) for name in by), *(_hours(item[f"{sum_}gpu_s"]) for sum_ in _SUMS)]
            for item in report["items"]
        ),
        heads=[*by, *numbers],
        right=numbers,
        empty="Nobody has held a GPU in this time.",
    )
    return stacked(table, Text(""), Text(said)) if report["items"] else table


_SUMS = ("", "own_", "lent_", "lost_")


def _part(sums: Mapping[str, float], name: str) -> float:
    return sums[name] / sums["gpu_s"] if sums["gpu_s"] else 0.0


def _hours(gpu_s: float) -> str:
    return number(gpu_s / HOUR_S, 2)


def _named(dimension: str, value: Any) -> str:
    if dimension in ("day", "hour"):
        return clock(value)[: 10 if dimension == "day" else 16]
    return str(value) or "nobody known"
