"""Jobs, as the service tells of them, drawn for people."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from scheduler.cli.humanise import clock, counted, number, share, size, span
from scheduler.cli.output import columns, facts

if TYPE_CHECKING:
    from rich.console import RenderableType

JobJson = Mapping[str, Any]
ENDED = frozenset({"succeeded", "failed", "cancelled"})


def job_rows(jobs: Iterable[JobJson]) -> RenderableType:
    now_s = time.time()
    return columns(
        (
            [
                job["id"],
                job["state"],
                span(now_s - job["state_since_s"]),
                gpus_text(job),
                spread_text(job),
                progress_text(job),
                span(job["progress"]["remaining_s"]),
            ]
            for job in jobs
        ),
        heads=["job", "state", "for", "GPUs", "plan", "progress", "left"],
        right=["for", "left"],
        empty="There are no jobs.",
    )


def line_of(job: JobJson) -> dict[str, str]:
    """A job after a change, in one line."""
    wanted = "" if job["intent"] == "run" else f", to {job['intent']}"
    return {job["id"]: f"{job['state']}{wanted}, {gpus_text(job)} GPUs"}


def describe_view(job: JobJson) -> RenderableType:
    account, progress, now_s = job["account"], job["progress"], time.time()
    spec, state = job["spec"], f"{job['state']} for {span(now_s - job['state_since_s'])}"
    shown = {
        "job": job["id"],
        "name": job["name"],
        "state": f"{state} ({job['message']})" if job["message"] else state,
        "owner wants": job["intent"],
        "queue, priority": f"{job['queue']}, {job['priority']}",
        "submitted": f"{clock(job['submitted_at_s'])} UTC",
        "GPUs": gpus_text(job),
        "on": nodes_text(job["nodes"]),
        "leaving": _leaving_text(job),
        "model": _model_text(spec),
        "plan": job["plan"] or "none",
        "progress": progress_text(job),
        "step time": span(progress["step_time_s"]),
        "time left": span(progress["remaining_s"]),
        "checkpoint": f"at step {number(progress['checkpoint_steps'])}",
        "loss": number(progress["loss"], 4),
        "throughput": _throughput_text(progress["samples_per_s"]),
        "memory": _memory_text(progress["peak_bytes"], job["memory"]),
        "frozen layers": number(progress["frozen_layers"]),
        "has waited": span(account["waited_s"]),
        "has used": f"{number(account['gpu_s'] / 3600, 2)} GPU hours",
        "has lost": f"{number(account['lost_gpu_s'] / 3600, 2)} GPU hours",
        "so far": ", ".join(counted(account[f"{what}s"], what) for what in ("resize", "preemption", "failure")),
        "command": " ".join(spec.get("command") or []) or "-",
    }
    return facts({name: value for name, value in shown.items() if value})


def dry_run_view(answer: JobJson) -> RenderableType:
    """What would become of a job that is not submitted yet."""
    job, explanation = answer["job"], answer["explanation"]
    others = [f"{other['kind']} {other['subject']}: {other['reason']['detail']}" for other in answer["others"]]
    shown = {
        "it would be": answer["state"],
        "GPUs": gpus_text(job) if job else "",
        "on": nodes_text(job["nodes"]) if job and job["nodes"] else "",
        "plan": job["plan"] if job else "",
        "because": answer["reason"]["detail"] if answer["reason"] else "",
        "unblocked by": explanation["unblocks"] if explanation else "",
        "others": "; ".join(others),
    }
    return facts({name: value for name, value in shown.items() if value})


def gpus_text(job: JobJson) -> str:
    """`3 of 1-4`, with what is still being left."""
    has = job["gpus"]
    span_ = f"{has['min']}-{has['max']}" if has["max"] > has["min"] else str(has["max"])
    leaving = f" (leaving {has['releasing']})" if has["releasing"] else ""
    return f"{has['target']} of {span_}{leaving}"


def spread_text(job: JobJson) -> str:
    """How the plan spreads the job, its micro-batches left out."""
    return job["plan"].rpartition(" · ")[0] if job["plan"] else "-"


def progress_text(job: JobJson) -> str:
    progress = job["progress"]
    done = number(progress["steps"], 0)
    if progress["steps_total"]:
        return f"{share(progress['fraction'])}, {done}/{number(progress['steps_total'])}"
    return f"step {done}"


def nodes_text(held: Mapping[str, list[int]]) -> str:
    from scheduler.domain import gpus as gpu_sets

    return gpu_sets.text({node: tuple(indices) for node, indices in held.items()})


def _leaving_text(job: JobJson) -> str:
    if not job["releasing_nodes"]:
        return ""
    deadline = f" by {clock(job['leave_by_s'])} UTC" if job["leave_by_s"] is not None else ""
    return nodes_text(job["releasing_nodes"]) + deadline


def _model_text(spec: Mapping[str, Any]) -> str:
    model = spec.get("model") or ("a profile of its own" if spec.get("profile") else "")
    if not model:
        return "none: data parallel alone"
    at = f", {spec['sequenceLength']} tokens" if spec.get("sequenceLength") else ""
    return f"{model}, global batch {spec['globalBatch']}{at}"


def _throughput_text(samples_per_s: float | None) -> str:
    return "" if samples_per_s is None else f"{number(samples_per_s, 2)} samples/s"


def _memory_text(peak_bytes: int | None, memory: Mapping[str, Any]) -> str:
    """`peak 71.2 GB a GPU; taken to need 1.15 times what is predicted, died of memory once`."""
    parts = [] if peak_bytes is None else [f"peak {size(peak_bytes)} a GPU"]
    if memory["deaths"]:
        parts.append(f"taken to need {memory['factor']:.2f} times what is predicted")
        parts.append(f"{counted(len(memory['deaths']), 'death')} by memory")
    return ", ".join(parts)
