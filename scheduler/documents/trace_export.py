"""A live service's history as a trace that `ebbtide simulate` reads back."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from scheduler.documents.job_dialects import JOB_COLUMNS, JOB_OPTIONAL
from scheduler.documents.trace_rows import DemandRow, JobRow
from scheduler.domain.fleet import DemandReading
from scheduler.domain.job import Job

_PLAIN = JobRow(0, "", 0.0, 0.0, 0)


@dataclass(frozen=True, slots=True)
class Exported:
    """`jobs` in order of submission, `demand` in order of time, both in seconds from the first thing that happened.
    `skipped`: jobs that did nothing and of which nobody knows how long they are."""

    jobs: tuple[JobRow, ...]
    demand: tuple[DemandRow, ...]
    skipped: tuple[str, ...]


def export_trace(jobs: Iterable[Job], readings: Mapping[str, Sequence[DemandReading]], now_s: float) -> Exported:
    """The trace of jobs that ended and of live ones, and of the demand by pool."""
    listed = sorted(jobs, key=lambda job: (job.submitted_at_s, job.id))
    first_s = [of_pool[0].at_s for of_pool in readings.values() if of_pool]
    start_s = min([*first_s, *(job.submitted_at_s for job in listed[:1])], default=0.0)
    rows = {job.id: _job_row(job, start_s, now_s) for job in listed}
    asked = {
        (reading.at_s - start_s, pool): reading.asked_gpus for pool, of_pool in readings.items() for reading in of_pool
    }
    return Exported(
        jobs=tuple(row for row in rows.values() if row),
        demand=tuple(DemandRow(0, at_s, pool, asked[at_s, pool], False) for at_s, pool in sorted(asked)),
        skipped=tuple(job_id for job_id, row in rows.items() if row is None),
    )


def jobs_csv(rows: Iterable[JobRow]) -> str:
    """The rows as a JOBS file: with the optional columns that some row needs, empty where a row has what is usual."""
    listed = list(rows)
    names = [name for name in JOB_OPTIONAL if any(_optional(row, name) for row in listed)]
    cells = ([*(_cell(getattr(row, n)) for n in JOB_COLUMNS), *(_optional(row, n) for n in names)] for row in listed)
    return _csv([*JOB_COLUMNS, *names], cells)


def demand_csv(rows: Iterable[DemandRow]) -> str:
    return _csv(["time_s", "pool", "gpus"], ([_cell(row.time_s), row.pool, _cell(row.amount)] for row in rows))


def _job_row(job: Job, start_s: float, now_s: float) -> JobRow | None:
    """The job as if it had kept to the GPUs that it had on average: its GPU-seconds but for those whose work was lost,
    and for a live one those that it is expected to need still."""
    spec, account = job.spec, (job if job.is_ended else job.settled(now_s)).account
    done_gpu_s = account.gpu_s - account.lost_gpu_s
    work_gpu_s = done_gpu_s + (0.0 if job.is_ended else _left_gpu_s(job, done_gpu_s, now_s))
    if work_gpu_s <= 0:
        return None
    gpus = min(max(round(_mean_gpus(job, account.gpu_s, now_s)), spec.min_gpus), spec.max_gpus)
    submit_time_s = job.submitted_at_s - start_s
    return JobRow(
        line=0,
        job_id=job.id,
        submit_time_s=submit_time_s,
        duration_s=work_gpu_s / gpus,
        gpus=gpus,
        min_gpus=spec.min_gpus,
        max_gpus=spec.max_gpus,
        model=spec.model,
        global_batch=spec.global_batch if spec.model else 0,
        priority=spec.priority,
        queue=spec.queue,
        user=job.owner,
        deadline_s=None if spec.deadline_s is None else submit_time_s + spec.deadline_s,
        gpu=spec.gpu,
        iterations=(spec.steps or round(job.progress.steps)) if spec.model and (spec.steps or job.is_ended) else 0,
        sequence_length=spec.sequence_length if spec.model else 0,
    )


def _left_gpu_s(job: Job, done_gpu_s: float, now_s: float) -> float:
    """At the speed it has, else at the one that it had, else as its owner estimated for its minimum."""
    steps, done = job.remaining_steps(now_s), job.steps_at(now_s)
    if steps is not None and job.step_time_s() < float("inf"):
        return steps * job.step_time_s() * job.allocation.target_gpus
    if steps is not None and done > 0 and done_gpu_s > 0:
        return steps / done * done_gpu_s
    return max(0.0, (job.spec.duration_estimate_s or 0.0) * job.spec.min_gpus - done_gpu_s)


def _mean_gpus(job: Job, gpu_s: float, now_s: float) -> float:
    """GPUs while it had any; 0 for a job that never had."""
    account, started_s = job.account, job.account.first_started_at_s
    if started_s is None:
        return 0.0
    waited_since_s = max(0.0, account.waited_s - (started_s - job.submitted_at_s))
    held_s = (job.state_since_s if job.is_ended else now_s) - started_s - waited_since_s
    return gpu_s / held_s if held_s > 0 else 0.0


def _cell(value: object) -> str:
    return f"{value:.10g}" if isinstance(value, float) else str(value)


def _optional(row: JobRow, name: str) -> str:
    value = getattr(row, name)
    return "" if value == getattr(_PLAIN, name) else _cell(value)


def _csv(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return text.getvalue()
