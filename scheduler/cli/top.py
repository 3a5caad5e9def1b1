"""`top`: the whole cluster on one screen."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from scheduler.cli.fleet_view import pool_rows
from scheduler.cli.humanise import clock
from scheduler.cli.job_view import ENDED, job_rows
from scheduler.cli.lending import loan_rows
from scheduler.cli.output import Format, OutputOption, emit, stacked
from scheduler.cli.service import DEFAULT_URL, UrlOption, service
from scheduler.cli.watching import EveryOption, WatchOption, refresh, require_table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from api.client import Client


def top(
    watch: WatchOption = False,
    every: EveryOption = 2.0,
    url: UrlOption = DEFAULT_URL,
    output: OutputOption = Format.TABLE,
) -> None:
    """Show pools, loans and live jobs at once."""
    require_table(output, watch)
    with service(url) as client:
        if not watch:
            seen = _look(client)
            emit(seen, output, lambda: _screen(seen))
            return
        refresh(lambda: _screen(_look(client)), every)


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
