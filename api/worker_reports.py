"""Progress of jobs: the endpoints, and what agents report about a rank.

Rank 0 reports progress. The reply contains the notice to act on.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from fastapi import Request
from pydantic import Field

from api.agent_assignments import ProgressReplyView, select_notice
from api.http.dependencies import (
    ContextDep,
    JobIdPath,
    PrincipalDep,
    ServiceDep,
    create_router,
    require_worker,
)
from api.http.errors import raise_invalid_field
from api.identity.authorization import VIEWER, Caller, RouteRule, requires
from api.identity.principals import WORKER
from api.jobs import ProgressView, progress_view
from api.state import load_request_context, new_command
from scheduler.documents.document import Document
from scheduler.documents.job import COUNT_MAX
from scheduler.domain.commands import ReportProgress
from scheduler.domain.observation import RankLiveness, RankReport
from scheduler.executors.rank_status import parse_rank_status
from scheduler.scheduling.job_progress import frozen_layers_error

progress_router = create_router("jobs")

StepNumber = Annotated[int, Field(strict=True, ge=0, le=COUNT_MAX)]
ByteCount = Annotated[int, Field(strict=True, ge=0, lt=2**63)]


class ProgressReport(Document):
    """A report of rank 0."""

    generation: StepNumber = Field(description="Run of the job that reports. It must match the token.")
    step: StepNumber = Field(description="Number of optimizer steps done, over the whole job.")
    loss: Annotated[float, Field(strict=True)] | None = Field(
        default=None, description="Latest training loss. Null: unknown."
    )
    samples_per_s: Annotated[float, Field(strict=True, ge=0)] | None = Field(
        default=None, description="Measured throughput of all ranks, in samples per second. Null: unknown."
    )
    checkpoint_step: StepNumber | None = Field(
        default=None, description="Number of optimizer steps in the latest complete checkpoint. Null: none yet."
    )
    peak_bytes: ByteCount | None = Field(
        default=None, description="Largest GPU memory use of the reporting rank, in bytes. Null: unknown."
    )
    frozen_layers: StepNumber | None = Field(
        default=None, description="Number of leading layers that are no longer trained. Null: unchanged."
    )


@progress_router.get("/jobs/{job_id}/progress")
@requires(VIEWER)
def get_job_progress(job_id: JobIdPath, context: ContextDep) -> ProgressView:
    """Return the job's progress and speed."""
    return progress_view(context.job(job_id), context.now_s)


@progress_router.post("/jobs/{job_id}/progress")
@requires(RouteRule(Caller.WORKERS))
def report_job_progress(
    job_id: JobIdPath, report: ProgressReport, request: Request, service: ServiceDep, principal: PrincipalDep
) -> ProgressReplyView:
    """Report progress. Needs the token of this job and generation. The reply holds the notice to act on, or null.

    `frozen_layers` may only grow, up to the model's number of layers.
    """
    require_worker(service, request, job_id=job_id, generation=report.generation)
    # After the token check, so that requests without a valid token cost no database read.
    context = load_request_context(service.state_reader, service.store, service.clock.now_s(), principal)
    job = context.job(job_id)
    notice = select_notice(job, report.generation, context.now_s, service.agent_state)
    if notice is None:
        frozen = report.frozen_layers
        if frozen is not None and (fault := frozen_layers_error(job, frozen)):
            raise_invalid_field("frozen_layers", frozen, fault.removeprefix("it must be "))
        body = ReportProgress(
            job_id,
            report.generation,
            float(report.step),
            report.loss,
            _to_float(report.checkpoint_step),
            report.samples_per_s,
            report.peak_bytes,
            frozen,
        )
        worker = replace(WORKER, name=f"worker of {job_id}")
        # A worker repeats an unchanged report to get notices. The inbox drops commands with a known id.
        command_id = f"progress-{job_id}-{report.generation}-{report.step}-{report.checkpoint_step}-{frozen}"
        context.store.send(new_command(body, context.now_s, worker, command_id=command_id))
    return {"notice": notice}


def _to_float(step: int | None) -> float | None:
    return None if step is None else float(step)


RANKS_MAX = 256
TEXT_LENGTH_MAX = 8192
ExitCode = Annotated[int, Field(strict=True, ge=-255, le=255)]
ReportText = Annotated[str, Field(max_length=TEXT_LENGTH_MAX)]


class RankReportDocument(Document):
    """The state of one rank on the agent's node."""

    rank: StepNumber = Field(description="Number of the process among all ranks of the job, from 0.")
    exit_code: ExitCode | None = Field(
        default=None, description="Exit code of the process, negative if a signal ended it. Null: still running."
    )
    status: dict[str, Any] | None = Field(
        default=None, description="Content of the status file that the process writes. Null: none yet."
    )
    written_at_ns: ByteCount = Field(
        default=0, description="Modification time of the status file, in nanoseconds since 1970 (UTC)."
    )
    tail: ReportText = Field(default="", description="End of its log after a failure. Empty: no failure.")
    oom_kills: StepNumber | None = Field(
        default=None,
        description=(
            "Out-of-memory kills that the kernel counted in its control group, read after its end. Null: unknown."
        ),
    )
    liveness: RankLiveness | None = Field(
        default=None,
        description="`stepping`, `working`, `stalled`, `busy` or `idle`, as its agent observes it. Null: not observed.",
    )
    inactive_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        default=0.0, description="Seconds without progress of a stalled or idle process."
    )
    stack: ReportText = Field(
        default="", description="Innermost frames of the main thread of a stalled or idle process. Empty: unknown."
    )


def to_rank_report(number: int, document: RankReportDocument) -> RankReport:
    try:
        status = None if document.status is None else parse_rank_status(document.status, document.written_at_ns)
    except ValueError as error:
        raise_invalid_field(f"ranks.{number}.status", document.status, f"a valid rank status file: {error}")
    return RankReport(
        rank=document.rank,
        exit_code=document.exit_code,
        status=status,
        tail=document.tail,
        oom_kills=document.oom_kills,
        liveness=document.liveness,
        inactive_s=document.inactive_s,
        stack=document.stack,
    )
