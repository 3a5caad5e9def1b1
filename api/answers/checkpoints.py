"""Checkpoints of a job, as answers."""

from __future__ import annotations

from typing_extensions import TypedDict

from scheduler.domain.job import Job


class CheckpointView(TypedDict):
    """Complete since `completed_at_s`, with all that `step` steps have made."""

    step: int
    completed_at_s: float


class AwaitedCheckpointView(TypedDict):
    """Asked for at `asked_at_s`; it will hold `step_min` steps or more, null until the ranks were heard."""

    asked_at_s: float
    step_min: int | None


class CheckpointsView(TypedDict):
    """`latest` is what a crash would fall back to. `dir` is empty where the executor has chosen the folder."""

    job_id: str
    latest: CheckpointView | None
    awaited: AwaitedCheckpointView | None
    interval_s: float
    keep: int
    dir: str


def checkpoints_view(job: Job) -> CheckpointsView:
    progress, spec, wish = job.progress, job.spec.checkpoint, None if job.is_ended else job.awaited_checkpoint
    step = int(progress.checkpoint_steps)
    step_min = None if wish is None or wish.steps is None else int(wish.steps)
    return {
        "job_id": job.id,
        "latest": {"step": step, "completed_at_s": progress.checkpoint_at_s} if step else None,
        "awaited": {"asked_at_s": wish.asked_at_s, "step_min": step_min} if wish else None,
        "interval_s": spec.interval_s,
        "keep": spec.keep,
        "dir": spec.dir,
    }
