"""`ebbtide forecast`: shows the demand forecast of a pool, and tests forecasts on recorded demand."""

from __future__ import annotations

from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer

from cli.completion import complete_pool_names
from cli.connection import DEFAULT_URL, UrlOption, service_client
from cli.inputs import input_errors_from
from cli.output import (
    OutputFormat,
    OutputOption,
    format_duration,
    format_percent,
    format_time,
    print_document,
    render_facts,
    render_table,
    stack,
)
from scheduler.documents.units import parse_duration_s

if TYPE_CHECKING:
    from rich.console import RenderableType

app = typer.Typer(name="forecast", help="Show the demand forecast of a pool, or test forecasts on recorded demand.")

PoolArgument = Annotated[
    str, typer.Argument(metavar="POOL", autocompletion=complete_pool_names, help="Name of an inference pool.")
]
DemandOption = Annotated[
    Path,
    typer.Option("--demand", metavar="DEMAND.csv[.gz]", help="CSV file of demand over time, one or more series."),
]
HorizonOption = Annotated[
    list[str] | None,
    typer.Option("--horizon", metavar="DURATION", help="Time to look ahead, such as 15m. Repeatable. [5m, 15m, 60m]"),
]
TargetOption = Annotated[
    Literal["peak", "value"],
    typer.Option(
        "--target",
        help="`peak`: the largest demand within the horizon, which lending must cover. `value`: demand at its end.",
    ),
]
ZoneOption = Annotated[
    str, typer.Option("--time-zone", metavar="ZONE", help="Time zone of the daily course, such as Europe/Berlin.")
]
_DEFAULT_HORIZONS = ("5m", "15m", "60m")


@app.command("show")
def show(pool: PoolArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE) -> None:
    """Show the newest demand forecast of a pool."""
    with service_client(url) as client:
        document = client.forecast(pool)
    print_document(document, output, lambda: _render_forecast(document))


@app.command("backtest")
def backtest(
    demand: DemandOption,
    horizon: HorizonOption = None,
    target: TargetOption = "peak",
    time_zone: ZoneOption = "UTC",
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Forecast the last quarter of recorded demand, by the service's method and by others alone.

    The loss is the weighted quantile loss: twice the pinball loss over eight quantiles from 0.05 to 0.99, relative to
    mean demand. Coverage is the share of outcomes at or below a quantile.
    """
    horizons_s = [_parse_horizon(text) for text in horizon or _DEFAULT_HORIZONS]
    cells = ((series, horizon_s) for series in read_series(demand) for horizon_s in horizons_s)
    rows = [_test_series(*cell, target=target, zone=time_zone) for cell in cells]
    print_document({"demand": str(demand), "results": rows}, output, lambda: _render_scores(rows))


class Series(NamedTuple):
    """One series of a demand file: times in seconds, and demand in any unit."""

    name: str
    times_s: list[float]
    amounts: list[float]


def read_series(path: Path) -> list[Series]:
    """Return the series of a file. Raises InputError if it is invalid."""
    from scheduler.documents.trace_files import read_demand

    with input_errors_from(str(path)):
        rows = sorted(read_demand(path), key=lambda row: row.pool)
    grouped = ((name, list(group)) for name, group in groupby(rows, key=lambda row: row.pool))
    return [Series(name, [row.time_s for row in group], [row.amount for row in group]) for name, group in grouped]


def _parse_horizon(text: str) -> float:
    with input_errors_from("--horizon"):
        return parse_duration_s(text)


def _test_series(series: Series, horizon_s: float, *, target: str, zone: str) -> dict[str, Any]:
    from scheduler.forecast.backtest import COVERAGE_LEVELS, run_backtest
    from scheduler.forecast.candidates import Target

    with input_errors_from(f"series {series.name}"):
        report = run_backtest(series.times_s, series.amounts, horizon_s=horizon_s, target=Target(target), zone=zone)
    scores = [asdict(score) for score in report.scores]
    for score in scores:
        score["coverage"] = dict(zip(map(str, COVERAGE_LEVELS), score["coverage"], strict=True))
    return {"series": series.name, **asdict(report), "scores": scores}


def _render_scores(rows: list[dict[str, Any]]) -> RenderableType:
    cells = [
        [
            row["series"],
            format_duration(row["horizon_s"]),
            score["method"],
            f"{score['loss']:.4f}",
            *(format_percent(share) for share in score["coverage"].values()),
        ]
        for row in rows
        for score in row["scores"]
    ]
    headers = ["series", "horizon", "method", "loss", "coverage of 0.95", "of 0.999"]
    return render_table(cells, headers=headers, right_aligned=headers[3:])


_UNCALIBRATED = "no: less than a day of readings, so nothing new is lent unless the pool has a demand profile"


def _render_forecast(document: Any) -> RenderableType:
    forecast = document["forecast"]
    if forecast is None:
        return render_facts({"pool": document["pool"], "forecast": "none: there are too few readings"})
    facts = {
        "pool": document["pool"],
        "made": format_time(forecast["made_at_s"]),
        "horizon": format_duration(forecast["horizon_s"]),
        "method": forecast["method"],
        "calibrated": "yes" if forecast["is_calibrated"] else _UNCALIBRATED,
    }
    if forecast["event"]:
        facts["raised by"] = f"known event {forecast['event']}"
    columns = [forecast["quantiles"], forecast["gpus"]]
    rows = [[f"{level:g}", f"{gpus:.1f}"] for level, gpus in zip(*columns, strict=True)]
    return stack(render_facts(facts), render_table(rows, headers=["quantile", "GPUs"], right_aligned=["GPUs"]))
