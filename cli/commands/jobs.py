"""Jobs that a service has: list, describe, change.

A checkpoint of a job, now.

What the ranks of a job print.

Jobs, as the service tells of them, drawn for people.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.completion import complete_job_ids
from cli.connection import DEFAULT_URL, UrlOption, service_client
from cli.inputs import CommandError, raise_input_error
from cli.output import (
    FollowOption,
    IntervalOption,
    OutputFormat,
    OutputOption,
    WatchOption,
    format_bytes,
    format_count,
    format_duration,
    format_number,
    format_percent,
    format_time,
    print_document,
    print_message,
    print_stream,
    refresh_view,
    render_facts,
    render_table,
    require_table,
)

if TYPE_CHECKING:
    from rich.console import RenderableType


JobArgument = Annotated[
    str, typer.Argument(metavar="JOB", autocompletion=complete_job_ids, help="Id of a job, as `ebbtide ps` shows it.")
]
JobStateOption = Annotated[str, typer.Option("--state", help="Only jobs in this state.")]
MaxGpusOption = Annotated[int | None, typer.Option("--max", help="GPUs it can use at most.")]
MinGpusOption = Annotated[int | None, typer.Option("--min", help="GPUs it needs at least.")]

JOBS_PAGE_SIZE = 1000


def ps(
    state: JobStateOption = "",
    watch: WatchOption = False,
    every: IntervalOption = 2.0,
    url: UrlOption = DEFAULT_URL,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """List the jobs: state, GPUs held of the range, plan, progress."""
    require_table(output, watch)
    with service_client(url) as client:
        if watch:
            refresh_view(lambda: render_jobs(client.jobs(state=state, limit=JOBS_PAGE_SIZE)), every)
            return
        jobs = list(client.jobs(state=state, limit=JOBS_PAGE_SIZE))
    print_document(jobs, output, lambda: render_jobs(jobs))


def describe(job: JobArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE) -> None:
    """Show everything about one job, its plan included."""
    with service_client(url) as client:
        found = client.job(job)
    print_document(found, output, lambda: render_job(found))


def scale(
    job: JobArgument,
    max_gpus: MaxGpusOption = None,
    min_gpus: MinGpusOption = None,
    url: UrlOption = DEFAULT_URL,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Change a job's GPU range; what is not given stays."""
    if max_gpus is None and min_gpus is None:
        raise_input_error("scale: nothing to change; give --max, --min or both")
    with service_client(url) as client:
        answer = client.scale(job, max_gpus=max_gpus, min_gpus=min_gpus)
    print_document(answer, output, lambda: render_facts(summarize_job(answer)))


def suspend(job: JobArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE) -> None:
    """Save a job and take its GPUs until it is resumed."""
    with service_client(url) as client:
        answer = client.suspend(job)
    print_document(answer, output, lambda: render_facts(summarize_job(answer)))


def resume(job: JobArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE) -> None:
    """Let a suspended job run again."""
    with service_client(url) as client:
        answer = client.resume(job)
    print_document(answer, output, lambda: render_facts(summarize_job(answer)))


def cancel(job: JobArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE) -> None:
    """End a job; its last checkpoint stays."""
    with service_client(url) as client:
        answer = client.cancel(job)
    print_document(answer, output, lambda: render_facts(summarize_job(answer)))


POLL_INTERVAL_S = 0.5

WaitForCheckpointOption = Annotated[bool, typer.Option("--wait", help="Stay until it is complete.")]


def checkpoint(
    job: JobArgument,
    wait: WaitForCheckpointOption = False,
    url: UrlOption = DEFAULT_URL,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Have a running job save its state at the next step, and go on."""
    with service_client(url) as client:
        answer = client.checkpoint(job)
        while wait and answer["awaited"] is not None:
            time.sleep(POLL_INTERVAL_S)
            answer = client.checkpoints(job)
        state = client.job(job)["state"]
    if wait and state != "running":
        raise CommandError(f"job {job} is {state}: it may have gone without this checkpoint")
    if not wait:
        print_message(f"{job} saves at its next step; --wait stays until that is done.")
    print_document(answer, output, lambda: render_facts(_format_checkpoint(answer)))


def _format_checkpoint(checkpoints: Mapping[str, Any]) -> dict[str, str]:
    latest = checkpoints["latest"]
    told = (
        "none"
        if latest is None
        else f"of step {format_number(latest['step'])}, {format_time(latest['completed_at_s'])} UTC"
    )
    return {"job": checkpoints["job_id"], "checkpoint": told, "every": format_duration(checkpoints["interval_s"])}


RankOption = Annotated[int, typer.Option("--rank", min=0, help="Whose lines.")]
TailOption = Annotated[int | None, typer.Option("--tail", min=0, help="Only the last so many lines.")]
GenerationOption = Annotated[
    int | None, typer.Option("--generation", min=1, help="Of these workers; default: the newest.", show_default=False)
]


def logs(
    job: JobArgument,
    follow: FollowOption = False,
    *,
    rank: RankOption = 0,
    tail: TailOption = None,
    generation: GenerationOption = None,
    url: UrlOption = DEFAULT_URL,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Print what a rank of a job has printed; with -f go on until the job has ended."""
    with service_client(url) as client:
        read = client.follow_logs if follow else client.logs
        lines = read(job, rank=rank, generation=generation, tail=tail)
        if output is OutputFormat.TABLE or follow:
            print_stream(lines, output, _format_log_line)
            return
        found = list(lines)
    print_document(found, output, lambda: render_facts({}))


def _format_log_line(line: Mapping[str, Any]) -> str:
    return str(line["text"])


JobJson = Mapping[str, Any]
TERMINAL_STATES = frozenset({"succeeded", "failed", "cancelled"})


def render_jobs(jobs: Iterable[JobJson]) -> RenderableType:
    now_s = time.time()
    return render_table(
        (
            [
                job["id"],
                job["state"],
                format_duration(now_s - job["state_since_s"]),
                format_gpu_range(job),
                format_plan(job),
                format_progress(job),
                format_duration(job["progress"]["remaining_s"]),
            ]
            for job in jobs
        ),
        headers=["job", "state", "for", "GPUs", "plan", "progress", "left"],
        right_aligned=["for", "left"],
        empty="There are no jobs.",
    )


def summarize_job(job: JobJson) -> dict[str, str]:
    """A job after a change, in one line."""
    wanted = "" if job["intent"] == "run" else f", to {job['intent']}"
    return {job["id"]: f"{job['state']}{wanted}, {format_gpu_range(job)} GPUs"}


def render_job(job: JobJson) -> RenderableType:
    account, progress, now_s = job["account"], job["progress"], time.time()
    spec, state = job["spec"], f"{job['state']} for {format_duration(now_s - job['state_since_s'])}"
    shown = {
        "job": job["id"],
        "name": job["name"],
        "state": f"{state} ({job['message']})" if job["message"] else state,
        "owner wants": job["intent"],
        "queue, priority": f"{job['queue']}, {job['priority']}",
        "submitted": f"{format_time(job['submitted_at_s'])} UTC",
        "GPUs": format_gpu_range(job),
        "on": format_nodes(job["nodes"]),
        "leaving": _format_releasing(job),
        "model": _format_model(spec),
        "plan": job["plan"] or "none",
        "progress": format_progress(job),
        "step time": format_duration(progress["step_time_s"]),
        "time left": format_duration(progress["remaining_s"]),
        "checkpoint": f"at step {format_number(progress['checkpoint_steps'])}",
        "loss": format_number(progress["loss"], 4),
        "throughput": _format_throughput(progress["samples_per_s"]),
        "memory": _format_memory(progress["peak_bytes"], job["memory"]),
        "frozen layers": format_number(progress["frozen_layers"]),
        "has waited": format_duration(account["waited_s"]),
        "has used": f"{format_number(account['gpu_s'] / 3600, 2)} GPU hours",
        "has lost": f"{format_number(account['lost_gpu_s'] / 3600, 2)} GPU hours",
        "so far": ", ".join(format_count(account[f"{what}s"], what) for what in ("resize", "preemption", "failure")),
        "command": " ".join(spec.get("command") or []) or "-",
    }
    return render_facts({name: value for name, value in shown.items() if value})


def render_dry_run(answer: JobJson) -> RenderableType:
    """What would become of a job that is not submitted yet."""
    job, explanation = answer["job"], answer["explanation"]
    others = [f"{other['kind']} {other['subject']}: {other['reason']['detail']}" for other in answer["others"]]
    shown = {
        "it would be": answer["state"],
        "GPUs": format_gpu_range(job) if job else "",
        "on": format_nodes(job["nodes"]) if job and job["nodes"] else "",
        "plan": job["plan"] if job else "",
        "because": answer["reason"]["detail"] if answer["reason"] else "",
        "unblocked by": explanation["unblocks"] if explanation else "",
        "others": "; ".join(others),
    }
    return render_facts({name: value for name, value in shown.items() if value})


def format_gpu_range(job: JobJson) -> str:
    """`3 of 1-4`, with what is still being left."""
    has = job["gpus"]
    span_ = f"{has['min']}-{has['max']}" if has["max"] > has["min"] else str(has["max"])
    leaving = f" (leaving {has['releasing']})" if has["releasing"] else ""
    return f"{has['target']} of {span_}{leaving}"


def format_plan(job: JobJson) -> str:
    """How the plan spreads the job, its micro-batches left out."""
    return job["plan"].rpartition(" · ")[0] if job["plan"] else "-"


def format_progress(job: JobJson) -> str:
    progress = job["progress"]
    done = format_number(progress["steps"], 0)
    if progress["steps_total"]:
        return f"{format_percent(progress['fraction'])}, {done}/{format_number(progress['steps_total'])}"
    return f"step {done}"


def format_nodes(gpus_by_node: Mapping[str, list[int]]) -> str:
    from scheduler.domain import gpu_sets

    return gpu_sets.format_gpus({node: tuple(indices) for node, indices in gpus_by_node.items()})


def _format_releasing(job: JobJson) -> str:
    if not job["releasing_nodes"]:
        return ""
    deadline = f" by {format_time(job['leave_by_s'])} UTC" if job["leave_by_s"] is not None else ""
    return format_nodes(job["releasing_nodes"]) + deadline


def _format_model(spec: Mapping[str, Any]) -> str:
    model = spec.get("model") or ("a profile of its own" if spec.get("profile") else "")
    if not model:
        return "none: data parallel alone"
    at = f", {spec['sequenceLength']} tokens" if spec.get("sequenceLength") else ""
    return f"{model}, global batch {spec['globalBatch']}{at}"


def _format_throughput(samples_per_s: float | None) -> str:
    return "" if samples_per_s is None else f"{format_number(samples_per_s, 2)} samples/s"


def _format_memory(peak_bytes: int | None, memory: Mapping[str, Any]) -> str:
    """`peak 71.2 GB a GPU; taken to need 1.15 times what is predicted, died of memory once`."""
    parts = [] if peak_bytes is None else [f"peak {format_bytes(peak_bytes)} a GPU"]
    if memory["deaths"]:
        parts.append(f"taken to need {memory['factor']:.2f} times what is predicted")
        parts.append(f"{format_count(len(memory['deaths']), 'death')} by memory")
    return ", ".join(parts)
