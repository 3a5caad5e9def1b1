"""Completion in the shell: its script, and the names of the service's jobs, nodes, pools and queues as they are typed.

Nobody waits for a shell: what does not answer within a second offers nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import StrEnum
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import TyperException
from typer._completion_classes import completion_init
from typer._completion_shared import get_completion_script

from scheduler.cli.contexts import target_of
from scheduler.cli.service import DEFAULT_URL

if TYPE_CHECKING:
    from api.client import Client

PATIENCE_S = 1.0
OFFERED_MAX = 200


class Shell(StrEnum):
    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


ShellArgument = Annotated[Shell, typer.Argument(metavar="SHELL", help="bash, zsh or fish.")]


def completion(shell: ShellArgument) -> None:
    """Print the script that lets TAB complete verbs, options and names; bash: `source <(ebbtide completion bash)`."""
    typer.echo(get_completion_script(prog_name="ebbtide", complete_var="_EBBTIDE_COMPLETE", shell=shell.value))


def enable() -> None:
    """Let the program answer the shells that run such a script."""
    completion_init()


def job_ids(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Newest first, each with its state."""

    def offered(client: Client) -> Iterator[tuple[str, str]]:
        return ((job["id"], job["state"]) for job in client.jobs(limit=OFFERED_MAX))

    return _asked(context, incomplete, offered)


def node_names(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    return _asked(context, incomplete, lambda client: ((node["name"], node["pool"]) for node in client.nodes()))


def pool_names(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    return _asked(context, incomplete, lambda client: ((pool["name"], pool["kind"]) for pool in client.pools()))


def queue_names(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    return _asked(
        context, incomplete, lambda client: ((queue["name"], f"{queue['used_gpus']} GPUs") for queue in client.queues())
    )


def _asked(
    context: typer.Context, incomplete: str, offered: Callable[[Client], Iterator[tuple[Any, Any]]]
) -> list[tuple[str, str]]:
    from api.client import Client, ProblemError, Retries, UnreachableError

    try:
        target = target_of(context.params.get("url") or DEFAULT_URL)
        with Client(target.url, token=target.token, timeout_s=PATIENCE_S, retries=Retries(attempts=1)) as client:
            found = list(islice(offered(client), OFFERED_MAX))
    except (ProblemError, UnreachableError, ValueError, TyperException):
        return []
    return [(str(name), str(said)) for name, said in found if str(name).startswith(incomplete)]
