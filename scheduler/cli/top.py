"""`top`: the whole cluster on one screen."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scheduler.cli.failure import refuse
from scheduler.cli.fleet_view import pool_rows
from scheduler.cli.humanise import clock
from scheduler.cli.job_view import ENDED, job_rows
from scheduler.cli.lending import loan_rows
from scheduler.cli.output import Format, OutputOption, console, emit, stacked
from scheduler.cli.service import DEFAULT_URL, UrlOption, service

if TYPE_CHECKING:
    from rich.console import RenderableType

    from api.client import Client

WatchOption = Annotated[bool, typer.Option("-w", "--watch", help="Stay and refresh until Ctrl-C.")]
EveryOption = Annotated[float, typer.Option("--every", min=0.2, help="Seconds between two refreshes.")]


def top(
    watch: WatchOption = False,
    every: EveryOption = 2.0,
    url: UrlOption = DEFAULT_URL,
    output: OutputOption = Format.TABLE,
) -> None:
    """Show pools, loans and live jobs at once."""
    if watch and output is not Format.TABLE:
        refuse(f"--watch: refreshes a table on the screen; it does not go with -o {output.value}")
    with service(url) as client:
        if not watch:
            seen = _look(client)
            emit(seen, output, lambda: _screen(seen))
            return
        _watch(client, every)


def _watch(client: Client, every_s: float) -> None:
    from rich.live import Live

    screen = console()
    with (
        suppress(KeyboardInterrupt),
        Live(_screen(_look(client)), console=screen, screen=screen.is_terminal, auto_refresh=False) as live,
    ):
        while True:
            time.sleep(every_s)
            live.update(_screen(_look(client)), refresh=True)


def _look(client: Client) -> dict[str, Any]:
    return {
        "at_s": time.time(),
        "pools": client.pools(),
        "loans": [loan for loan in client.loans() if loan["is_live"]],
        "jobs": [job for job in client.jobs() if job["state"] not in ENDED],
    }


def _screen(seen: dict[str, Any]) -> RenderableType:
    from rich.text import Text

    head = Text(f"Ebbtide at {clock(seen['at_s'])} UTC", style="bold")
    return stacked(
        head, Text(), pool_rows(seen["pools"]), Text(), loan_rows(seen["loans"]), Text(), job_rows(seen["jobs"])
    )
