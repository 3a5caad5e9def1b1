"""Jobs that a service has: list, describe, change."""

from __future__ import annotations

from typing import Annotated

import typer

from scheduler.cli.completing import job_ids
from scheduler.cli.failure import refuse
from scheduler.cli.job_view import describe_view, job_rows, line_of
from scheduler.cli.output import Format, OutputOption, emit, facts
from scheduler.cli.service import DEFAULT_URL, UrlOption, service
from scheduler.cli.watching import EveryOption, WatchOption, refresh, require_table

JobArgument = Annotated[
    str, typer.Argument(metavar="JOB", autocompletion=job_ids, help="Id of a job, as `ebbtide ps` shows it.")
]
StateOption = Annotated[str, typer.Option("--state", help="Only jobs in this state.")]
MaxOption = Annotated[int | None, typer.Option("--max", help="GPUs it can use at most.")]
MinOption = Annotated[int | None, typer.Option("--min", help="GPUs it needs at least.")]

PAGE = 1000


def ps(
    state: StateOption = "",
    watch: WatchOption = False,
    every: EveryOption = 2.0,
    url: UrlOption = DEFAULT_URL,
    output: OutputOption = Format.TABLE,
) -> None:
    """List the jobs: state, GPUs held of the range, plan, progress."""
    require_table(output, watch)
    with service(url) as client:
        if watch:
            refresh(lambda: job_rows(client.jobs(state=state, limit=PAGE)), every)
            return
        jobs = list(client.jobs(state=state, limit=PAGE))
    emit(jobs, output, lambda: job_rows(jobs))


def describe(job: JobArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = Format.TABLE) -> None:
    """Show everything about one job, its plan included."""
    with service(url) as client:
        found = client.job(job)
    emit(found, output, lambda: describe_view(found))


def scale(
    job: JobArgument,
    max_gpus: MaxOption = None,
    min_gpus: MinOption = None,
    url: UrlOption = DEFAULT_URL,
    output: OutputOption = Format.TABLE,
) -> None:
    """Change a job's GPU range; what is not given stays."""
    if max_gpus is None and min_gpus is None:
        refuse("scale: nothing to change; give --max, --min or both")
    with service(url) as client:
        answer = client.scale(job, max_gpus=max_gpus, min_gpus=min_gpus)
    emit(answer, output, lambda: facts(line_of(answer)))


def suspend(job: JobArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = Format.TABLE) -> None:
    """Save a job and take its GPUs until it is resumed."""
    with service(url) as client:
        answer = client.suspend(job)
    emit(answer, output, lambda: facts(line_of(answer)))


def resume(job: JobArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = Format.TABLE) -> None:
    """Let a suspended job run again."""
    with service(url) as client:
        answer = client.resume(job)
    emit(answer, output, lambda: facts(line_of(answer)))


def cancel(job: JobArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = Format.TABLE) -> None:
    """End a job; its last checkpoint stays."""
    with service(url) as client:
        answer = client.cancel(job)
    emit(answer, output, lambda: facts(line_of(answer)))
