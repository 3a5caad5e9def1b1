"""Talking to a running service: its URL, and what a refusal means for the exit code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from scheduler.cli.failure import BadInput, Failed, blaming

if TYPE_CHECKING:
    from api.client import Client, ProblemError

DEFAULT_URL = "http://127.0.0.1:8787"

UrlOption = Annotated[
    str, typer.Option("--url", envvar="EBBTIDE_URL", help="The service to talk to.", rich_help_panel="Service")
]

# A service answers these to a request that was wrong in itself, not to one that only could not be met.
BAD_INPUT_STATUSES = frozenset({400, 409, 413, 415, 422})


@contextmanager
def service(url: str) -> Iterator[Client]:
    """A client of the service at `url`; what it refuses becomes BadInput (exit 2) or Failed (exit 1)."""
    from api.client import Client, ProblemError, UnreachableError

    with blaming("--url"):
        client = Client(url)
    try:
        with client:
            yield client
    except ProblemError as problem:
        kind = BadInput if problem.status in BAD_INPUT_STATUSES else Failed
        raise kind(sentence(problem)) from problem
    except UnreachableError as silent:
        raise Failed(f"{silent} (start a service with `ebbtide serve`, or name another with --url)") from silent


def sentence(problem: ProblemError) -> str:
    """A problem as one line: what was refused, and what is wrong with each field unless that was said already."""
    said = problem.detail or problem.title or f"HTTP {problem.status}"
    return "; ".join([said, *(error.message for error in problem.errors if error.message not in said)])
