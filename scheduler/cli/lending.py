"""Loans, and the switches over lending."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scheduler.cli.humanise import clock
from scheduler.cli.output import Format, OutputOption, columns, emit, facts
from scheduler.cli.service import DEFAULT_URL, UrlOption, service

if TYPE_CHECKING:
    from rich.console import RenderableType

app = typer.Typer(name="lending", help="Pause, resume or end the lending of inference nodes.")

StateOption = Annotated[str, typer.Option("--state", help="Only loans in this state.")]


def loans(state: StateOption = "", url: UrlOption = DEFAULT_URL, output: OutputOption = Format.TABLE) -> None:
    """List the inference nodes that training has on loan, with their deadlines."""
    with service(url) as client:
        rows = client.loans(state=state)
    emit(rows, output, lambda: loan_rows(rows))


def loan_rows(rows: Iterable[Mapping[str, Any]]) -> RenderableType:
    return columns(
        ([loan["node"], loan["pool"], loan["state"], clock(loan["offered_at_s"]), _due(loan)] for loan in rows),
        heads=["node on loan", "pool", "state", "offered (UTC)", "back by (UTC)"],
        empty="No node is on loan.",
    )


@app.command()
def pause(url: UrlOption = DEFAULT_URL, output: OutputOption = Format.TABLE) -> None:
    """Make no new loans; those that run go on."""
    with service(url) as client:
        _answer(client.pause_lending(), output, "Lending is paused: no new loans, those that run go on.")


@app.command()
def resume(url: UrlOption = DEFAULT_URL, output: OutputOption = Format.TABLE) -> None:
    """Lend again."""
    with service(url) as client:
        _answer(client.resume_lending(), output, "Lending goes on.")


@app.command("recall-all")
def recall_all(url: UrlOption = DEFAULT_URL, output: OutputOption = Format.TABLE) -> None:
    """Call every lent node home and pause lending."""
    with service(url) as client:
        _answer(client.recall_all(), output, "Every loan is recalled and lending is paused.")


def _answer(document: Mapping[str, Any], output: Format, sentence: str) -> None:
    emit(document, output, lambda: facts({"lending": sentence}))


def _due(loan: Mapping[str, Any]) -> str:
    deadline = loan.get("return_by_s")
    return clock(deadline) if deadline is not None else "-"
