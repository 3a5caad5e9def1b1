"""What a command prints: one JSON or YAML document, or a table. Only this reaches stdout; all else goes to stderr."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scheduler.documents.plain import plain

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

WIDTH_WITHOUT_TERMINAL = 100


class Format(StrEnum):
    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


OutputOption = Annotated[Format, typer.Option("-o", "--output", help="How to print the answer.", show_default=True)]


def emit(document: Any, output: Format, table: Callable[[], RenderableType]) -> None:
    """Print `document` in the form that was asked for; `table` draws it for people."""
    if output is Format.JSON:
        typer.echo(json.dumps(plain(document), indent=2, allow_nan=False, ensure_ascii=False))
    elif output is Format.YAML:
        import yaml

        typer.echo(yaml.safe_dump(plain(document), sort_keys=False, allow_unicode=True), nl=False)
    else:
        console().print(table())


def say(message: str) -> None:
    """A remark for people; never part of the answer."""
    typer.echo(message, err=True)


def console(*, stderr: bool = False) -> Console:
    """A console as wide as the terminal, or of a fixed width into files and pipes."""
    from rich.console import Console

    made = Console(stderr=stderr, highlight=False, soft_wrap=False)
    return made if made.is_terminal else Console(stderr=stderr, highlight=False, width=WIDTH_WITHOUT_TERMINAL)


def columns(
    rows: Iterable[Sequence[str]], *, heads: Sequence[str], right: Sequence[str] = (), empty: str = "nothing"
) -> RenderableType:
    """A plain table; the first column stays whole, those named in `right` hold numbers.

    Without rows it is the sentence `empty`.
    """
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for at, head in enumerate(heads):
        drawn.add_column(head, justify="right" if head in right else "left", overflow="fold", no_wrap=at == 0)
    for row in rows:
        drawn.add_row(*(escape(cell) for cell in row))
    return drawn if drawn.row_count else Text(empty)


def facts(pairs: Mapping[str, str]) -> RenderableType:
    """One fact a line, names to the left."""
    from rich.markup import escape
    from rich.table import Table

    drawn = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    drawn.add_column(style="bold", no_wrap=True)
    drawn.add_column(overflow="fold")
    for name, value in pairs.items():
        drawn.add_row(name, escape(value))
    return drawn


def stacked(*parts: RenderableType) -> RenderableType:
    from rich.console import Group

    return Group(*parts)
