"""`ebbtide problems`: the problems of the service and its fleet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

from cli.connection import DEFAULT_URL, UrlOption, service_client
from cli.exit_codes import ExitCode
from cli.output import OutputFormat, OutputOption, format_count, format_duration, print_document, stack

if TYPE_CHECKING:
    from rich.console import RenderableType

ALIKE_LISTED_MAX = 5
"""Problems of one code that the table lists. JSON and YAML have all that the service returned."""


def problems(url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE) -> None:
    """List what is wrong with the service and its fleet, and what helps. Exits with 1 if a problem is critical."""
    with service_client(url) as client:
        found = client.problems()
    print_document(found, output, lambda: render_problems(found))
    if found["severities"]["critical"]:
        raise typer.Exit(ExitCode.FAILED)


def render_problems(found: Mapping[str, Any]) -> RenderableType:
    """Return each problem with its cause and what helps, the most severe first."""
    from rich.text import Text

    if not found["items"]:
        return Text("There are no problems.")
    counts = found["severities"]
    nouns = {"critical": "critical problem", "warning": "warning", "notice": "notice"}
    head = ", ".join(format_count(counts[severity], noun) for severity, noun in nouns.items() if counts[severity])
    return stack(Text(head, style="bold"), *_render_groups(found))


def _render_groups(found: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Yield the problems by severity and code."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for item in found["items"]:
        groups.setdefault((item["severity"], item["code"]), []).append(item)
    for items in groups.values():
        yield from _render_alike(items, found)


def _render_alike(items: Sequence[Mapping[str, Any]], found: Mapping[str, Any]) -> Iterator[RenderableType]:
    from rich.padding import Padding
    from rich.text import Text

    for item in items[:ALIKE_LISTED_MAX]:
        age = "" if item["since_s"] is None else f", since {format_duration(found['as_of_s'] - item['since_s'])}"
        helps = f"{item['advice']} Run `{item['command']}`." if item["command"] else item["advice"]
        yield Text(f"\n{item['severity']}  {item['code']}{age}")
        yield Padding(Text(item["cause"]), (0, 0, 0, 2))
        yield Padding(Text(helps, style="dim"), (0, 0, 0, 2))
    if (more := len(items) - ALIKE_LISTED_MAX) > 0:
        yield Text(f"\n  and {format_count(more, 'more problem')} of code {items[0]['code']}")
