"""Usage of a service: who held how many GPU-hours, of training's own GPUs and of lent ones.

`audit`: who asked for which change.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.commands.events import LimitOption
from cli.connection import DEFAULT_URL, UrlOption, service_client
from cli.inputs import raise_input_error
from cli.output import (
    HOUR_S,
    OutputFormat,
    OutputOption,
    format_number,
    format_percent,
    format_time,
    print_document,
    render_table,
    stack,
)

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
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Say how many GPU-hours jobs have held, those that run now included."""
    from api.usage import usage_csv

    if csv and output is not OutputFormat.TABLE:
        raise_input_error(f"--csv and -o {output} exclude each other")
    with service_client(url) as client:
        report = client.usage(since=since, until=until, by=by.split(","))
    if csv:
        typer.echo(usage_csv(report), nl=False)
        return
    print_document(report, output, lambda: render_usage(report))


def render_usage(report: Mapping[str, Any]) -> RenderableType:
    from rich.text import Text

    by, total = report["by"], report["total"]
    until_s = min(report["to_s"], report["as_of_s"])
    said = (
        f"{_format_gpu_hours(total['gpu_s'])} GPU-hours from {format_time(report['from_s'])} to {format_time(until_s)} (UTC), "
        f"{format_percent(_ratio_to_total(total, 'lent_gpu_s'))} of them on lent GPUs; the work of {_format_gpu_hours(total['lost_gpu_s'])} was lost."
    )
    numbers = ["GPU-hours", "own", "lent", "lost work"]
    table = render_table(
        (
            [
                *(_format_dimension(name, item[name]) for name in by),
                *(_format_gpu_hours(item[f"{sum_}gpu_s"]) for sum_ in _SUM_PREFIXES),
            ]
            for item in report["items"]
        ),
        headers=[*by, *numbers],
        right_aligned=numbers,
        empty="Nobody has held a GPU in this time.",
    )
    return stack(table, Text(""), Text(said)) if report["items"] else table


_SUM_PREFIXES = ("", "own_", "lent_", "lost_")


def _ratio_to_total(sums: Mapping[str, float], name: str) -> float:
    return sums[name] / sums["gpu_s"] if sums["gpu_s"] else 0.0


def _format_gpu_hours(gpu_s: float) -> str:
    return format_number(gpu_s / HOUR_S, 2)


def _format_dimension(dimension: str, value: Any) -> str:
    if dimension in ("day", "hour"):
        return format_time(value)[: 10 if dimension == "day" else 16]
    return str(value) or "nobody known"


ActorOption = Annotated[str, typer.Option("--actor", help="Only what this one asked for.")]
SubjectOption = Annotated[str, typer.Option("--subject", help="Only what this job, node, pool, queue or token saw.")]
HoursOption = Annotated[float | None, typer.Option("--hours", min=0, help="Only of the last so many hours.")]


def audit(
    actor: ActorOption = "",
    subject: SubjectOption = "",
    hours: HoursOption = None,
    *,
    limit: LimitOption = 50,
    url: UrlOption = DEFAULT_URL,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """List who asked for which change, oldest first; admins only."""
    since_s = None if hours is None else time.time() - hours * 3600.0
    with service_client(url) as client:
        found = list(deque(client.audit(actor=actor, subject=subject, since_s=since_s), maxlen=limit))
    print_document(
        found,
        output,
        lambda: render_table(
            (
                [
                    format_time(each["at_s"]),
                    each["actor"],
                    each["action"],
                    each["subject"],
                    each["outcome"],
                    each["request_id"],
                ]
                for each in found
            ),
            headers=["time (UTC)", "who", "what", "of", "outcome", "request"],
            empty="Nobody has asked for a change.",
        ),
    )
