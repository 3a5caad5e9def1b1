"""Output of commands: formatted numbers, JSON and YAML documents, tables, refreshing tables and streams of lines.

The result of a command goes to stdout. Everything else goes to stderr.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from cli.inputs import raise_input_error
from scheduler.documents.plain_json import to_plain_json

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


MINUTE_S = 60
HOUR_S = 3_600
DAY_S = 86_400


def format_duration(seconds: float | None) -> str:
    """Format a duration with at most two units: `34 ms`, `12.5 s`, `4m05s`, `2h13m`, `3d04h`."""
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
    """Format a Unix time as date and time of day in UTC."""
    if at_s is None:
        return "-"
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%S")


def format_bytes(size_bytes: float) -> str:
    """Format a size in decimal units: `61.3 GB`."""
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
    """Format a ratio: 0.5 becomes `50.0%`."""
    return "-" if ratio is None else f"{100 * ratio:.1f}%"


def format_number(value: float | None, digits_max: int = 3) -> str:
    """Format a number with at most `digits_max` decimals, thousands separators and no exponent."""
    if value is None:
        return "-"
    return f"{value:,.{digits_max}f}".rstrip("0").rstrip(".") if digits_max and value % 1 else f"{value:,.0f}"


DEFAULT_WIDTH = 100


class OutputFormat(StrEnum):
    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


OutputOption = Annotated[
    OutputFormat,
    typer.Option(
        "-o", "--output", help="Print a table for people, or a JSON or YAML document for scripts.", show_default=True
    ),
]


def print_document(document: Any, output_format: OutputFormat, render: Callable[[], RenderableType]) -> None:
    """Print `document` as JSON or YAML, or call `render` and print the table it returns."""
    if output_format is OutputFormat.JSON:
        typer.echo(json.dumps(to_plain_json(document), indent=2, allow_nan=False, ensure_ascii=False))
    elif output_format is OutputFormat.YAML:
        import yaml

        typer.echo(yaml.safe_dump(to_plain_json(document), sort_keys=False, allow_unicode=True), nl=False)
    else:
        make_console().print(render())


def print_message(message: str) -> None:
    """Print a message on stderr."""
    typer.echo(message, err=True)


def make_console(*, stderr: bool = False) -> Console:
    """Return a console as wide as the terminal, or DEFAULT_WIDTH columns wide for a file or a pipe."""
    from rich.console import Console

    console = Console(stderr=stderr, highlight=False, soft_wrap=False)
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, width=DEFAULT_WIDTH)


def render_table(
    rows: Iterable[Sequence[str]], *, headers: Sequence[str], right_aligned: Sequence[str] = (), empty: str = "nothing"
) -> RenderableType:
    """Return a table without borders, or the sentence `empty` if there are no rows. The first column never wraps."""
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for index, header in enumerate(headers):
        justify: Literal["left", "right"] = "right" if header in right_aligned else "left"
        table.add_column(header, justify=justify, overflow="fold", no_wrap=index == 0)
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    return table if table.row_count else Text(empty)


def render_facts(facts: Mapping[str, str]) -> RenderableType:
    """Return a two-column table: names on the left, values on the right."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(name, escape(value))
    return table


def stack(*parts: RenderableType) -> RenderableType:
    """Return the parts below one another."""
    from rich.console import Group

    return Group(*parts)


T = TypeVar("T")
RETRY_TIMEOUT_S = 60.0
RETRY_INTERVAL_S = 1.0

WatchOption = Annotated[bool, typer.Option("-w", "--watch", help="Refresh until Ctrl-C.")]
IntervalOption = Annotated[float, typer.Option("--every", min=0.2, help="Seconds between refreshes.")]
FollowOption = Annotated[bool, typer.Option("-f", "--follow", help="Keep printing new lines until Ctrl-C.")]


def retry_while_unavailable(request: Callable[[], T]) -> T:
    """Return `request()`. Retry it for up to RETRY_TIMEOUT_S seconds while the service is unreachable or busy.

    Raises:
        ProblemError, UnreachableError: the last error, after the timeout or if a retry cannot help.
    """
    from ebbtide.client import ProblemError, UnreachableError
    from ebbtide.client.connection import RETRYABLE_STATUSES

    deadline_s, announced = time.monotonic() + RETRY_TIMEOUT_S, False
    while True:
        try:
            return request()
        except (ProblemError, UnreachableError) as error:
            is_permanent = isinstance(error, ProblemError) and error.status not in RETRYABLE_STATUSES
            if is_permanent or time.monotonic() >= deadline_s:
                raise
            if not announced:
                print_message(f"{error}; retrying for up to {RETRY_TIMEOUT_S:g} s")
            announced = True
        time.sleep(RETRY_INTERVAL_S)


def require_table(output: OutputFormat, watch: bool) -> None:
    if watch and output is not OutputFormat.TABLE:
        raise_input_error(f"--watch cannot be combined with -o {output.value}. Use -o table.")


def refresh_view(render: Callable[[], RenderableType], every_s: float) -> None:
    """Render again every `every_s` seconds until Ctrl-C: in place on a terminal, one after the other in a pipe."""
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
    """Print one line per item as it arrives: text, or one JSON object per line."""
    if output is OutputFormat.YAML:
        raise_input_error("--follow cannot be combined with -o yaml. Use -o table or -o json.")
    with suppress(KeyboardInterrupt):
        for item in items:
            typer.echo(
                json.dumps(to_plain_json(item), ensure_ascii=False)
                if output is OutputFormat.JSON
                else format_line(item)
            )
