"""`ebbtide usage` and `ebbtide savings`: GPU-hours by queue, owner, GPU model, model of the job and time."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

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


FromOption = Annotated[
    str, typer.Option("--from", metavar="TIME", help="Start, a date or time in UTC. Default: 30 days ago.")
]
ToOption = Annotated[str, typer.Option("--to", metavar="TIME", help="End, a date or time in UTC. Default: now.")]
ByOption = Annotated[str, typer.Option("--by", help="Comma-separated dimensions: day, hour, queue, owner, gpu, model.")]
CsvOption = Annotated[
    bool, typer.Option("--csv", help="Print comma-separated values with GPU-seconds, for spreadsheets.")
]


class SavingsDimension(StrEnum):
    DAY = "day"
    QUEUE = "queue"
    OWNER = "owner"
    GPU = "gpu"
    MODEL = "model"


def usage(
    since: FromOption = "",
    until: ToOption = "",
    by: ByOption = "queue",
    *,
    csv: CsvOption = False,
    url: UrlOption = DEFAULT_URL,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Report GPU-hours, including running jobs."""
    _check_csv(csv, output)
    with service_client(url) as client:
        report = client.usage(since=since, until=until, by=by.split(","))
    if csv:
        from api.usage import usage_csv

        typer.echo(usage_csv(report), nl=False)
        return
    print_document(report, output, lambda: render_usage(report))


def savings(
    since: FromOption = "",
    until: ToOption = "",
    by: Annotated[SavingsDimension, typer.Option("--by", help="Dimension of the rows.")] = SavingsDimension.DAY,
    *,
    csv: CsvOption = False,
    url: UrlOption = DEFAULT_URL,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Report GPU-hours lent, used, lost and idle while jobs waited, with amounts at the set prices."""
    _check_csv(csv, output)
    with service_client(url) as client:
        report = client.savings(since=since, until=until, by=by.value)
    if csv:
        from api.savings import savings_csv

        typer.echo(savings_csv(report), nl=False)
        return
    print_document(report, output, lambda: render_savings(report))


def _check_csv(csv: bool, output: OutputFormat) -> None:
    if csv and output is not OutputFormat.TABLE:
        raise_input_error(f"--csv cannot be combined with -o {output}. Use one of them.")


def render_savings(report: Mapping[str, Any]) -> RenderableType:
    from rich.text import Text

    from scheduler.domain.job_queue import list_usage_columns

    total, currency = report["total"], report["currency"]
    columns = list_usage_columns([report["by"]])
    numbers = ["GPU-hours", "own", "lent", "lost work", "lent, idle", "idle, jobs waited"]
    amounts = [f"amount, {currency}", "on loan"] if currency else []
    table = render_table(
        (
            [*(_format_dimension(name, item[name]) for name in columns), *_format_savings(item)]
            for item in report["items"]
        ),
        headers=[*(name.replace("_", " ") for name in columns), *numbers, *amounts],
        right_aligned=[*numbers, *amounts],
        empty="No GPU time was used or idle in this period.",
    )
    if not report["items"]:
        return table
    sums = dict(zip([*numbers, *amounts], _format_savings(total), strict=True))
    summary = ", ".join(f"{value} {name}" for name, value in sums.items() if value)
    unpriced = f" No price is set for {', '.join(report['unpriced'])}." if report["unpriced"] else ""
    return stack(table, Text(""), Text(f"In total: {summary}.{unpriced}"))


def _format_savings(sums: Mapping[str, Any]) -> list[str]:
    """Return the cells of a row. Idle time is not known by every dimension."""
    names = (*(f"{prefix}gpu_s" for prefix in _SUM_PREFIXES), "lent_idle_gpu_s", "idle_waiting_gpu_s")
    hours = ["" if sums[name] is None else _format_gpu_hours(sums[name]) for name in names]
    amounts = sums["amounts"]
    return hours + ([format_number(amounts[name], 2) for name in ("used", "on_loan")] if amounts else [])


def render_usage(report: Mapping[str, Any]) -> RenderableType:
    from rich.text import Text

    from scheduler.domain.job_queue import list_usage_columns

    by, total = report["by"], report["total"]
    until_s = min(report["to_s"], report["as_of_s"])
    total_hours, lost_hours = _format_gpu_hours(total["gpu_s"]), _format_gpu_hours(total["lost_gpu_s"])
    period = f"{format_time(report['from_s'])} to {format_time(until_s)} (UTC)"
    lent_share = format_percent(_ratio_to_total(total, "lent_gpu_s"))
    summary = f"{period}: {total_hours} GPU-hours, {lent_share} on lent GPUs, {lost_hours} of lost work."
    numbers = ["GPU-hours", "own", "lent", "lost work"]
    columns = list_usage_columns(by)
    table = render_table(
        (
            [
                *(_format_dimension(name, item[name]) for name in columns),
                *(_format_gpu_hours(item[f"{prefix}gpu_s"]) for prefix in _SUM_PREFIXES),
            ]
            for item in report["items"]
        ),
        headers=[*(name.replace("_", " ") for name in columns), *numbers],
        right_aligned=numbers,
        empty="No GPU time was used in this period.",
    )
    return stack(table, Text(""), Text(summary)) if report["items"] else table


_SUM_PREFIXES = ("", "own_", "lent_", "lost_")


def _ratio_to_total(sums: Mapping[str, float], name: str) -> float:
    return sums[name] / sums["gpu_s"] if sums["gpu_s"] else 0.0


def _format_gpu_hours(gpu_s: float) -> str:
    return format_number(gpu_s / HOUR_S, 2)


def _format_dimension(dimension: str, value: Any) -> str:
    if dimension in ("day", "hour"):
        return format_time(value)[: 10 if dimension == "day" else 16]
    return str(value) or "(none)"
