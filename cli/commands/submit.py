"""`ebbtide submit`: submits a job from a file, from options, or from a file with options that override it.

With `--workdir`, it packs and uploads the folder with the user's code first.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.commands.jobs import format_progress, render_dry_run
from cli.completion import complete_queue_names
from cli.connection import DEFAULT_URL, UrlOption, service_client
from cli.exit_codes import CommandError, InputError
from cli.inputs import (
    input_errors_from,
    parse_count,
    parse_label,
    raise_input_error,
    read_env_file,
    read_json,
    read_yaml_object,
)
from cli.job_lookup import TERMINAL_STATES
from cli.output import (
    OutputFormat,
    OutputOption,
    make_console,
    print_document,
    print_message,
    render_facts,
    retry_while_unavailable,
)
from scheduler.domain.job_account import OnResize
from scheduler.domain.program import ARCHIVE_BYTES_MAX
from scheduler.domain.run_document import LaunchMode

if TYPE_CHECKING:
    from cli.working_directory import PackedDirectory
    from ebbtide.client import Client
    from ebbtide.client.views import JobView


POLL_INTERVAL_S = 1.0
LIMIT_VARIABLE = "EBBTIDE_ARCHIVE_BYTES_MAX"
"""Raises the limit of a working directory, where the service has the same setting."""

FileOption = Annotated[
    str | None,
    typer.Option("-f", "--file", metavar="JOB.yaml", help="Job document or ElasticJob manifest; - reads stdin."),
]
NameOption = Annotated[
    str | None, typer.Option("--name", help="Display name, from which the id is made. Default: that of the file.")
]
MinOption = Annotated[int | None, typer.Option("--min", help="Fewest GPUs that the job can run on.")]
MaxOption = Annotated[int | None, typer.Option("--max", help="Most GPUs that the job can use. Default: --min.")]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="NAME|FILE",
        help="Model that the solver plans for: a preset, or a file with a profile or a Hugging Face config.json.",
    ),
]
BatchOption = Annotated[
    int | None, typer.Option("--global-batch", help="Samples per optimizer step. Required with --model.")
]
SeqOption = Annotated[int | None, typer.Option("--seq", help="Tokens per sample. Default: that of the model.")]
StepsOption = Annotated[int | None, typer.Option("--steps", help="Number of optimizer steps. Default: unknown.")]
GpuOption = Annotated[str | None, typer.Option("--gpu", help="GPU model that the job requires.")]
SpeedOption = Annotated[
    list[str] | None,
    typer.Option(
        "--speed",
        metavar="GPU=NUMBER",
        help="Relative speed of one GPU of a model, for a job without --model, such as t4=0.18. Repeatable.",
    ),
]
LengthsOption = Annotated[
    Path | None,
    typer.Option(
        "--lengths",
        metavar="FILE",
        help="File with the tokens of one sample in each line, for a job with --model whose samples differ in length.",
    ),
]
PriorityOption = Annotated[int | None, typer.Option("--priority", help="Priority; higher values are scheduled first.")]
QueueOption = Annotated[
    str | None,
    typer.Option("--queue", autocompletion=complete_queue_names, help="Queue that the job's GPUs are charged to."),
]
CommandOption = Annotated[
    str | None, typer.Option("--command", help="Command of the workers, as one shell-quoted string, instead of words.")
]
WordsArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="[-- COMMAND...]", help="Command of the workers, such as: -- python train.py --lr 0.1"),
]
WorkdirOption = Annotated[
    Path | None,
    typer.Option(
        "--workdir",
        metavar="DIR",
        help="Folder with your code, in which every rank starts. Files that .ebbtideignore names are not uploaded.",
    ),
]
SetupOption = Annotated[
    str | None,
    typer.Option(
        "--setup", metavar="CMD", help="Shell command that runs once per machine in the working directory, first."
    ),
]
VenvOption = Annotated[
    str | None,
    typer.Option(
        "--venv",
        metavar="DIR",
        help="Virtual environment with the workers' python: a path on the machines, or one that --setup creates.",
    ),
]
LaunchOption = Annotated[
    LaunchMode | None,
    typer.Option("--launch", help="Start the command once per GPU (rank) or once per node, for torchrun (node)."),
]
OnResizeOption = Annotated[
    OnResize | None,
    typer.Option(
        "--on-resize",
        help="What a resize does: checkpoint (save and resume), restart, or never. Default: never, unless the job "
        "declares checkpoints or reports its progress.",
    ),
]
CheckpointPathOption = Annotated[
    str | None,
    typer.Option(
        "--checkpoint-path",
        metavar="PATTERN",
        help="File that an unmodified script writes last in each checkpoint, in the checkpoint directory: ckpt.pt, or "
        "checkpoint-*/trainer_state.json.",
    ),
]
CheckpointSignalOption = Annotated[
    str | None,
    typer.Option(
        "--checkpoint-signal", metavar="SIGNAL", help="Signal on which the script saves, such as SIGTERM or SIGUSR1."
    ),
]
MemoryOption = Annotated[
    str | None,
    typer.Option("--memory", metavar="SIZE", help="Main memory that the job may use per node, such as 64Gi."),
]
CpuOption = Annotated[
    str | None, typer.Option("--cpu", metavar="CORES", help="Cores that the job may use per node, such as 8.")
]
HangTimeoutOption = Annotated[
    str | None,
    typer.Option(
        "--hang-timeout",
        metavar="DURATION|never",
        help="Restart a run that makes no progress for this long, such as 5m. Default: 30s.",
    ),
]
EnvFileOption = Annotated[
    str | None,
    typer.Option("--env-file", metavar="FILE", help="File with NAME=VALUE lines for --env, which overrides it."),
]
EnvOption = Annotated[
    list[str] | None, typer.Option("--env", metavar="NAME=VALUE", help="Environment variable of each rank. Repeatable.")
]
LabelOption = Annotated[
    list[str] | None,
    typer.Option("--label", metavar="KEY=VALUE", help="Label to find the job by, such as team=vision. Repeatable."),
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Show what the scheduler would decide; do not submit.")]
QuietOption = Annotated[bool, typer.Option("-q", "--quiet", help="Print only the job ID, for scripts.")]
WaitOption = Annotated[bool, typer.Option("--wait", help="Wait until the job ends; exit 1 unless it succeeded.")]


_COMPLETED_FIELDS = {"gpus", "checkpoint", "labels"}
"""Objects of a job document of which options override single fields."""
_MODEL_FILE_SUFFIX = ".json"
_JOB_FILE_SUFFIXES = (".yaml", ".yml")


def submit(
    *,
    words: WordsArgument = None,
    file: FileOption = None,
    name: NameOption = None,
    min_gpus: MinOption = None,
    max_gpus: MaxOption = None,
    model: ModelOption = None,
    global_batch: BatchOption = None,
    seq: SeqOption = None,
    steps: StepsOption = None,
    gpu: GpuOption = None,
    speed: SpeedOption = None,
    lengths: LengthsOption = None,
    priority: PriorityOption = None,
    queue: QueueOption = None,
    command: CommandOption = None,
    workdir: WorkdirOption = None,
    setup: SetupOption = None,
    venv: VenvOption = None,
    launch: LaunchOption = None,
    on_resize: OnResizeOption = None,
    checkpoint_path: CheckpointPathOption = None,
    checkpoint_signal: CheckpointSignalOption = None,
    memory: MemoryOption = None,
    cpu: CpuOption = None,
    hang_timeout: HangTimeoutOption = None,
    env: EnvOption = None,
    env_file: EnvFileOption = None,
    label: LabelOption = None,
    dry_run: DryRunOption = False,
    wait: WaitOption = False,
    quiet: QuietOption = False,
    url: UrlOption = DEFAULT_URL,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Submit a job from a file, from options, or both. Options override the file, and come before the command."""
    options = {
        "name": name,
        "gpus": _list_given(min=min_gpus, max=max_gpus),
        **_read_model(model, global_batch, seq),
        "steps": steps,
        "gpu": gpu,
        "speeds": dict(_parse_speed(item) for item in speed) if speed else None,
        "lengths": _read_histogram(lengths) if lengths else None,
        "priority": priority,
        "queue": queue,
        "command": _read_command(command, words, file),
        "setup": ["sh", "-c", setup] if setup else None,
        "venv": venv,
        "launch": launch.value if launch else None,
        "onResize": on_resize.value if on_resize else None,
        "checkpoint": _list_given(path=checkpoint_path, signal=checkpoint_signal),
        "resources": _list_given(memory=memory, cpu=cpu),
        "hangTimeout": hang_timeout,
        "env": _read_environment(env_file, env),
        "labels": dict(parse_label("--label", item) for item in label) if label else None,
    }
    with _packed_directory(workdir) as packed:
        _send(file, options, packed, url, output, dry_run=dry_run, wait=wait, quiet=quiet)


def _read_model(model: str | None, global_batch: int | None, seq: int | None) -> dict[str, Any]:
    """Return the fields of a job document about its model, which is a `profile` if it is a file, with a suffix."""
    is_file = model is not None and model.endswith(_MODEL_FILE_SUFFIX)
    stated = {"profile": read_json(model)} if model and is_file else {"model": model}
    return {**stated, "globalBatch": global_batch, "sequenceLength": seq}


def _send(
    file: str | None,
    options: dict[str, Any],
    packed: PackedDirectory | None,
    url: str,
    output: OutputFormat,
    *,
    dry_run: bool,
    wait: bool,
    quiet: bool,
) -> None:
    workdir = {"archive": packed.digest} if packed else None
    document = build_job_document(file, {**options, "workdir": workdir}, is_dry_run=dry_run)
    with service_client(url) as client:
        if dry_run:
            response = client.dry_run(document)
            _print_warnings(response)
            print_document(response, output, lambda: render_dry_run(response))
            return
        if packed is not None:
            _upload(client, packed)
        job = client.submit(document)
        _print_warnings(job)
        if quiet:
            typer.echo(job["id"])
        if wait:
            job = _wait_for_end(client, job)
    if not quiet:
        print_document(
            job, output, lambda: render_facts({"job": job["id"], "name": job["name"], "state": job["state"]})
        )
    if wait and job["state"] != "succeeded":
        raise CommandError(f"job {job['id']} {job['state']}: {job.get('message') or 'no message'}")


def _print_warnings(response: Any) -> None:
    for warning in response.get("warnings", ()):
        print_message(f"Warning: {warning}")


def build_job_document(file: str | None, options: dict[str, Any], *, is_dry_run: bool) -> dict[str, Any]:
    """Return the job document in `file`, a job document or an ElasticJob manifest, overridden by `options`.

    Options that are None are not set. Only a dry run may have no command.

    Raises:
        InputError: the document is invalid.
    """
    from scheduler.documents.custom_resource import is_manifest, manifest_to_job_document
    from scheduler.documents.job import parse_job, require_command

    document = read_yaml_object(file) if file else {}
    if is_manifest(document):
        with input_errors_from(file or "job"):
            document = manifest_to_job_document(document)
    given = {field: value for field, value in options.items() if value is not None}
    for field in _COMPLETED_FIELDS & given.keys():
        before = document.get(field)
        given[field] = {**(before if isinstance(before, dict) else {}), **given[field]}
    if "gpus" in given:
        given["gpus"].setdefault("max", given["gpus"].get("min"))
    document.update(given)
    required = {"name": "--name", "gpus": "--min"}
    if not file and (missing := [option for field, option in required.items() if field not in document]):
        raise_input_error(f"job: {' and '.join(missing)} must be given. Or name a job file with -f JOB.yaml.")
    with input_errors_from(file or "job"):
        spec = parse_job(document)
    if not is_dry_run:
        try:
            require_command(spec)
        except ValueError as error:
            raise InputError(f"{file or 'job'}: {error}. Add it at the end: ... -- python train.py") from error
    return document


def _list_given(**options: int | str | None) -> dict[str, int | str] | None:
    """Return the options that are given, None if none is."""
    return {field: value for field, value in options.items() if value is not None} or None


def _read_command(command: str | None, words: list[str] | None, file: str | None) -> list[str] | None:
    if words and file is None and words[0].endswith(_JOB_FILE_SUFFIXES):
        raise_input_error(f"command: {words[0]!r} is a job file, not a program. Run `ebbtide submit -f {words[0]}`.")
    if command is None:
        return words or None
    if words:
        raise_input_error(f"--command: cannot be combined with the words {shlex.join(words)!r:.60}. Use one of them.")
    with input_errors_from("--command"):
        return shlex.split(command)


def _read_environment(file: str | None, items: list[str] | None) -> dict[str, str] | None:
    if file is None and not items:
        return None
    return {**(read_env_file(file) if file else {}), **dict(_parse_env(item) for item in items or ())}


@contextmanager
def _packed_directory(folder: Path | None) -> Iterator[PackedDirectory | None]:
    """Pack the working directory into a temporary file during the block."""
    if folder is None:
        yield None
        return
    from cli.working_directory import pack_directory

    bytes_max = parse_count(LIMIT_VARIABLE, os.environ.get(LIMIT_VARIABLE, str(ARCHIVE_BYTES_MAX)), maximum=2**40)
    with TemporaryDirectory(prefix="ebbtide-") as place:
        yield pack_directory(folder, Path(place) / "workdir.tar.gz", bytes_max=bytes_max)


def _upload(client: Client, packed: PackedDirectory) -> None:
    """Upload the working directory unless the service has it. Shows progress on a terminal."""
    from rich.progress import Progress

    if client.has_archive(packed.digest):
        return
    console = make_console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("uploading", total=packed.bytes)
        client.upload_archive(
            packed.digest, packed.file, on_sent=lambda sent: progress.update(task, completed=float(sent))
        )


def _parse_env(item: str) -> tuple[str, str]:
    name, sign, value = item.partition("=")
    if not sign or not name:
        raise_input_error(f"--env: {item!r} must have the form NAME=VALUE")
    return name, value


def _parse_speed(item: str) -> tuple[str, float]:
    gpu, _, number = item.partition("=")
    try:
        return gpu, float(number)
    except ValueError:
        raise_input_error(f"--speed: {item!r} must have the form GPU=NUMBER, such as t4=0.18")


def _read_histogram(file: Path) -> dict[int, int]:
    from scheduler.solver.lengths.histogram import build_histogram, read_lengths

    with input_errors_from(""):
        return dict(build_histogram(read_lengths(file)))


def _wait_for_end(client: Client, job: JobView) -> JobView:
    """Return the job once it has ended. Reports each change on stderr."""
    reported = ""
    while True:
        line = f"{job['state']}, {format_progress(job)}"
        if line != reported:
            print_message(f"{job['id']}: {line}")
            reported = line
        if job["state"] in TERMINAL_STATES:
            return job
        time.sleep(POLL_INTERVAL_S)
        job = retry_while_unavailable(partial(client.job, job["id"]))
