"""Talking to a running service: its URL, and what a refusal means for the exit code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from scheduler.cli.contexts import Target, target_of
from scheduler.cli.failure import BadInput, Failed, blaming

if TYPE_CHECKING:
    from api.client import Client, ProblemError

DEFAULT_URL = ""
"""The context in use says; without one, a service on this machine."""

UrlOption = Annotated[
    str,
    typer.Option(
        "--url",
        envvar="EBBTIDE_URL",
        help="The service to talk to; without it, that of the context in use, else one on this machine.",
        rich_help_panel="Service",
        show_default=False,
    ),
]

# A service answers these to a request that was wrong in itself, not to one that only could not be met.
BAD_INPUT_STATUSES = frozenset({400, 409, 413, 415, 422})


_REMEDIES = {
    401: " (log in with `ebbtide login`, or set EBBTIDE_TOKEN)",
    403: " (`ebbtide whoami` shows what you may do; an admin grants more)",
}


@contextmanager
def service(url: str) -> Iterator[Client]:
    """A client of the service at `url`, or of the context in use, with its token; what the service refuses becomes
    BadInput (exit 2) or Failed (exit 1)."""
    with connected(target_of(url)) as client:
        yield client


@contextmanager
def connected(target: Target) -> Iterator[Client]:
    from api.client import Client, ProblemError, UnreachableError

    with blaming("--url"):
        client = Client(target.url, token=target.token)
    try:
        with client:
            yield client
    except ProblemError as problem:
        kind = BadInput if problem.status in BAD_INPUT_STATUSES else Failed
        raise kind(sentence(problem) + _REMEDIES.get(problem.status, "")) from problem
    except UnreachableError as silent:
        raise Failed(f"{silent} (start a service with `ebbtide serve`, or name another with --url)") from silent


def sentence(problem: ProblemError) -> str:
    """A problem as one line: what was refused, and what is wrong with each field unless that was said already."""
    said = problem.detail or problem.title or f"HTTP {problem.status}"
    return "; ".join([said, *(error.message for error in problem.errors if error.message not in said)])
