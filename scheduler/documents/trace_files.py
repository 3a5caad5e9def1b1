"""Trace files of `ebbtide simulate`: reading job and demand traces, and exporting a service's history as a trace."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from statistics import median

from scheduler.documents.csv_table import CsvRow, CsvTable, TraceError, open_table
from scheduler.documents.trace_formats import JOB_COLUMNS, JOB_OPTIONAL_COLUMNS, DemandRow, JobRow, detect_dialect
from scheduler.domain.fleet import DemandReading
from scheduler.domain.job import Job

__all__ = ["DemandRow", "JobRow", "TraceError", "read_demand", "read_jobs"]

TIME_S_MAX = 10 * 365 * 86_400.0
"""Longest duration of a job, and latest submission after the first one."""
DEMAND_COLUMNS = ("time_s", "pool")
DEMAND_AMOUNT_COLUMNS = ("gpus", "load")
_SAMPLED_STEPS_MIN, _UNEVEN_SHARE = 4, 0.1
WIDE_TIME_COLUMNS = ("time_s", "timestamp")


def read_jobs(path: Path, *, workload: str = "") -> tuple[JobRow, ...]:
    """Read the jobs of a trace, in order of submission, in any format of `trace_formats`.

    `workload` selects one workload of a file with several. Empty selects all of them.

    Raises:
        TraceError: the file cannot be read, does not contain the workload, or has an invalid row.
    """
    table = open_table(path)
    dialect = detect_dialect(table)
    if workload and not dialect.workload_column:
        raise TraceError(f"{path}: workload: got {workload!r}; allowed: none; the file has one workload")
    rows: list[JobRow] = []
    seen: dict[str, int] = {}
    last_s: dict[str, float] = {}
    for cells in table.rows:
        row, group = dialect.parse_row(cells), cells.texts.get(dialect.workload_column, "")
        if row.job_id in seen:
            raise TraceError(
                f"{path} line {row.line}: job_id: got {row.job_id[:80]!r}; allowed: a unique id; "
                f"line {seen[row.job_id]} has the same"
            )
        _check_time_range(row, rows[0].submit_time_s if rows else row.submit_time_s)
        if row.submit_time_s < last_s.get(group, -math.inf):
            raise TraceError(
                f"{path} line {row.line}: submit_time_s: got '{row.submit_time_s:g}'; allowed: at least "
                f"{last_s[group]:g}, the time of the previous row; sort the file"
            )
        seen[row.job_id], last_s[group] = row.line, row.submit_time_s
        if workload in ("", group):
            rows.append(row)
    if not rows:
        if last_s:
            raise TraceError(f"{path}: workload: got {workload!r}; allowed: {', '.join(last_s)}")
        raise TraceError(f"{path} line 1: the file has no rows; add at least one job")
    return tuple(sorted(rows, key=lambda row: row.submit_time_s))


def _check_time_range(row: JobRow, first_s: float) -> None:
    for field, value, most in (
        ("duration_s", row.duration_s, TIME_S_MAX),
        ("submit_time_s", row.submit_time_s, first_s + TIME_S_MAX),
    ):
        if value > most:
            allowed = f"at most {most:g}; jobs and traces are limited to ten years"
            raise TraceError(f"{row.path} line {row.line}: {field}: got '{value:g}'; allowed: {allowed}")


def read_demand(path: Path) -> tuple[DemandRow, ...]:
    """Read the demand of all pools or series of a trace, each with ascending times.

    Ebbtide's format has one row per time and pool. In the wide format, each column other than `time_s` (or `timestamp`,
    relative to the first one) is one series of load.

    Raises:
        TraceError: the file cannot be read, a row is invalid, or a row is missing in evenly spaced samples.
    """
    table = open_table(path)
    rows: list[DemandRow] = []
    last_s: dict[str, float] = {}
    for cells, row in _parse_demand_rows(table):
        if row.time_s <= last_s.get(row.pool, -math.inf):
            allowed = f"above {last_s[row.pool]:g}, the time of the previous row of pool {row.pool}"
            raise cells.cell_error(table.header[0] if row.shared else "time_s", allowed)
        last_s[row.pool] = row.time_s
        rows.append(row)
    if not rows:
        raise TraceError(f"{path} line 1: the file has no rows; add at least one demand reading")
    _check_sampling_gaps(rows)
    return tuple(rows)


def _check_sampling_gaps(rows: Iterable[DemandRow]) -> None:
    """Reject gaps in sampled demand.

    Demand is a step function with changes at any time. If almost all rows are evenly spaced, it was sampled, and a
    longer step is a gap in the recording.
    """
    by_pool: dict[str, list[DemandRow]] = {}
    for row in rows:
        by_pool.setdefault(row.pool, []).append(row)
    for pool_rows in by_pool.values():
        steps_s = [later.time_s - earlier.time_s for earlier, later in pairwise(pool_rows)]
        typical_s = median(steps_s) if len(steps_s) >= _SAMPLED_STEPS_MIN else math.inf
        uneven = sum(not math.isclose(step_s, typical_s) for step_s in steps_s)
        if uneven > max(1.0, _UNEVEN_SHARE * len(steps_s)):
            continue
        for (before, row), step_s in zip(pairwise(pool_rows), steps_s, strict=True):
            if step_s > 1.5 * typical_s:
                allowed = f"{before.time_s + typical_s:g}, {typical_s:g} s after the previous row"
                raise TraceError(
                    f"{row.path} line {row.line}: time_s: got '{row.time_s:g}'; allowed: {allowed}; "
                    f"the recording of {row.pool} has a gap"
                )


def _parse_demand_rows(table: CsvTable) -> Iterator[tuple[CsvRow, DemandRow]]:
    header = table.header
    ours = {"pool", *DEMAND_AMOUNT_COLUMNS} & {*header}
    if ours or len(header) < 2 or header[0] not in WIDE_TIME_COLUMNS:
        table.check_columns(DEMAND_COLUMNS, DEMAND_AMOUNT_COLUMNS)
        for cells in table.rows:
            yield cells, _parse_demand_row(cells)
        return
    time_s = _parse_time_s if header[0] == "time_s" else _make_timestamp_parser()
    for cells in table.rows:
        at_s = time_s(cells)
        for name in header[1:]:
            yield cells, DemandRow(cells.line, at_s, name, cells.number(name), True, True, str(cells.path))


def _parse_demand_row(cells: CsvRow) -> DemandRow:
    given = [name for name in DEMAND_AMOUNT_COLUMNS if cells.has(name)]
    if len(given) != 1:
        raise cells.cell_error("load" if given else "gpus", "exactly one of gpus and load in each row")
    amount, pool = cells.number(given[0]), cells.text("pool")
    return DemandRow(cells.line, cells.number("time_s"), pool, amount, given[0] == "load", path=str(cells.path))


def _parse_time_s(cells: CsvRow) -> float:
    return cells.number("time_s")


def _make_timestamp_parser() -> Callable[[CsvRow], float]:
    """Return a parser of timestamps to seconds since the first one. Timestamps without a zone are UTC."""
    first: list[datetime] = []

    def seconds(cells: CsvRow) -> float:
        try:
            at = datetime.fromisoformat(cells.texts["timestamp"])
        except ValueError:
            raise cells.cell_error("timestamp", "a time such as 2015-02-26 21:40:00") from None
        at = at if at.tzinfo else at.replace(tzinfo=UTC)
        if not first:
            first.append(at)
        return (at - first[0]).total_seconds()

    return seconds


_DEFAULT_ROW = JobRow(0, "", 0.0, 0.0, 0)


@dataclass(frozen=True, slots=True)
class TraceExport:
    """An exported trace, in seconds since the first submission or reading.

    `jobs` are in order of submission, `demand` in order of time. `skipped` are jobs without any work and without a
    known length.
    """

    jobs: tuple[JobRow, ...]
    demand: tuple[DemandRow, ...]
    skipped: tuple[str, ...]


def export_trace(jobs: Iterable[Job], readings: Mapping[str, Sequence[DemandReading]], now_s: float) -> TraceExport:
    """Build the trace of ended and live jobs and of the demand by pool."""
    listed = sorted(jobs, key=lambda job: (job.submitted_at_s, job.id))
    first_s = [of_pool[0].at_s for of_pool in readings.values() if of_pool]
    start_s = min([*first_s, *(job.submitted_at_s for job in listed[:1])], default=0.0)
    rows = {job.id: _build_job_row(job, start_s, now_s) for job in listed}
    asked = {
        (reading.at_s - start_s, pool): reading.asked_gpus for pool, of_pool in readings.items() for reading in of_pool
    }
    return TraceExport(
        jobs=tuple(row for row in rows.values() if row),
        demand=tuple(DemandRow(0, at_s, pool, asked[at_s, pool], False) for at_s, pool in sorted(asked)),
        skipped=tuple(job_id for job_id, row in rows.items() if row is None),
    )


def format_jobs_csv(rows: Iterable[JobRow]) -> str:
    """Format a JOBS file. It has the optional columns that some row needs; cells with default values are empty."""
    listed = list(rows)
    names = [name for name in JOB_OPTIONAL_COLUMNS if any(_format_optional_cell(row, name) for row in listed)]
    cells = (
        [*(_format_cell(getattr(row, n)) for n in JOB_COLUMNS), *(_format_optional_cell(row, n) for n in names)]
        for row in listed
    )
    return _format_csv([*JOB_COLUMNS, *names], cells)


def format_demand_csv(rows: Iterable[DemandRow]) -> str:
    return _format_csv(
        ["time_s", "pool", "gpus"], ([_format_cell(row.time_s), row.pool, _format_cell(row.amount)] for row in rows)
    )


def _build_job_row(job: Job, start_s: float, now_s: float) -> JobRow | None:
    """Return the job as if it had run on its average number of GPUs, or None if it has no work.

    Its work is the GPU-seconds used, without lost work. For a live job, the expected remaining work is added. The work
    of a job that ran on several GPU models counts as on the last of them.
    """
    spec, account = job.spec, (job if job.is_ended else job.advance_to(now_s)).account
    done_gpu_s = account.gpu_s - account.lost_gpu_s
    work_gpu_s = done_gpu_s + (0.0 if job.is_ended else _estimate_remaining_gpu_s(job, done_gpu_s, now_s))
    if job.progress.other_gpus:  # GPU-seconds on unlike models cannot be added
        remaining = None if job.is_ended else job.remaining_steps(now_s)
        work_gpu_s = (job.steps_at(now_s) + (remaining or 0.0)) * job.progress.corrections[-1][1]
    if work_gpu_s <= 0:
        return None
    gpus = min(max(round(_compute_mean_gpus(job, account.gpu_s, now_s)), spec.min_gpus), spec.max_gpus)
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
        user=job.owner_key,
        deadline_s=None if spec.deadline_s is None else submit_time_s + spec.deadline_s,
        gpu=spec.gpu,
        iterations=(spec.steps or round(job.progress.steps)) if spec.model and (spec.steps or job.is_ended) else 0,
        sequence_length=spec.sequence_length if spec.model else 0,
        ran_on=job.progress.measured_gpu,
    )


def _estimate_remaining_gpu_s(job: Job, done_gpu_s: float, now_s: float) -> float:
    """Estimate the remaining GPU-seconds of a job.

    The estimate uses the current speed, else the average speed, else the owner's estimate.
    """
    steps, done = job.remaining_steps(now_s), job.steps_at(now_s)
    if steps is not None and job.step_time_s() < float("inf"):
        return steps * job.step_time_s() * job.allocation.target_gpus
    if steps is not None and done > 0 and done_gpu_s > 0:
        return steps / done * done_gpu_s
    return max(0.0, (job.spec.duration_estimate_s or 0.0) * job.spec.min_gpus - done_gpu_s)


def _compute_mean_gpus(job: Job, gpu_s: float, now_s: float) -> float:
    """Return the average number of GPUs over the time in which the job held any, or 0."""
    account, started_s = job.account, job.account.first_started_at_s
    if started_s is None:
        return 0.0
    waited_since_s = max(0.0, account.waited_s - (started_s - job.submitted_at_s))
    held_s = (job.state_since_s if job.is_ended else now_s) - started_s - waited_since_s
    return gpu_s / held_s if held_s > 0 else 0.0


def _format_cell(value: object) -> str:
    return f"{value:.10g}" if isinstance(value, float) else str(value)


def _format_optional_cell(row: JobRow, name: str) -> str:
    value = getattr(row, name)
    return "" if value == getattr(_DEFAULT_ROW, name) else _format_cell(value)


def _format_csv(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return text.getvalue()
