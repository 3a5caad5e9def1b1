"""Shell completion: the script for each shell, and completion of job, machine, node, pool and queue names.

A service that does not answer within COMPLETION_TIMEOUT_S offers no names, so that the shell never blocks for longer.
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

from cli.connection import DEFAULT_URL, resolve_target

if TYPE_CHECKING:
    from ebbtide.client import Client


COMPLETION_TIMEOUT_S = 1.0
SUGGESTIONS_MAX = 200


class Shell(StrEnum):
    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


ShellArgument = Annotated[Shell, typer.Argument(metavar="SHELL", help="bash, zsh or fish.")]


def completion(shell: ShellArgument) -> None:
    """Print a shell completion script. For bash, run `source <(ebbtide completion bash)`."""
    typer.echo(get_completion_script(prog_name="ebbtide", complete_var="_EBBTIDE_COMPLETE", shell=shell.value))


def enable_completion() -> None:
    """Answer completion requests of a shell that has sourced the script."""
    completion_init()


def complete_job_ids(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Return job IDs, newest first, each with the job's state."""
    return _fetch_suggestions(
        context,
        incomplete,
        lambda client: ((job["id"], job["state"]) for job in client.jobs(limit=SUGGESTIONS_MAX)),
    )


def complete_node_names(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    return _fetch_suggestions(
        context, incomplete, lambda client: ((node["name"], node["pool"]) for node in client.nodes())
    )


def complete_machine_names(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    return _fetch_suggestions(
        context, incomplete, lambda client: ((machine["name"], machine["pool"]) for machine in client.machines())
    )


def complete_pool_names(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    return _fetch_suggestions(
        context, incomplete, lambda client: ((pool["name"], pool["kind"]) for pool in client.pools())
    )


def complete_gpu_names(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    return _fetch_suggestions(
        context, incomplete, lambda client: ((gpu["name"], gpu["source"]) for gpu in client.gpu_profiles())
    )


def complete_queue_names(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    return _fetch_suggestions(
        context, incomplete, lambda client: ((queue["name"], f"{queue['used_gpus']} GPUs") for queue in client.queues())
    )


def _fetch_suggestions(
    context: typer.Context, incomplete: str, list_candidates: Callable[[Client], Iterator[tuple[Any, Any]]]
) -> list[tuple[str, str]]:
    from ebbtide.client import Client, ProblemError, RetryPolicy, UnreachableError

    try:
        target = resolve_target(context.params.get("url") or DEFAULT_URL)
        with Client(
            target.url, token=target.token, timeout_s=COMPLETION_TIMEOUT_S, retries=RetryPolicy(attempts=1)
        ) as client:
            candidates = list(islice(list_candidates(client), SUGGESTIONS_MAX))
    except (ProblemError, UnreachableError, ValueError, TyperException):
        return []
    return [(str(name), str(note)) for name, note in candidates if str(name).startswith(incomplete)]
