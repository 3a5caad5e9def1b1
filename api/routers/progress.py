"""Progress: workers report how far a job is, and hear in the reply whether they have to leave."""

from __future__ import annotations

from typing import Annotated

from fastapi import Request
from pydantic import Field

from api.answers.agent import ProgressReplyView
from api.answers.job import ProgressView, progress_view
from api.dependencies import PrincipalDep, ServiceDep, WorldDep, require_worker
from api.errors import refuse
from api.notices import notice_for
from api.routing import noun_router
from api.world import load_world, new_command
from scheduler.core.frozen_layers import frozen_layers_fault
from scheduler.documents.document import Document
from scheduler.documents.job import COUNT_MAX
from scheduler.domain.command import ReportProgress

router = noun_router("jobs")

StepNumber = Annotated[int, Field(strict=True, ge=0, le=COUNT_MAX)]
ByteCount = Annotated[int, Field(strict=True, ge=0, lt=2**63)]


class ProgressReport(Document):
    """One report of rank 0. `peak_bytes`: the most memory that it has had at once. `frozen_layers`: so many of the
    first layers are frozen; absent: as many as before."""

    generation: StepNumber
    step: StepNumber
    loss: Annotated[float, Field(strict=True)] | None = None
    samples_per_s: Annotated[float, Field(strict=True, ge=0)] | None = None
    checkpoint_step: StepNumber | None = None
    peak_bytes: ByteCount | None = None
    frozen_layers: StepNumber | None = None


@router.get("/jobs/{job_id}/progress")
def get_job_progress(job_id: str, world: WorldDep) -> ProgressView:
    """How far the job is, and how fast."""
    return progress_view(world.job(job_id), world.now_s)


@router.post("/jobs/{job_id}/progress")
def report_job_progress(
    job_id: str, report: ProgressReport, request: Request, service: ServiceDep, principal: PrincipalDep
) -> ProgressReplyView:
    """Needs the token of this job and generation. The reply holds the notice to follow, or null.

    Frozen layers stay frozen: a lower number than before is refused, and so is one above the model's layers.
    """
    require_worker(service, request, job_id=job_id, generation=report.generation)
    # Not before: who has no such token costs the database nothing.
    world = load_world(service.present, service.store, service.clock.now_s(), principal)
    job = world.job(job_id)
    notice = notice_for(job, report.generation, world.now_s, service.agents)
    if notice is None:
        frozen = report.frozen_layers
        if frozen is not None and (fault := frozen_layers_fault(job, frozen)):
            refuse("frozen_layers", frozen, fault.removeprefix("it must be "))
        body = ReportProgress(
            job_id,
            report.generation,
            float(report.step),
            report.loss,
            _float_or_none(report.checkpoint_step),
            report.samples_per_s,
            report.peak_bytes,
            frozen,
        )
        # A worker without news repeats itself to hear of notices: the same id lets the inbox drop that.
        known = f"progress-{job_id}-{report.generation}-{report.step}-{report.checkpoint_step}-{frozen}"
        world.store.send(new_command(body, world.now_s, actor=f"worker of {job_id}", command_id=known))
    return {"notice": notice}


def _float_or_none(step: int | None) -> float | None:
    return None if step is None else float(step)
