"""`ebbtide problems`: the problems of the service and its fleet."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.connection import DEFAULT_URL, UrlOption, service_client
from cli.exit_codes import ExitCode
from cli.inputs import input_errors_from
from cli.output import (
    OutputFormat,
    OutputOption,
    format_count,
    format_duration,
    format_time,
    print_document,
    stack,
)
from scheduler.documents.units import parse_duration_s

if TYPE_CHECKING:
    from rich.console import RenderableType

ALIKE_LISTED_MAX = 5
"""Problems of one code that the table lists. JSON and YAML have all that the service returned."""


SinceOption = Annotated[
    str,
    typer.Option("--since", metavar="DURATION", help="Also list problems that ended in the last 24h, or another time."),
]


def problems(
    since: SinceOption = "", *, url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE
) -> None:
    """List what is wrong with the service and its fleet, and what helps. Exits with 1 if a problem is critical."""
    resolved_since_s = None
    if since:
        with input_errors_from("--since"):
            resolved_since_s = max(0.0, time.time() - parse_duration_s(since))
    with service_client(url) as client:
        found = client.problems(resolved_since_s=resolved_since_s)
    print_document(found, output, lambda: render_problems(found, with_resolved=bool(since)))
    if found["severities"]["critical"]:
        raise typer.Exit(ExitCode.FAILED)


def render_problems(found: Mapping[str, Any], *, with_resolved: bool = False) -> RenderableType:
    """Return each problem with its cause and what helps, the most severe first, and perhaps those that have ended."""
    from rich.text import Text

    resolved = _render_resolved(found["resolved"]) if with_resolved else ()
    if not found["items"]:
        return stack(Text("There are no problems."), *resolved)
    counts = found["severities"]
    nouns = {"critical": "critical problem", "warning": "warning", "notice": "notice"}
    head = ", ".join(format_count(counts[severity], noun) for severity, noun in nouns.items() if counts[severity])
    return stack(Text(head, style="bold"), *_render_groups(found), *resolved)


def _render_resolved(resolved: Sequence[Mapping[str, Any]]) -> Iterator[RenderableType]:
    """Yield the problems that have ended, the latest end first."""
    from rich.padding import Padding
    from rich.text import Text

    head = f"{format_count(len(resolved), 'resolved problem')}" if resolved else "No problem ended in this time."
    yield Text(f"\n{head}", style="bold")
    for item in resolved:
        times = f", {item['times']} times" if item["times"] > 1 else ""
        lasted = f"{format_time(item['begin_s'])} to {format_time(item['end_s'])}"
        yield Text(f"\n{item['severity']}  {item['code']}, {format_duration(item['duration_s'])}{times}, {lasted}")
        yield Padding(Text(item["cause"]), (0, 0, 0, 2))
        yield Padding(Text(item["ending"], style="dim"), (0, 0, 0, 2))


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
