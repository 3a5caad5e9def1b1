"""Job commands (`ps`, `describe`, `scale`, `label`, `suspend`, `resume`, `cancel`, `logs`) and their tables."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.completion import complete_job_ids, complete_queue_names
from cli.connection import DEFAULT_URL, UrlOption, service_client
from cli.inputs import parse_label, raise_input_error
from cli.job_lookup import find_job_id
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

    from ebbtide.client import Client
    from ebbtide.client.views import JobView


JobArgument = Annotated[
    str,
    typer.Argument(
        metavar="JOB", autocompletion=complete_job_ids, help="ID or name of the job, or the beginning of one."
    ),
]
JobStateOption = Annotated[
    str,
    typer.Option("--state", help="Show only jobs in these states, or `live` or `ended`, separated by commas."),
]
AllOption = Annotated[bool, typer.Option("-a", "--all", help="Show jobs in all states, however long ago they ended.")]
MineOption = Annotated[bool, typer.Option("--mine", help="Show only jobs that you own.")]
QueueFilterOption = Annotated[
    str,
    typer.Option(
        "--queue", autocompletion=complete_queue_names, help="Show only jobs in these queues, separated by commas."
    ),
]
NameFilterOption = Annotated[str, typer.Option("--name", help="Show only jobs whose name starts with this text.")]
SelectorOption = Annotated[
    str,
    typer.Option(
        "-l",
        "--selector",
        metavar="SELECTOR",
        help="Show only jobs whose labels match, such as team=vision,tier!=dev,stage in (a,b),urgent,!debug.",
    ),
]
ShowLabelsOption = Annotated[bool, typer.Option("--show-labels", help="Add a column with the labels.")]
LabelsArgument = Annotated[
    list[str],
    typer.Argument(metavar="KEY=VALUE|KEY-...", help="Labels to set (team=vision) and labels to remove (team-)."),
]
LimitOption = Annotated[int, typer.Option("-n", "--limit", min=1, max=100_000, help="Show at most this many jobs.")]
MaxGpusOption = Annotated[int | None, typer.Option("--max", help="Most GPUs that the job can use.")]
MinGpusOption = Annotated[int | None, typer.Option("--min", help="Fewest GPUs that the job can run on.")]

JOBS_PAGE_SIZE = 1000
LIMIT_DEFAULT = 200
RECENT_FAILURES_S = 86_400.0
"""`ebbtide ps` shows jobs that failed at most this long ago besides the live ones."""


@dataclass(frozen=True, slots=True)
class JobSelection:
    """The jobs that `ebbtide ps` shows, newest first. An empty `state` stands for live jobs and recent failures."""

    state: str
    queue: str
    name: str
    owner_id: str
    selector: str
    limit: int

    def list_jobs(self, client: Client) -> tuple[list[JobView], bool]:
        """Return the jobs, and whether there are more."""
        page_size = min(self.limit + 1, JOBS_PAGE_SIZE)
        find = partial(
            client.jobs,
            queue=self.queue,
            name=self.name,
            owner_id=self.owner_id,
            selector=self.selector,
            limit=page_size,
        )
        if self.state:
            found = [find(state="" if self.state == "all" else self.state)]
        else:
            found = [find(state="live"), find(state="failed", ended_within_s=RECENT_FAILURES_S)]
        jobs = {job["id"]: job for jobs in found for job in islice(jobs, self.limit + 1)}
        newest = sorted(jobs.values(), key=lambda job: (-job["submitted_at_s"], job["id"]))
        return newest[: self.limit], len(newest) > self.limit


def ps(
    *,
    mine: MineOption = False,
    queue: QueueFilterOption = "",
    name: NameFilterOption = "",
    selector: SelectorOption = "",
    state: JobStateOption = "",
    everything: AllOption = False,
    limit: LimitOption = LIMIT_DEFAULT,
    show_labels: ShowLabelsOption = False,
    watch: WatchOption = False,
    every: IntervalOption = 2.0,
    url: UrlOption = DEFAULT_URL,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """List live jobs, and those that failed in the last 24 hours. `--state` and `--all` show others."""
    require_table(output, watch)
    if everything and state:
        raise_input_error("--all: cannot be combined with --state. Use one of them.")
    with service_client(url) as client:
        shown_state = "all" if everything else state
        selection = JobSelection(shown_state, queue, name, "me" if mine else "", selector, limit)
        if watch:
            refresh_view(lambda: render_jobs(selection.list_jobs(client)[0], show_labels=show_labels), every)
            return
        jobs, has_more = selection.list_jobs(client)
    print_document(jobs, output, lambda: render_jobs(jobs, show_labels=show_labels))
    if has_more:
        print_message(f"Only the newest {limit} jobs are shown. Use --limit to see more.")


def describe(job: JobArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE) -> None:
    """Show the details of one job."""
    with service_client(url) as client:
        result = client.job(find_job_id(client, job))
    print_document(result, output, lambda: render_job(result))


def scale(
    job: JobArgument,
    max_gpus: MaxGpusOption = None,
    min_gpus: MinGpusOption = None,
    url: UrlOption = DEFAULT_URL,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Change the GPU range of a job. A bound that is not given stays as it is."""
    if max_gpus is None and min_gpus is None:
        raise_input_error("scale: nothing to change. Set --min, --max or both.")
    with service_client(url) as client:
        response = client.scale(find_job_id(client, job), max_gpus=max_gpus, min_gpus=min_gpus)
    print_document(response, output, lambda: render_facts(summarize_job(response)))


def label(
    job: JobArgument, labels: LabelsArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE
) -> None:
    """Set and remove labels of a job that has not ended."""
    changes = dict(_parse_label_change(item) for item in labels)
    with service_client(url) as client:
        response = client.change_job(find_job_id(client, job), {"labels": changes})
    print_document(response, output, lambda: render_facts({response["id"]: format_labels(response) or "no labels"}))


def _parse_label_change(item: str) -> tuple[str, str | None]:
    if item.endswith("-") and "=" not in item:
        return item[:-1], None
    return parse_label("KEY=VALUE|KEY-", item)


def suspend(job: JobArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE) -> None:
    """Checkpoint a job and release its GPUs. `ebbtide resume` starts it again."""
    with service_client(url) as client:
        response = client.suspend(find_job_id(client, job))
    print_document(response, output, lambda: render_facts(summarize_job(response)))


def resume(job: JobArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE) -> None:
    """Resume a suspended job."""
    with service_client(url) as client:
        response = client.resume(find_job_id(client, job))
    print_document(response, output, lambda: render_facts(summarize_job(response)))


def cancel(job: JobArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE) -> None:
    """Cancel a job and keep its last checkpoint."""
    with service_client(url) as client:
        response = client.cancel(find_job_id(client, job))
    print_document(response, output, lambda: render_facts(summarize_job(response)))


RankOption = Annotated[int, typer.Option("--rank", min=0, help="Rank whose log to print, from 0.")]
TailOption = Annotated[int | None, typer.Option("--tail", min=0, help="Print only this many lines, from the end.")]
GenerationOption = Annotated[
    int | None,
    typer.Option("--generation", min=1, help="Run of the job to print. Default: the latest.", show_default=False),
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
    """Print the log of one rank of a job. With -f, keep printing until the job ends."""
    with service_client(url) as client:
        read = client.follow_logs if follow else client.logs
        lines = read(find_job_id(client, job), rank=rank, generation=generation, tail=tail)
        if output is OutputFormat.TABLE or follow:
            print_stream(lines, output, _format_log_line)
            return
        result = list(lines)
    print_document(result, output, lambda: render_facts({}))


def _format_log_line(line: Mapping[str, Any]) -> str:
    return str(line["text"])


JobJson = Mapping[str, Any]


FAILURE_WIDTH = 60


def render_jobs(jobs: Iterable[JobJson], *, show_labels: bool = False) -> RenderableType:
    """Return a table of jobs. The column `last failure` is there only if a job has one."""
    now_s, rows = time.time(), list(jobs)
    headers = ["job", "state", "for", "GPUs", "plan", "progress", "left"]
    show_failures = any(job["failure"] for job in rows)
    return render_table(
        (
            [
                job["id"],
                job["state"],
                format_duration(now_s - job["state_since_s"]),
                format_gpu_range(job),
                format_plan(job),
                format_progress(job),
                format_time_left(job),
                *([format_last_failure(job)] if show_failures else []),
                *([format_labels(job)] if show_labels else []),
            ]
            for job in rows
        ),
        headers=[*headers, *(["last failure"] if show_failures else []), *(["labels"] if show_labels else [])],
        right_aligned=["for", "left"],
        empty="There are no jobs.",
    )


def format_last_failure(job: JobJson) -> str:
    """Format the cause and the last line of the log: `import-error: ModuleNotFoundError: No module named 'apex'`."""
    failure = job["failure"]
    if failure is None or job["state"] == "succeeded":
        return ""
    line = failure["reason"].rpartition(" | ")[2]
    text = f"{failure['code']}: {line}" if failure["code"] else line
    return text if len(text) <= FAILURE_WIDTH else f"{text[: FAILURE_WIDTH - 3]}..."


def summarize_job(job: JobJson) -> dict[str, str]:
    """Return one line on a job for the output of a command that changed it."""
    intent = "" if job["intent"] == "run" else f", to {job['intent']}"
    return {job["id"]: f"{job['state']}{intent}, {format_gpu_range(job)} GPUs"}


def render_job(job: JobJson) -> RenderableType:
    account, progress, now_s = job["account"], job["progress"], time.time()
    spec, state = job["spec"], f"{job['state']} for {format_duration(now_s - job['state_since_s'])}"
    facts = {
        "job": job["id"],
        "name": job["name"],
        "state": f"{state} ({job['message']})" if job["message"] else state,
        "intent": job["intent"],
        "queue, priority": f"{job['queue']}, {job['priority']}",
        "labels": format_labels(job),
        "submitted": f"{format_time(job['submitted_at_s'])} UTC",
        "GPUs": format_gpu_range(job),
        "nodes": format_nodes(job["nodes"]),
        "releasing": _format_releasing(job),
        "model": _format_model(spec),
        "plan": job["plan"] or "none",
        "progress": format_progress(job),
        "step time": format_step_time(job),
        "time left": format_time_left(job),
        "checkpoint": f"at step {format_number(progress['checkpoint_steps'])}",
        "loss": format_number(progress["loss"], 4),
        "throughput": _format_throughput(progress["samples_per_s"]),
        "memory": _format_memory(progress["peak_bytes"], job["memory"]),
        "frozen layers": format_number(progress["frozen_layers"]),
        "time pending": format_duration(account["waited_s"]),
        "GPU time used": f"{format_number(account['gpu_s'] / 3600, 2)} GPU-hours",
        "GPU time lost": f"{format_number(account['lost_gpu_s'] / 3600, 2)} GPU-hours",
        "disruptions": ", ".join(
            format_count(account[f"{kind}s"], kind) for kind in ("resize", "preemption", "failure")
        ),
        "on resize": job["resize_mode"],
        "last failure": job["failure"]["reason"] if job["failure"] else "",
        "command": " ".join(spec.get("command") or []) or "-",
    }
    return render_facts({name: value for name, value in facts.items() if value})


def render_dry_run(response: JobJson) -> RenderableType:
    """Return a table of the decisions that the scheduler would make for a job that has not been submitted."""
    job, explanation = response["job"], response["explanation"]
    others = [f"{other['kind']} {other['subject']}: {other['reason']['detail']}" for other in response["others"]]
    facts = {
        "state": response["state"],
        "GPUs": format_gpu_range(job) if job else "",
        "nodes": format_nodes(job["nodes"]) if job and job["nodes"] else "",
        "plan": job["plan"] if job else "",
        "reason": response["reason"]["detail"] if response["reason"] else "",
        "unblocked by": explanation["unblocks"] if explanation else "",
        "other decisions": "; ".join(others),
    }
    return render_facts({name: value for name, value in facts.items() if value})


def format_gpu_range(job: JobJson) -> str:
    """Format held GPUs and the GPU range: `3 of 1-4`, or `3 of 1-4 (releasing 1)`."""
    gpus = job["gpus"]
    gpu_range = f"{gpus['min']}-{gpus['max']}" if gpus["max"] > gpus["min"] else str(gpus["max"])
    releasing = f" (releasing {gpus['releasing']})" if gpus["releasing"] else ""
    return f"{gpus['target']} of {gpu_range}{releasing}"


def format_labels(job: JobJson) -> str:
    return ", ".join(f"{key}={value}" for key, value in job["labels"].items())


def format_plan(job: JobJson) -> str:
    """Format the plan's parallel degrees without its micro-batches."""
    return job["plan"].rpartition(" · ")[0] if job["plan"] else "-"


def format_progress(job: JobJson) -> str:
    """Format the progress: `12.5%, 125/1,000`, `step 125`, or `estimated 12.5%` for a job that never reported."""
    progress, estimate = job["progress"], job["progress"]["estimate"]
    if estimate is not None:
        known = estimate["fraction"]
        return f"estimated {format_percent(known)}" if known is not None else "not reported"
    done = format_number(progress["steps"], 0)
    if progress["steps_total"]:
        return f"{format_percent(progress['fraction'])}, {done}/{format_number(progress['steps_total'])}"
    return f"step {done}"


def format_time_left(job: JobJson) -> str:
    """Format the remaining time: `2h13m`, or `estimated 2h13m` for a job that never reported."""
    return _format_reported_duration(job, "remaining_s")


def format_step_time(job: JobJson) -> str:
    """Format the time of a step: `34 ms`, or `estimated 34 ms` for a job that never reported."""
    return _format_reported_duration(job, "step_time_s")


def _format_reported_duration(job: JobJson, name: str) -> str:
    estimate = job["progress"]["estimate"]
    if estimate is None or estimate[name] is None:
        return format_duration(job["progress"][name])
    return f"estimated {format_duration(estimate[name])}"


def format_nodes(gpus_by_node: Mapping[str, list[int]]) -> str:
    from scheduler.domain import gpu_sets

    return gpu_sets.format_gpus({node: tuple(indices) for node, indices in gpus_by_node.items()})


def _format_releasing(job: JobJson) -> str:
    if not job["releasing_nodes"]:
        return ""
    deadline = f" by {format_time(job['leave_by_s'])} UTC" if job["leave_by_s"] is not None else ""
    return format_nodes(job["releasing_nodes"]) + deadline


def _format_model(spec: Mapping[str, Any]) -> str:
    model = spec.get("model") or ("custom profile" if spec.get("profile") else "")
    if not model:
        return "none (data parallel only)"
    at = f", {spec['sequenceLength']} tokens" if spec.get("sequenceLength") else ""
    return f"{model}, global batch {spec['globalBatch']}{at}"


def _format_throughput(samples_per_s: float | None) -> str:
    return "" if samples_per_s is None else f"{format_number(samples_per_s, 2)} samples/s"


def _format_memory(peak_bytes: int | None, memory: Mapping[str, Any]) -> str:
    """Format memory use: `peak 71.2 GB per GPU, estimate raised by a factor of 1.15, 1 out-of-memory failure`."""
    parts = [] if peak_bytes is None else [f"peak {format_bytes(peak_bytes)} per GPU"]
    if memory["deaths"]:
        parts.append(f"estimate raised by a factor of {memory['factor']:.2f}")
        parts.append(format_count(len(memory["deaths"]), "out-of-memory failure"))
    return ", ".join(parts)
