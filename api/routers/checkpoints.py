"""Checkpoints: the latest of a job, and one more now."""

from __future__ import annotations

from api.answers.checkpoints import CheckpointsView, checkpoints_view
from api.dependencies import WorldDep
from api.problems import problems
from api.routing import noun_router
from scheduler.domain.command import CheckpointJob

router = noun_router("jobs")


@router.get("/jobs/{job_id}/checkpoints")
def get_checkpoints(job_id: str, world: WorldDep) -> CheckpointsView:
    """What is known of the job's checkpoints."""
    return checkpoints_view(world.job(job_id))


@router.post("/jobs/{job_id}:checkpoint", status_code=202, responses=problems(409))
def save_checkpoint(job_id: str, world: WorldDep) -> CheckpointsView:
    """Have the running job save at its next step boundary, and go on. To ask again before that is done changes nothing;
    `awaited` is null once it is."""
    job = world.live_job(job_id)
    if job.awaited_checkpoint is not None:
        return checkpoints_view(job)
    return checkpoints_view(world.send(CheckpointJob(job_id)).job(job_id))
