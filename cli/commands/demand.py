"""`ebbtide demand`: shows the demand of an inference pool, and reports recorded demand."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.completion import complete_pool_names
from cli.connection import DEFAULT_URL, UrlOption, service_client
from cli.exit_codes import InputError
from cli.inputs import input_errors_from, read_yaml_object
from cli.output import (
    OutputFormat,
    OutputOption,
    format_count,
    format_number,
    format_time,
    print_document,
    render_facts,
)
from scheduler.documents.units import parse_duration_s

if TYPE_CHECKING:
    from rich.console import RenderableType

app = typer.Typer(name="demand", help="Show the demand of an inference pool, or report recorded demand.")

BATCH_READINGS = 40_000
"""Readings of one request. The service takes up to 50,000."""
RELATIVE_TIMES_BELOW_S = 1e9
"""Times of a file below this count from its start: they are before September 2001."""

PoolArgument = Annotated[
    str, typer.Argument(metavar="POOL", autocompletion=complete_pool_names, help="Name of an inference pool.")
]
FileArgument = Annotated[
    Path, typer.Argument(metavar="DEMAND.csv[.gz]", help="CSV file of demand over time, as `simulate` reads it.")
]
SourceArgument = Annotated[
    str, typer.Argument(metavar="SOURCE.yaml", help="Queries, presets or requests from Prometheus; - reads stdin.")
]
SeriesOption = Annotated[
    str, typer.Option("--series", metavar="NAME", help="Series of the file. Default: the one with the pool's name.")
]
PeakOption = Annotated[
    float | None,
    typer.Option("--peak-gpus", min=0.0, help="GPUs needed at the largest load, for files of load instead of GPUs."),
]
EndOption = Annotated[
    str | None,
    typer.Option(
        "--end",
        metavar="AGE",
        help="How long ago the last row was, such as 0s or 2h. Required if times count from the file's start.",
    ),
]


@app.command("show")
def show(pool: PoolArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE) -> None:
    """Show the latest demand of a pool, and the number of its readings of the last day."""
    with service_client(url) as client:
        history = client.demand(pool)
    print_document(history, output, lambda: _render_history(history))


@app.command("push")
def push(
    pool: PoolArgument,
    file: FileArgument,
    series: SeriesOption = "",
    peak_gpus: PeakOption = None,
    end: EndOption = None,
    *,
    url: UrlOption = DEFAULT_URL,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Report the demand in a file as the history of a pool.

    Its forecasts learn from it at once. The newest row becomes the present demand if it is newer than the latest
    reading.
    """
    readings = _read_file(file, series or pool, peak_gpus, end)
    batches = [readings[at : at + BATCH_READINGS] for at in range(0, len(readings), BATCH_READINGS)]
    with service_client(url) as client:
        # The newest batch goes first, so that no older reading becomes the present demand meanwhile.
        answers = [client.push_demand(pool, batch) for batch in reversed(batches)]
    document = {
        **answers[0],
        **{name: sum(answer[name] for answer in answers) for name in ("accepted", "backfilled", "clamped_readings")},
    }
    print_document(document, output, lambda: _render_pushed(document))


@app.command("set-source")
def set_source(
    pool: PoolArgument, source: SourceArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE
) -> None:
    """Let the service poll Prometheus for the demand of a pool. Its history of up to 28 days is back-filled.

    The source has queries of GPUs, or the requests for the models that the pool serves.
    """
    document = read_yaml_object(source)
    with service_client(url) as client:
        response = client.set_demand_source(pool, document)
    if requests := document.get("requests"):
        shown = f"requests for {format_count(len(requests), 'model')}"
    else:
        shown = format_count(len(document["queries"]), "term")
    print_document(
        response, output, lambda: render_facts({"pool": pool, "demand source": f"{shown}, polled from Prometheus"})
    )


@app.command("clear-source")
def clear_source(pool: PoolArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE) -> None:
    """Stop polling for the demand of a pool. Its demand is then reported."""
    with service_client(url) as client:
        response = client.delete_demand_source(pool)
    print_document(response, output, lambda: render_facts({"pool": pool, "demand source": "none: demand is reported"}))


def _read_file(file: Path, series: str, peak_gpus: float | None, end: str | None) -> Sequence[tuple[float, float]]:
    """Return times, in seconds since 1970, and GPUs of a series.

    Raises:
        InputError: the file is invalid, has no such series, or its times count from its start and `end` is None.
    """
    from scheduler.documents.trace_files import read_demand
    from scheduler.simulator.demand import build_trace

    with input_errors_from(""):
        rows = read_demand(file)
        found = [row for row in rows if row.pool == series]
        if not found:
            names = ", ".join(sorted({row.pool for row in rows}))
            raise InputError(f"--series is {series!r}, which {file} does not have. Use one of: {names}")
        trace = build_trace(series, found, peak_gpus=peak_gpus)
    shift_s = 0.0
    if end is not None:
        with input_errors_from("--end"):
            shift_s = time.time() - parse_duration_s(end) - trace.times_s[-1]
    elif trace.times_s[-1] < RELATIVE_TIMES_BELOW_S:
        raise InputError(
            f"{file}: the last time is {trace.times_s[-1]:g} s, but times must be seconds since 1970. Use --end to say "
            "how long ago the last row was, such as `--end 0s`"
        )
    return [(at_s + shift_s, gpus) for at_s, gpus in zip(trace.times_s, trace.gpus, strict=True)]


def _render_history(history: Mapping[str, Any]) -> RenderableType:
    latest = history["latest"]
    return render_facts(
        {
            "pool": history["pool"],
            "demand": "none: no reading yet" if latest is None else _format_demand(latest),
            "capacity": f"{history['capacity_gpus']} GPUs",
            "last day": format_count(len(history["readings"]), "reading"),
        }
    )


def _render_pushed(answer: Mapping[str, Any]) -> RenderableType:
    return render_facts(
        {
            "pool": answer["pool"],
            "recorded": format_count(answer["accepted"], "reading"),
            "history": f"{answer['backfilled']} back-filled, {answer['clamped_readings']} above the capacity",
            "demand": _format_demand(answer),
        }
    )


def _format_demand(reading: Mapping[str, Any]) -> str:
    return f"{format_number(reading['gpus'], 1)} GPUs at {format_time(reading['at_s'])} UTC"
