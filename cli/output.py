"""Numbers as people say them.

What a command prints: one JSON or YAML document, or a table. Only this reaches stdout; all else goes to stderr.

What stays until Ctrl-C: a table that is drawn again and again, lines that come as they come.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from cli.inputs import raise_input_error
from scheduler.documents.plain_json import to_plain_json

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


MINUTE_S = 60
HOUR_S = 3_600
DAY_S = 86_400


def format_duration(seconds: float | None) -> str:
    """A length of time, two units at most: `34 ms`, `12.5 s`, `4m05s`, `2h13m`, `3d04h`."""
    if seconds is None or seconds != seconds or seconds == float("inf"):
        return "-"
    if seconds < 0:
        return f"-{format_duration(-seconds)}"
    if 0 < seconds < 0.9995:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 10:
        return f"{seconds:.3g} s"
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < HOUR_S:
        return f"{whole // MINUTE_S}m{whole % MINUTE_S:02d}s"
    if whole < DAY_S:
        return f"{whole // HOUR_S}h{whole % HOUR_S // MINUTE_S:02d}m"
    return f"{whole // DAY_S}d{whole % DAY_S // HOUR_S:02d}h"


def format_time(at_s: float | None) -> str:
    """A time of day with its date, UTC."""
    if at_s is None:
        return "-"
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%S")


def format_bytes(size_bytes: float) -> str:
    """Bytes in decimal units: `61.3 GB`."""
    value = float(size_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def format_gpus(count: float) -> str:
    """`1 GPU`, `4 GPUs`, `2.5 GPUs`."""
    return format_count(count, "GPU")


def format_count(count: float, noun: str) -> str:
    """`1 resize`, `2 resizes`."""
    shown = format_number(count)
    return f"{shown} {noun}" if shown == "1" else f"{shown} {noun}s"


def format_percent(ratio: float | None) -> str:
    """A ratio as per cent."""
    return "-" if ratio is None else f"{100 * ratio:.1f}%"


def format_number(value: float | None, digits_max: int = 3) -> str:
    """A figure with at most `digits` significant digits after the point and no exponent."""
    if value is None:
        return "-"
    return f"{value:,.{digits_max}f}".rstrip("0").rstrip(".") if digits_max and value % 1 else f"{value:,.0f}"


DEFAULT_WIDTH = 100


class OutputFormat(StrEnum):
    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


OutputOption = Annotated[
    OutputFormat, typer.Option("-o", "--output", help="How to print the answer.", show_default=True)
]


def print_document(document: Any, output_format: OutputFormat, render: Callable[[], RenderableType]) -> None:
    """Print `document` in the form that was asked for; `table` draws it for people."""
    if output_format is OutputFormat.JSON:
        typer.echo(json.dumps(to_plain_json(document), indent=2, allow_nan=False, ensure_ascii=False))
    elif output_format is OutputFormat.YAML:
        import yaml

        typer.echo(yaml.safe_dump(to_plain_json(document), sort_keys=False, allow_unicode=True), nl=False)
    else:
        make_console().print(render())


def print_message(message: str) -> None:
    """A remark for people; never part of the answer."""
    typer.echo(message, err=True)


def make_console(*, stderr: bool = False) -> Console:
    """A console as wide as the terminal, or of a fixed width into files and pipes."""
    from rich.console import Console

    made = Console(stderr=stderr, highlight=False, soft_wrap=False)
    return made if made.is_terminal else Console(stderr=stderr, highlight=False, width=DEFAULT_WIDTH)


def render_table(
    rows: Iterable[Sequence[str]], *, headers: Sequence[str], right_aligned: Sequence[str] = (), empty: str = "nothing"
) -> RenderableType:
    """A plain table; the first column stays whole, those named in `right` hold numbers.

    Without rows it is the sentence `empty`.
    """
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for at, head in enumerate(headers):
        drawn.add_column(head, justify="right" if head in right_aligned else "left", overflow="fold", no_wrap=at == 0)
    for row in rows:
        drawn.add_row(*(escape(cell) for cell in row))
    return drawn if drawn.row_count else Text(empty)


def render_facts(facts: Mapping[str, str]) -> RenderableType:
    """One fact a line, names to the left."""
    from rich.markup import escape
    from rich.table import Table

    drawn = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    drawn.add_column(style="bold", no_wrap=True)
    drawn.add_column(overflow="fold")
    for name, value in facts.items():
        drawn.add_row(name, escape(value))
    return drawn


def stack(*parts: RenderableType) -> RenderableType:
    from rich.console import Group

    return Group(*parts)


T = TypeVar("T")
RETRY_TIMEOUT_S = 60.0
RETRY_INTERVAL_S = 1.0

WatchOption = Annotated[bool, typer.Option("-w", "--watch", help="Stay and refresh until Ctrl-C.")]
IntervalOption = Annotated[float, typer.Option("--every", min=0.2, help="Seconds between two refreshes.")]
FollowOption = Annotated[bool, typer.Option("-f", "--follow", help="Go on with what comes, until Ctrl-C.")]


def retry_while_unavailable(request: Callable[[], T]) -> T:
    """What `look` gives; asked for again where the service is away, or busy, which is no end of what is waited for.
    Raises what it raises once that has lasted for PATIENCE_S."""
    from api.client import ProblemError, UnreachableError
    from api.client.connection import RETRYABLE_STATUSES

    give_up_at_s, told = time.monotonic() + RETRY_TIMEOUT_S, False
    while True:
        try:
            return request()
        except (ProblemError, UnreachableError) as away:
            is_lasting = isinstance(away, ProblemError) and away.status not in RETRYABLE_STATUSES
            if is_lasting or time.monotonic() >= give_up_at_s:
                raise
            if not told:
                print_message(f"{away}; asking again")
            told = True
        time.sleep(RETRY_INTERVAL_S)


def require_table(output: OutputFormat, watch: bool) -> None:
    if watch and output is not OutputFormat.TABLE:
        raise_input_error(f"--watch: refreshes a table on the screen; it does not go with -o {output.value}")


def refresh_view(render: Callable[[], RenderableType], every_s: float) -> None:
    """In place on a terminal; into a file or a pipe, one after the other."""
    from rich.live import Live

    screen = make_console()
    with suppress(KeyboardInterrupt):
        if not screen.is_terminal:
            while True:
                screen.print(render())
                time.sleep(every_s)
        with Live(render(), console=screen, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(every_s)
                live.update(render(), refresh=True)


def print_stream(
    items: Iterable[Mapping[str, Any]], output: OutputFormat, format_line: Callable[[Mapping[str, Any]], str]
) -> None:
    """One line an item: for people, or a JSON object each."""
    if output is OutputFormat.YAML:
        raise_input_error("--follow: prints a line for each item; it goes with -o table or -o json, got yaml")
    with suppress(KeyboardInterrupt):
        for item in items:
            typer.echo(
                json.dumps(to_plain_json(item), ensure_ascii=False)
                if output is OutputFormat.JSON
                else format_line(item)
            )
