"""`ebbtide queues`: lists and changes queues and their quotas."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.completion import complete_queue_names
from cli.connection import DEFAULT_URL, UrlOption, service_client
from cli.inputs import has_no_subcommand, parse_count, raise_input_error
from cli.output import OutputFormat, OutputOption, print_document, render_facts, render_table

if TYPE_CHECKING:
    from rich.console import RenderableType


app = typer.Typer(name="queues", help="List, create, change or delete queues.")

QueueArgument = Annotated[
    str, typer.Argument(metavar="QUEUE", autocompletion=complete_queue_names, help="Name of the queue.")
]
GuaranteedOption = Annotated[
    int | None, typer.Option("--guaranteed", help="Guaranteed GPUs. Other queues borrow them when idle.")
]
LimitOption = Annotated[str | None, typer.Option("--limit", help="Maximum GPUs of all its jobs, or none.")]
UserLimitOption = Annotated[
    str | None, typer.Option("--user-limit", help="Maximum GPUs of one user's jobs in the queue, or none.")
]
UserJobsOption = Annotated[str | None, typer.Option("--user-jobs", help="Maximum pending jobs of one user, or none.")]
WeightOption = Annotated[float | None, typer.Option("--weight", help="Weight for sharing borrowed GPUs among queues.")]


@app.callback(invoke_without_command=True)
def queues(context: typer.Context, url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE) -> None:
    if has_no_subcommand(context):
        list_queues(url, output)


@app.command("list")
def list_queues(url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE) -> None:
    """List queues with their quotas, usage and pending jobs."""
    with service_client(url) as client:
        result = client.queues()
    print_document(result, output, lambda: render_queues(result))


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
    """Create a queue. A queue that jobs name without creating it has no guarantee and no limits."""
    quota = _collect_quota(guaranteed, limit, user_limit, weight, user_jobs)
    with service_client(url) as client:
        response = client.create_queue({"name": name, **quota})
    print_document(response, output, lambda: render_facts({"queue": f"{name} created: {_format_quota(response)}"}))


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
    """Change the given fields of a queue."""
    change = _collect_quota(guaranteed, limit, user_limit, weight, user_jobs)
    if not change:
        raise_input_error("nothing to change. Set --guaranteed, --limit, --user-limit, --user-jobs or --weight")
    with service_client(url) as client:
        response = client.change_queue(name, change)
    print_document(response, output, lambda: render_facts({"queue": f"{name} changed: {_format_quota(response)}"}))


@app.command("delete")
def delete_queue(name: QueueArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE) -> None:
    """Delete a queue. Its jobs remain, without guarantee and limits."""
    with service_client(url) as client:
        response = client.delete_queue(name)
    print_document(response, output, lambda: render_facts({"queue": f"{name} deleted"}))


def render_queues(result: Iterable[Mapping[str, Any]]) -> RenderableType:
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
                f"{queue['waiting_jobs']} for {queue['waiting_gpus']} GPUs" if queue["waiting_jobs"] else "-",
                "" if queue["declared"] else "not created",
            ]
            for queue in result
        ),
        headers=["queue", "guaranteed", "limit", "per user", "weight", "used", "borrowed", "running", "pending", ""],
        right_aligned=["guaranteed", "limit", "per user", "weight", "used", "borrowed", "running"],
        empty="There are no queues.",
    )


def _collect_quota(
    guaranteed: int | None, limit: str | None, user_limit: str | None, weight: float | None, user_jobs: str | None
) -> dict[str, Any]:
    """Return the quota fields that were given. The service validates them."""
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
    limits = f"limit {_format_limit(queue['limit_gpus'])}, per user {_format_limit(queue['user_limit_gpus'])}"
    return f"{queue['guaranteed_gpus']} GPUs guaranteed, {limits}, weight {queue['weight']:g}"


def _format_limit(limit_gpus: int | None) -> str:
    return "none" if limit_gpus is None else str(limit_gpus)
