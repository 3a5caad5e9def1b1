"""`top`: the whole cluster on one screen."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scheduler.cli.fleet_view import pool_rows
from scheduler.cli.humanise import clock
from scheduler.cli.job_view import job_rows
from scheduler.cli.lending import loan_rows
from scheduler.cli.output import Format, OutputOption, console, emit, stacked
from scheduler.cli.service import DEFAULT_URL, UrlOption, service
from scheduler.cli.watching import EveryOption, refresh, require_table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from api.client import Client

StayOption = Annotated[
    bool | None,
    typer.Option(
        "--watch/--once", "-w/-1", help="Refresh until Ctrl-C, or print once; default: as a terminal is there."
    ),
]


def top(
    watch: StayOption = None,
    every: EveryOption = 2.0,
    url: UrlOption = DEFAULT_URL,
    output: OutputOption = Format.TABLE,
) -> None:
    """Show pools, loans and live jobs at once, again and again on a terminal."""
    require_table(output, bool(watch))
    stays = output is Format.TABLE and console().is_terminal if watch is None else watch
    with service(url) as client:
        if not stays:
            seen = _look(client)
            emit(seen, output, lambda: _screen(seen))
            return
        refresh(lambda: _screen(_look(client)), every)


def _look(client: Client) -> dict[str, Any]:
    return {
        "at_s": time.time(),
        "pools": client.pools(),
        "loans": [loan for loan in client.loans() if loan["is_live"]],
        "jobs": list(client.jobs(state="live")),
    }


def _screen(seen: dict[str, Any]) -> RenderableType:
    from rich.text import Text

    head = Text(f"Ebbtide at {clock(seen['at_s'])} UTC", style="bold")
    return stacked(
        head, Text(), pool_rows(seen["pools"]), Text(), loan_rows(seen["loans"]), Text(), job_rows(seen["jobs"])
    )
