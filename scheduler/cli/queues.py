"""Queues of a service: who pays, and for how many GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scheduler.cli.completing import queue_names
from scheduler.cli.failure import refuse
from scheduler.cli.fleet import is_list
from scheduler.cli.inputs import count_of
from scheduler.cli.output import Format, OutputOption, columns, emit, facts
from scheduler.cli.service import DEFAULT_URL, UrlOption, service

if TYPE_CHECKING:
    from rich.console import RenderableType

app = typer.Typer(name="queues", help="List, create, set or delete queues: guaranteed GPUs, limits, weight.")

QueueArgument = Annotated[
    str, typer.Argument(metavar="QUEUE", autocompletion=queue_names, help="Name of a queue, as jobs give it.")
]
GuaranteedOption = Annotated[int | None, typer.Option("--guaranteed", help="GPUs that are its own; others borrow.")]
LimitOption = Annotated[str | None, typer.Option("--limit", help="Most GPUs that its jobs use together, or none.")]
UserLimitOption = Annotated[
    str | None, typer.Option("--user-limit", help="Most GPUs that the jobs of one user hold together in it, or none.")
]
JobsMaxOption = Annotated[
    str | None, typer.Option("--user-jobs", help="Most waiting jobs of one user that it takes, or none.")
]
WeightOption = Annotated[float | None, typer.Option("--weight", help="Its share of what queues borrow.")]


@app.callback(invoke_without_command=True)
def queues(context: typer.Context, url: UrlOption = DEFAULT_URL, output: OutputOption = Format.TABLE) -> None:
    if is_list(context):
        list_queues(url, output)


@app.command("list")
def list_queues(url: UrlOption = DEFAULT_URL, output: OutputOption = Format.TABLE) -> None:
    """List the queues: guarantee, limit, what they use, borrow and wait for."""
    with service(url) as client:
        found = client.queues()
    emit(found, output, lambda: queue_rows(found))


@app.command("create")
def create_queue(
    name: QueueArgument,
    guaranteed: GuaranteedOption = None,
    limit: LimitOption = None,
    weight: WeightOption = None,
    *,
    user_limit: UserLimitOption = None,
    user_jobs: JobsMaxOption = None,
    url: UrlOption = DEFAULT_URL,
    output: OutputOption = Format.TABLE,
) -> None:
    """Declare a queue. A queue that is not declared has no guarantee and no limit."""
    with service(url) as client:
        answer = client.create_queue({"name": name, **_quota(guaranteed, limit, user_limit, weight, user_jobs)})
    emit(answer, output, lambda: facts({"queue": f"{name} is created: {_terms(answer)}"}))


@app.command("set")
def set_queue(
    name: QueueArgument,
    guaranteed: GuaranteedOption = None,
    limit: LimitOption = None,
    weight: WeightOption = None,
    *,
    user_limit: UserLimitOption = None,
    user_jobs: JobsMaxOption = None,
    url: UrlOption = DEFAULT_URL,
    output: OutputOption = Format.TABLE,
) -> None:
    """Change what is given of a declared queue."""
    change = _quota(guaranteed, limit, user_limit, weight, user_jobs)
    if not change:
        refuse("nothing to set: give --guaranteed, --limit, --user-limit, --user-jobs or --weight")
    with service(url) as client:
        answer = client.change_queue(name, change)
    emit(answer, output, lambda: facts({"queue": f"{name} is set: {_terms(answer)}"}))


@app.command("delete")
def delete_queue(name: QueueArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = Format.TABLE) -> None:
    """Take a queue's declaration back; its jobs stay, without guarantee and without limit."""
    with service(url) as client:
        answer = client.delete_queue(name)
    emit(answer, output, lambda: facts({"queue": f"{name} is deleted"}))


def queue_rows(found: Iterable[Mapping[str, Any]]) -> RenderableType:
    return columns(
        (
            [
                queue["name"],
                str(queue["guaranteed_gpus"]),
                _limit_text(queue["limit_gpus"]),
                _limit_text(queue["user_limit_gpus"]),
                f"{queue['weight']:g}",
                str(queue["used_gpus"]),
                str(queue["borrowed_gpus"]),
                str(queue["running_jobs"]),
                f"{queue['waiting_jobs']} for {queue['waiting_gpus']} GPUs" if queue["waiting_jobs"] else "nobody",
                "" if queue["declared"] else "not declared",
            ]
            for queue in found
        ),
        heads=["queue", "guaranteed", "limit", "per user", "weight", "uses", "borrowed", "jobs", "waiting", ""],
        right=["guaranteed", "limit", "per user", "weight", "uses", "borrowed", "jobs"],
        empty="There are no queues.",
    )


def _quota(
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
            given[field] = None if text == "none" else count_of(option, text, least=0)
    if weight is not None:
        given["weight"] = weight
    return given


def _terms(queue: Mapping[str, Any]) -> str:
    limits = f"limit {_limit_text(queue['limit_gpus'])}, for one user {_limit_text(queue['user_limit_gpus'])}"
    return f"{queue['guaranteed_gpus']} GPUs guaranteed, {limits}, weight {queue['weight']:g}"


def _limit_text(limit_gpus: int | None) -> str:
    return "none" if limit_gpus is None else str(limit_gpus)
