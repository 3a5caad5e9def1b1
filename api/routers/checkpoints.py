"""Checkpoints: the latest of a job, and one more now."""

from __future__ import annotations

from fastapi import APIRouter

from api.answers.checkpoints import Checkpoints, checkpoints
from api.dependencies import WorldDep
from scheduler.domain.command import CheckpointJob

router = APIRouter(prefix="/v1", tags=["jobs"])


@router.get("/jobs/{job_id}/checkpoints")
def get_checkpoints(job_id: str, world: WorldDep) -> Checkpoints:
    """What is known of the job's checkpoints."""
    return checkpoints(world.job(job_id))


@router.post("/jobs/{job_id}:checkpoint", status_code=202)
def checkpoint(job_id: str, world: WorldDep) -> Checkpoints:
    """Have the running job save at its next step boundary, and go on. To ask again before that is done changes nothing;
    `awaited` is null once it is."""
    job = world.live_job(job_id)
    if job.awaited_checkpoint is not None:
        return checkpoints(job)
    return checkpoints(world.send(CheckpointJob(job_id)).job(job_id))
