"""`ebbtide lending`: pauses and resumes lending, recalls or vetoes loans, reports recalls, and tests lending."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.commands.forecast import DemandOption
from cli.connection import DEFAULT_URL, UrlOption, service_client
from cli.inputs import input_errors_from, raise_input_error
from cli.output import (
    DAY_S,
    HOUR_S,
    OutputFormat,
    OutputOption,
    format_duration,
    format_percent,
    format_time,
    print_document,
    print_message,
    render_facts,
    render_table,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

    from scheduler.documents.simulation import ClusterDocument
    from scheduler.simulator.demand import DemandTrace

app = typer.Typer(
    name="lending", help="Pause or resume lending, recall or veto loans, report recalls, or test lending."
)

ClusterOption = Annotated[
    Path, typer.Option("--cluster", metavar="CLUSTER.yaml", help="YAML file of the inference pools and their nodes.")
]


PoolZoneOption = Annotated[
    str, typer.Option("--time-zone", metavar="ZONE", help="Time zone of the daily course. Default: that of each pool.")
]


@app.command()
def pause(url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE) -> None:
    """Stop making new loans. Current loans continue."""
    with service_client(url) as client:
        _print_lending(client.pause_lending(), output, "Lending is paused. Current loans continue.")


@app.command()
def resume(url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE) -> None:
    """Resume lending."""
    with service_client(url) as client:
        _print_lending(client.resume_lending(), output, "Lending is resumed.")


@app.command("recall-all")
def recall_all(url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE) -> None:
    """Recall every loan and pause lending."""
    with service_client(url) as client:
        _print_lending(client.recall_all(), output, "All loans are recalled and lending is paused.")


@app.command("veto")
def veto(
    loan: Annotated[str, typer.Argument(metavar="LOAN", help="ID of a proposed loan.")],
    reason: Annotated[str, typer.Option("--reason", help="Why the node must not be lent now.")],
    url: UrlOption = DEFAULT_URL,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Reject a proposed loan. Its node is not proposed again for the pool's `veto_s`."""
    with service_client(url) as client:
        result = client.veto_loan(loan, reason=reason)
    print_document(result, output, lambda: render_facts({"loan": f"{loan} of node {result['node']} is vetoed"}))


PoolOption = Annotated[str, typer.Option("--pool", metavar="POOL", help="Only recalls of nodes of this pool.")]
DaysOption = Annotated[int, typer.Option("--days", min=1, help="Only recalls of the last days.", show_default=True)]


@app.command()
def receipts(
    pool: PoolOption = "",
    days: DaysOption = 30,
    *,
    url: UrlOption = DEFAULT_URL,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """List recalls with their times, jobs and outcomes, newest first."""
    with service_client(url) as client:
        found = client.recalls(pool=pool, since_s=max(0.0, time.time() - days * DAY_S))
    print_document(found, output, lambda: _render_receipts(found))


class ReportFormat(StrEnum):
    TABLE = "table"
    MARKDOWN = "markdown"
    HTML = "html"
    JSON = "json"


MonthOption = Annotated[
    str, typer.Option("--month", metavar="YYYY-MM", help="Calendar month in UTC. Default: the current one.")
]
FormatOption = Annotated[
    ReportFormat, typer.Option("--format", help="Form of the report. HTML is one self-contained file.")
]
OutOption = Annotated[
    Path | None, typer.Option("--out", metavar="FILE", help="Write the report to this file instead of stdout.")
]


@app.command()
def report(
    pool: Annotated[str, typer.Argument(metavar="POOL", help="Inference pool of the report.")],
    month: MonthOption = "",
    form: FormatOption = ReportFormat.TABLE,
    out: OutOption = None,
    *,
    url: UrlOption = DEFAULT_URL,
) -> None:
    """Report what lending did to an inference pool in one month."""
    from cli.safety_report import render_report_html, render_report_markdown, render_report_table

    if out is not None and form is ReportFormat.TABLE:
        raise_input_error(f"--out {out} needs a form for files. Add --format markdown, html or json.")
    with service_client(url) as client:
        document = client.safety_report(pool, month=month)
    if form is ReportFormat.TABLE:
        print_document(document, OutputFormat.TABLE, lambda: render_report_table(document))
        return
    renderers = {ReportFormat.HTML: render_report_html, ReportFormat.MARKDOWN: render_report_markdown}
    text = renderers[form](document) if form in renderers else json.dumps(document, indent=2) + "\n"
    if out is None:
        typer.echo(text, nl=False)
        return
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise_input_error(f"--out: {out} cannot be written: {error.strerror or error}")
    print_message(f"{document['summary']} Written to {out}.")


@app.command("frontier")
def frontier(
    demand: DemandOption,
    cluster: ClusterOption,
    time_zone: PoolZoneOption = "",
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Compare GPU-hours lent with shortages, by forecast and quantile, on recorded demand.

    Everything that a forecast allows is lent, in one pass over the demand. The first row keeps the pool's shortage
    target. An oracle, which knows the demand of the horizon, lends all that can be lent.
    """
    from scheduler.documents.simulation import read_cluster
    from scheduler.documents.trace_files import read_demand
    from scheduler.simulator.demand import build_demand_traces

    with input_errors_from(""):
        document = read_cluster(cluster)
        traces = build_demand_traces(read_demand(demand), document)
        rows = [row for trace in traces for row in _compute_rows(trace, document, time_zone)]
    print_document({"demand": str(demand), "points": rows}, output, lambda: _render_frontier(rows))


def _compute_rows(trace: DemandTrace, document: ClusterDocument, zone: str) -> Iterator[dict[str, Any]]:
    from scheduler.documents.fleet import to_lending_policy
    from scheduler.simulator.lending_frontier import LendingPool, compute_frontier

    (pool,) = [each for each in document.pools if each.name == trace.pool]
    rules = to_lending_policy(pool.lending)
    partial_nodes, lendable_gpus = pool.count_partial_nodes(), pool.lendable_gpus or 1
    nodes = LendingPool(pool.nodes, pool.gpus_per_node, rules.headroom, partial_nodes, lendable_gpus)
    for point in compute_frontier(trace.times_s, trace.gpus, nodes, rules=rules, zone=zone or rules.time_zone):
        yield {"pool": trace.pool, "horizon_s": rules.horizon_s, **asdict(point)}


def _render_frontier(rows: list[dict[str, Any]]) -> RenderableType:
    headers = ["pool", "forecast", "quantile", "GPU-hours lent", "of the oracle's", "intervals short"]
    cells = [
        [
            row["pool"],
            row["method"],
            "-" if row["quantile"] is None else f"{row['quantile']:g}",
            f"{row['gpu_hours']:,.0f}",
            format_percent(row["oracle_share"]),
            f"{row['short_ratio']:.3%}",
        ]
        for row in rows
    ]
    return render_table(cells, headers=headers, right_aligned=headers[2:])


def _render_receipts(found: Iterable[Mapping[str, Any]]) -> RenderableType:
    headers = ["node", "pool", "recalled", "outcome", "deadline", "returned after", "jobs", "lost GPU-h", "reason"]
    rows = [
        [
            receipt["node"],
            receipt["pool"],
            format_time(receipt["asked_at_s"]),
            (receipt["outcome"] or "open").replace("_", " "),
            format_duration(receipt["return_by_s"] - receipt["asked_at_s"]),
            "-"
            if receipt["returned_at_s"] is None
            else format_duration(receipt["returned_at_s"] - receipt["asked_at_s"]),
            ", ".join(f"{count} {word}" for word, count in _count_exits(receipt).items()) or "none",
            f"{sum(job['lost_gpu_s'] for job in receipt['jobs']) / HOUR_S:.2f}",
            receipt["code"],
        ]
        for receipt in found
    ]
    right_aligned = ("deadline", "returned after", "lost GPU-h")
    return render_table(rows, headers=headers, right_aligned=right_aligned, empty="No node was recalled.")


def _count_exits(receipt: Mapping[str, Any]) -> Mapping[str, int]:
    return Counter(job["exit"] or "staying" for job in receipt["jobs"])


def _print_lending(document: Mapping[str, Any], output: OutputFormat, sentence: str) -> None:
    print_document(document, output, lambda: render_facts({"lending": sentence}))
