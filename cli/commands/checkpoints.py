"""`ebbtide checkpoint`: requests a checkpoint of a running job, or works on one that is on disk."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from cli.commands.jobs import JobArgument
from cli.connection import DEFAULT_URL, UrlOption, service_client
from cli.exit_codes import CommandError
from cli.inputs import input_errors_from, read_json
from cli.job_lookup import find_job_id
from cli.output import (
    OutputFormat,
    OutputOption,
    format_bytes,
    format_duration,
    format_number,
    format_time,
    print_document,
    print_message,
    render_facts,
)
from ebbtide.checkpoints.errors import CheckpointError, describe_os_error
from ebbtide.checkpoints.export_formats import ExportFormat
from scheduler.domain.parallel_plan import plan_from_json
from scheduler.resharding.checkpoint_tensors import compute_held_parts, describe_tensors

POLL_INTERVAL_S = 0.5
_DEFAULT_COMMAND = "request"


class _CheckpointGroup(TyperGroup):
    """A group in which `ebbtide checkpoint JOB` means `ebbtide checkpoint request JOB`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in {*self.commands, *ctx.help_option_names}:
            args = [_DEFAULT_COMMAND, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    name="checkpoint",
    cls=_CheckpointGroup,
    help="Request, verify, export or reshard checkpoints. `ebbtide checkpoint JOB` requests one of a job.",
    no_args_is_help=True,
)

WaitForCheckpointOption = Annotated[bool, typer.Option("--wait", help="Wait until the checkpoint is complete.")]
PathArgument = Annotated[
    Path, typer.Argument(metavar="PATH", help="A checkpoint, or a folder of checkpoints: then the newest.")
]
TargetArgument = Annotated[
    Path, typer.Argument(metavar="TARGET", help="The file to write, or the folder for `hf`. It must not exist.")
]
ReshardTargetArgument = Annotated[
    Path, typer.Argument(metavar="TARGET", help="The directory of the new checkpoint. It must not exist.")
]
PlanOption = Annotated[
    str, typer.Option("--plan", metavar="FILE", help="The plan, as `ebbtide plan -o json` prints it, or `plan.json`.")
]
FormatOption = Annotated[
    ExportFormat,
    typer.Option(
        "--format",
        help="`safetensors`: the weights in one file. `torch`: the whole state for torch.load. "
        "`hf`: the weights in a folder for from_pretrained.",
    ),
]
PrefixOption = Annotated[
    str | None,
    typer.Option(
        "--prefix",
        help="Export the tensors whose names begin with this text, without it. Default: `model.` if there are any.",
    ),
]
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="config.json of the model, for `hf`. Default: the file of that name beside the checkpoint.",
    ),
]


@app.command(_DEFAULT_COMMAND)
def request_checkpoint(
    job: JobArgument,
    wait: WaitForCheckpointOption = False,
    url: UrlOption = DEFAULT_URL,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Request a checkpoint of a running job. The job saves at its next step and continues."""
    with service_client(url) as client:
        job = find_job_id(client, job)
        response = client.checkpoint(job)
        while wait and response["awaited"] is not None:
            time.sleep(POLL_INTERVAL_S)
            response = client.checkpoints(job)
        state = client.job(job)["state"]
    if wait and state != "running":
        raise CommandError(f"job {job} is {state}; this checkpoint may not have been written")
    if not wait:
        print_message(f"{job} saves at its next step. Use --wait to wait for it.")
    print_document(response, output, lambda: render_facts(_format_checkpoint(response)))


def _format_checkpoint(checkpoints: Mapping[str, Any]) -> dict[str, str]:
    latest = checkpoints["latest"]
    text = "none"
    if latest is not None:
        text = f"step {format_number(latest['step'])}, {format_time(latest['completed_at_s'])} UTC"
    return {"job": checkpoints["job_id"], "checkpoint": text, "interval": format_duration(checkpoints["interval_s"])}


@app.command("export")
def export(
    path: PathArgument,
    target: TargetArgument,
    *,
    export_format: FormatOption,
    prefix: PrefixOption = None,
    config: ConfigOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Write a checkpoint on this machine to a file or folder that other tools read. Checksums are verified."""
    with _command_errors():
        from ebbtide.checkpoints.export import export_checkpoint

        result = export_checkpoint(path, target, export_format, prefix=prefix, config=config)
    document = {
        "checkpoint": str(result.source),
        "target": str(result.target),
        "format": export_format.value,
        "tensors": result.tensors,
        "bytes": result.size_bytes,
        "verified": result.is_verified,
        "config": result.has_config,
    }
    if export_format is ExportFormat.HF and not result.has_config:
        print_message(f"No config.json was found for {target}. Add the model's, or use --config.")
    facts = {
        "checkpoint": f"{result.source}, {_describe_verification(result.is_verified)}",
        "target": f"{target}, {export_format.value}",
        "content": f"{format_number(result.tensors)} tensors, {format_bytes(result.size_bytes)}",
    }
    print_document(document, output, lambda: render_facts(facts))


@app.command("reshard")
def reshard(
    path: PathArgument,
    target: ReshardTargetArgument,
    *,
    plan: PlanOption,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Write a checkpoint so that each rank of a plan finds its shards in a file of its own. Checksums are verified."""
    document = read_json(plan)
    with input_errors_from(f"--plan: {plan}"):
        if not isinstance(document, dict):
            raise ValueError(f"expected a JSON object, got {type(document).__name__}")
        parallel_plan = plan_from_json(document.get("plan", document))
    with _command_errors():
        from ebbtide.checkpoints.export import find_checkpoint
        from ebbtide.checkpoints.resharding import TensorPart, list_stored_tensors, reshard_checkpoint

        source = find_checkpoint(path)
        stored = list_stored_tensors(source)
        shapes = {name: tensor.shape for name, tensor in stored.items()}
        with input_errors_from("--plan"):
            tensors = describe_tensors(
                shapes,
                {name: tensor.element_bytes for name, tensor in stored.items()},
                layers=parallel_plan.stages[-1].last_layer + 1,
            )
            held = compute_held_parts(parallel_plan, tensors, shapes)
        parts = [[TensorPart(part.name, part.offsets, part.lengths) for part in rank] for rank in held]
        traffic = reshard_checkpoint(source, target, parts)
    result = {
        "checkpoint": str(source),
        "target": str(target),
        "ranks": len(held),
        "needed_bytes": traffic.needed_bytes,
        "read_bytes": traffic.read_bytes,
    }
    facts = {
        "checkpoint": str(source),
        "target": f"{target}, {format_number(len(held))} ranks",
        "content": format_bytes(traffic.needed_bytes),
    }
    print_document(result, output, lambda: render_facts(facts))


@app.command("verify")
def verify(path: PathArgument, output: OutputOption = OutputFormat.TABLE) -> None:
    """Read all files of a checkpoint on this machine and compare their checksums."""
    with _command_errors():
        from ebbtide.checkpoints.export import find_checkpoint
        from ebbtide.checkpoints.piece_files import verify_checkpoint

        source = find_checkpoint(path)
        checksums = verify_checkpoint(source)
    if checksums is None:
        raise CommandError(f"{source} has no checksums. Another tool wrote it, so damage to it cannot be noticed.")
    size_bytes = sum(piece.length for piece in checksums.pieces.values())
    document = {"checkpoint": str(source), "torch": checksums.torch_version, "bytes": size_bytes, "verified": True}
    facts = {
        "checkpoint": f"{source}, {_describe_verification(True)}",
        "content": f"{format_number(len(checksums.pieces))} pieces, {format_bytes(size_bytes)}",
        "written by": f"torch {checksums.torch_version}",
    }
    print_document(document, output, lambda: render_facts(facts))


def _describe_verification(is_verified: bool) -> str:
    return "verified" if is_verified else "without checksums"


@contextmanager
def _command_errors() -> Iterator[None]:
    try:
        yield
    except CheckpointError as error:
        raise CommandError(str(error)) from error
    except OSError as error:
        raise CommandError(f"{describe_os_error(error)}.") from error
    except ModuleNotFoundError as error:
        raise CommandError(f"{error.name} is not installed. Install it: pip install {error.name}") from error
