"""Ended jobs by outcome, queue and reason."""

from __future__ import annotations

from scheduler.domain.decisions import ReasonCode, RejectJob, StopJob
from scheduler.domain.job import Job
from scheduler.domain.job_state import JobState
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.tick_report import TickReport
from scheduler.telemetry.metrics import JOBS_ENDED

COMPLETED = "Completed"
WORKERS_FAILED = "WorkersFailed"
"""The ranks ended with an error whose cause is unknown."""
START_REFUSED = "StartRefused"
"""Nodes refused the job's pods, and no retry is left."""
_USUAL_ENDS = (
    (JobState.SUCCEEDED, COMPLETED),
    (JobState.FAILED, WORKERS_FAILED),
    (JobState.CANCELLED, ReasonCode.OWNER_ASKED.value),
)


def declare_job_ends(report: TickReport) -> None:
    """Export the usual ends of each queue with a new job as 0: Prometheus sees no increase of a new series."""
    before, after = report.before.jobs, report.after.jobs
    if before is after:
        return
    for queue in {_name_queue(job, report.after) for job_id, job in after.items() if job_id not in before}:
        for state, reason in _USUAL_ENDS:
            JOBS_ENDED.labels(state.value, queue, reason)


def record_job_ends(report: TickReport) -> None:
    """Count the jobs that ended in this tick. Each has an event."""
    for job_id in {event.subject for event in report.events}:
        before, job = report.before.jobs.get(job_id), report.after.jobs.get(job_id)
        if job is not None and job.is_ended and (before is None or not before.is_ended):
            JOBS_ENDED.labels(job.state.value, _name_queue(job, report.after), _find_reason(job, report)).inc()


def _find_reason(job: Job, report: TickReport) -> str:
    """Return why the job ended: the code of the decision that ended it, or the cause of its last failed run."""
    for decision in report.decisions:
        if isinstance(decision, StopJob | RejectJob) and decision.job_id == job.id:
            return decision.reason.code.value
    if job.state is JobState.SUCCEEDED:
        return COMPLETED
    failure = job.failure
    if failure is None or failure.at_s != report.now_s:
        return START_REFUSED
    return failure.code or WORKERS_FAILED


def _name_queue(job: Job, snapshot: Snapshot) -> str:
    """Return the job's queue, empty if it is not declared: clients may name any queue."""
    return job.spec.queue if job.spec.queue in snapshot.queues else ""
