"""`submit`: hand in a job, from a file, from options, or from a file with options on top."""

from __future__ import annotations

import shlex
import time
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scheduler.cli.completing import queue_names
from scheduler.cli.failure import Failed, blaming, refuse
from scheduler.cli.inputs import yaml_of
from scheduler.cli.job_view import ENDED, dry_run_view, progress_text
from scheduler.cli.output import Format, OutputOption, emit, facts, say
from scheduler.cli.service import DEFAULT_URL, UrlOption, service
from scheduler.cli.watching import patiently

if TYPE_CHECKING:
    from api.answers.job import JobView
    from api.client import Client


LOOK_EVERY_S = 1.0

FileOption = Annotated[
    str | None, typer.Option("-f", "--file", metavar="JOB.yaml", help="A job document, or an ElasticJob; - is stdin.")
]
NameOption = Annotated[str | None, typer.Option("--name", help="Name of the job.")]
MinOption = Annotated[int | None, typer.Option("--min", help="GPUs it needs at least.")]
MaxOption = Annotated[int | None, typer.Option("--max", help="GPUs it can use at most; --min where absent.")]
ModelOption = Annotated[str | None, typer.Option("--model", help="Model preset that the solver plans for.")]
BatchOption = Annotated[int | None, typer.Option("--global-batch", help="Samples a step.")]
SeqOption = Annotated[int | None, typer.Option("--seq", help="Tokens a sample.")]
StepsOption = Annotated[int | None, typer.Option("--steps", help="Optimizer steps to the end.")]
GpuOption = Annotated[str | None, typer.Option("--gpu", help="The only GPU model it may run on.")]
PriorityOption = Annotated[int | None, typer.Option("--priority", help="Higher goes first.")]
QueueOption = Annotated[
    str | None, typer.Option("--queue", autocompletion=queue_names, help="Queue that pays for its GPUs.")
]
CommandOption = Annotated[str | None, typer.Option("--command", help="What its workers run, as one shell-quoted text.")]
EnvOption = Annotated[list[str] | None, typer.Option("--env", metavar="NAME=VALUE", help="May be repeated.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Only say what would be decided.")]
QuietOption = Annotated[bool, typer.Option("-q", "--quiet", help="Print the job's id and nothing else.")]
WaitOption = Annotated[bool, typer.Option("--wait", help="Stay until it has ended; exit 1 unless it succeeded.")]


def submit(
    *,
    file: FileOption = None,
    name: NameOption = None,
    min_gpus: MinOption = None,
    max_gpus: MaxOption = None,
    model: ModelOption = None,
    global_batch: BatchOption = None,
    seq: SeqOption = None,
    steps: StepsOption = None,
    gpu: GpuOption = None,
    priority: PriorityOption = None,
    queue: QueueOption = None,
    command: CommandOption = None,
    env: EnvOption = None,
    dry_run: DryRunOption = False,
    wait: WaitOption = False,
    quiet: QuietOption = False,
    url: UrlOption = DEFAULT_URL,
    output: OutputOption = Format.TABLE,
) -> None:
    """Submit a job: a document with -f, options, or both (options win)."""
    given = {
        "name": name,
        "gpus": _range(min_gpus, max_gpus),
        "model": model,
        "globalBatch": global_batch,
        "sequenceLength": seq,
        "steps": steps,
        "gpu": gpu,
        "priority": priority,
        "queue": queue,
        "command": _words(command),
        "env": dict(_pair(item) for item in env) if env else None,
    }
    document = job_document(file, {field: value for field, value in given.items() if value is not None})
    with service(url) as client:
        if dry_run:
            answer = client.dry_run(document)
            emit(answer, output, lambda: dry_run_view(answer))
            return
        job = client.submit(document)
        if quiet:
            typer.echo(job["id"])
        if wait:
            job = _until_ended(client, job)
    if not quiet:
        emit(job, output, lambda: facts({"job": job["id"], "name": job["name"], "state": job["state"]}))
    if wait and job["state"] != "succeeded":
        raise Failed(f"job {job['id']} {job['state']}: {job.get('message') or 'no message'}")


def job_document(file: str | None, given: dict[str, Any]) -> dict[str, Any]:
    """The job document, or ElasticJob, of the file with `given` laid over it. Raises BadInput naming the mistake."""
    from scheduler.documents.job import read_job
    from scheduler.documents.manifest import is_manifest, job_of_manifest

    document = yaml_of(file) if file else {}
    if is_manifest(document):
        with blaming(file or "job"):
            document = job_of_manifest(document)
    gpus = given.pop("gpus", None)
    document.update(given)
    if gpus:
        before = document.get("gpus")
        document["gpus"] = {**(before if isinstance(before, dict) else {}), **gpus}
        document["gpus"].setdefault("max", document["gpus"].get("min"))
    if not document:
        refuse("job: nothing to submit; give a document with -f JOB.yaml, or at least --name and --min")
    with blaming(file or "job"):
        read_job(document)
    return document


def _range(least: int | None, most: int | None) -> dict[str, int] | None:
    given = {"min": least, "max": most}
    return {field: value for field, value in given.items() if value is not None} or None


def _words(command: str | None) -> list[str] | None:
    if command is None:
        return None
    with blaming("--command"):
        return shlex.split(command)


def _pair(item: str) -> tuple[str, str]:
    name, sign, value = item.partition("=")
    if not sign or not name:
        refuse(f"--env: {item!r} is not of the form NAME=VALUE")
    return name, value


def _until_ended(client: Client, job: JobView) -> JobView:
    """Follow the job to its end, telling each change on stderr."""
    told = ""
    while True:
        line = f"{job['state']}, {progress_text(job)}"
        if line != told:
            say(f"{job['id']}: {line}")
            told = line
        if job["state"] in ENDED:
            return job
        time.sleep(LOOK_EVERY_S)
        job = patiently(partial(client.job, job["id"]))
