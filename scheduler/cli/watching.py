"""What stays until Ctrl-C: a table that is drawn again and again, lines that come as they come."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from scheduler.cli.failure import refuse
from scheduler.cli.output import Format, console, say
from scheduler.documents.plain import plain

if TYPE_CHECKING:
    from rich.console import RenderableType

T = TypeVar("T")
PATIENCE_S = 60.0
ASK_AGAIN_S = 1.0

WatchOption = Annotated[bool, typer.Option("-w", "--watch", help="Stay and refresh until Ctrl-C.")]
EveryOption = Annotated[float, typer.Option("--every", min=0.2, help="Seconds between two refreshes.")]
FollowOption = Annotated[bool, typer.Option("-f", "--follow", help="Go on with what comes, until Ctrl-C.")]


def patiently(look: Callable[[], T]) -> T:
    """What `look` gives; asked for again where the service is away, or busy, which is no end of what is waited for.
    Raises what it raises once that has lasted for PATIENCE_S."""
    from api.client import ProblemError, UnreachableError
    from api.connection import TRY_LATER

    give_up_at_s, told = time.monotonic() + PATIENCE_S, False
    while True:
        try:
            return look()
        except (ProblemError, UnreachableError) as away:
            is_lasting = isinstance(away, ProblemError) and away.status not in TRY_LATER
            if is_lasting or time.monotonic() >= give_up_at_s:
                raise
            if not told:
                say(f"{away}; asking again")
            told = True
        time.sleep(ASK_AGAIN_S)


def require_table(output: Format, watch: bool) -> None:
    if watch and output is not Format.TABLE:
        refuse(f"--watch: refreshes a table on the screen; it does not go with -o {output.value}")


def refresh(draw: Callable[[], RenderableType], every_s: float) -> None:
    """In place on a terminal; into a file or a pipe, one after the other."""
    from rich.live import Live

    screen = console()
    with suppress(KeyboardInterrupt):
        if not screen.is_terminal:
            while True:
                screen.print(draw())
                time.sleep(every_s)
        with Live(draw(), console=screen, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(every_s)
                live.update(draw(), refresh=True)


def pour(items: Iterable[Mapping[str, Any]], output: Format, line_of: Callable[[Mapping[str, Any]], str]) -> None:
    """One line an item: for people, or a JSON object each."""
    if output is Format.YAML:
        refuse("--follow: prints a line for each item; it goes with -o table or -o json, got yaml")
    with suppress(KeyboardInterrupt):
        for item in items:
            typer.echo(json.dumps(plain(item), ensure_ascii=False) if output is Format.JSON else line_of(item))
