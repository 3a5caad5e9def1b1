"""Queues of a service: who pays, and for how many GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.commands.fleet import has_no_subcommand
from cli.completion import complete_queue_names
from cli.connection import DEFAULT_URL, UrlOption, service_client
from cli.inputs import parse_count, raise_input_error
from cli.output import OutputFormat, OutputOption, print_document, render_facts, render_table

if TYPE_CHECKING:
    from rich.console import RenderableType


app = typer.Typer(name="queues", help="List, create, set or delete queues: guaranteed GPUs, limits, weight.")

QueueArgument = Annotated[
    str, typer.Argument(metavar="QUEUE", autocompletion=complete_queue_names, help="Name of a queue, as jobs give it.")
]
GuaranteedOption = Annotated[int | None, typer.Option("--guaranteed", help="GPUs that are its own; others borrow.")]
LimitOption = Annotated[str | None, typer.Option("--limit", help="Most GPUs that its jobs use together, or none.")]
UserLimitOption = Annotated[
    str | None, typer.Option("--user-limit", help="Most GPUs that the jobs of one user hold together in it, or none.")
]
UserJobsOption = Annotated[
    str | None, typer.Option("--user-jobs", help="Most waiting jobs of one user that it takes, or none.")
]
WeightOption = Annotated[float | None, typer.Option("--weight", help="Its share of what queues borrow.")]


@app.callback(invoke_without_command=True)
def queues(context: typer.Context, url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE) -> None:
    if has_no_subcommand(context):
        list_queues(url, output)


@app.command("list")
def list_queues(url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE) -> None:
    """List the queues: guarantee, limit, what they use, borrow and wait for."""
    with service_client(url) as client:
        found = client.queues()
    print_document(found, output, lambda: render_queues(found))


@app.command("create")
def create_queue(
    name: QueueArgument,
    guaranteed: GuaranteedOption = None,
    limit: LimitOption = None,
    weight: WeightOption = None,
    *,
    user_limit: UserLimitOption = None,
    user_jobs: UserJobsOption = None,
    url: UrlOption = DEFAULT_URL,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Declare a queue. A queue that is not declared has no guarantee and no limit."""
    with service_client(url) as client:
        answer = client.create_queue({"name": name, **_collect_quota(guaranteed, limit, user_limit, weight, user_jobs)})
    print_document(answer, output, lambda: render_facts({"queue": f"{name} is created: {_format_quota(answer)}"}))


@app.command("set")
def set_queue(
    name: QueueArgument,
    guaranteed: GuaranteedOption = None,
    limit: LimitOption = None,
    weight: WeightOption = None,
    *,
    user_limit: UserLimitOption = None,
    user_jobs: UserJobsOption = None,
    url: UrlOption = DEFAULT_URL,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Change what is given of a declared queue."""
    change = _collect_quota(guaranteed, limit, user_limit, weight, user_jobs)
    if not change:
        raise_input_error("nothing to set: give --guaranteed, --limit, --user-limit, --user-jobs or --weight")
    with service_client(url) as client:
        answer = client.change_queue(name, change)
    print_document(answer, output, lambda: render_facts({"queue": f"{name} is set: {_format_quota(answer)}"}))


@app.command("delete")
def delete_queue(name: QueueArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE) -> None:
    """Take a queue's declaration back; its jobs stay, without guarantee and without limit."""
    with service_client(url) as client:
        answer = client.delete_queue(name)
    print_document(answer, output, lambda: render_facts({"queue": f"{name} is deleted"}))


def render_queues(found: Iterable[Mapping[str, Any]]) -> RenderableType:
    return render_table(
        (
            [
                queue["name"],
                str(queue["guaranteed_gpus"]),
                _format_limit(queue["limit_gpus"]),
                _format_limit(queue["user_limit_gpus"]),
                f"{queue['weight']:g}",
                str(queue["used_gpus"]),
                str(queue["borrowed_gpus"]),
                str(queue["running_jobs"]),
                f"{queue['waiting_jobs']} for {queue['waiting_gpus']} GPUs" if queue["waiting_jobs"] else "nobody",
                "" if queue["declared"] else "not declared",
            ]
            for queue in found
        ),
        headers=["queue", "guaranteed", "limit", "per user", "weight", "uses", "borrowed", "jobs", "waiting", ""],
        right_aligned=["guaranteed", "limit", "per user", "weight", "uses", "borrowed", "jobs"],
        empty="There are no queues.",
    )


def _collect_quota(
    guaranteed: int | None, limit: str | None, user_limit: str | None, weight: float | None, user_jobs: str | None
) -> dict[str, Any]:
    """The fields that were given; the service checks the rest."""
    given: dict[str, Any] = {}
    if guaranteed is not None:
        given["guaranteed_gpus"] = guaranteed
    for field, option, text in (
        ("limit_gpus", "--limit", limit),
        ("user_limit_gpus", "--user-limit", user_limit),
        ("user_jobs_max", "--user-jobs", user_jobs),
    ):
        if text is not None:
            given[field] = None if text == "none" else parse_count(option, text, minimum=0)
    if weight is not None:
        given["weight"] = weight
    return given


def _format_quota(queue: Mapping[str, Any]) -> str:
    limits = f"limit {_format_limit(queue['limit_gpus'])}, for one user {_format_limit(queue['user_limit_gpus'])}"
    return f"{queue['guaranteed_gpus']} GPUs guaranteed, {limits}, weight {queue['weight']:g}"


def _format_limit(limit_gpus: int | None) -> str:
    return "none" if limit_gpus is None else str(limit_gpus)
