"""`export-trace`: the history of a live service as files that `simulate` reads."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Annotated

import typer

from scheduler.cli.failure import Failed, blaming
from scheduler.cli.humanise import counted
from scheduler.cli.output import Format, OutputOption, emit, facts
from scheduler.cli.serve import DatabaseOption, read_settings

JobsOption = Annotated[Path, typer.Option("--jobs", metavar="JOBS.csv[.gz]", help="Where to write the jobs.")]
DemandOption = Annotated[Path, typer.Option("--demand", metavar="DEMAND.csv[.gz]", help="Where to write the demand.")]
_ALL_JOBS = 10**12


def export_trace(
    jobs: JobsOption = Path("jobs.csv"),
    demand: DemandOption = Path("demand.csv"),
    database_url: DatabaseOption = None,
    output: OutputOption = Format.TABLE,
) -> None:
    """Write the jobs and the demand that a service's database remembers, for `ebbtide simulate`."""
    from scheduler.documents.trace_export import demand_csv, jobs_csv
    from scheduler.documents.trace_export import export_trace as trace_of
    from scheduler.store.sql import SqlStore

    with blaming("--database-url"):
        store = SqlStore(database_url or read_settings().database_url)
    try:
        snapshot = store.load().snapshot
        known = {job.id: job for job in (*store.ended_jobs(limit=_ALL_JOBS), *snapshot.jobs.values())}
        readings = {pool: store.readings(pool, since_s=0.0) for pool in snapshot.pools}
    finally:
        store.close()
    trace = trace_of(known.values(), readings, snapshot.now_s)
    if not trace.jobs:
        raise Failed("jobs: there is nothing to export: no job has run or is known to run for some time")
    _write(jobs, jobs_csv(trace.jobs))
    document = {"jobs": len(trace.jobs), "demand": len(trace.demand), "skipped": list(trace.skipped)}
    told = {"jobs": f"{counted(len(trace.jobs), 'job')} in {jobs}"}
    if trace.demand:
        _write(demand, demand_csv(trace.demand))
        told["demand"] = f"{counted(len(trace.demand), 'reading')} in {demand}"
    if trace.skipped:
        told["left out"] = f"{', '.join(trace.skipped)}: nothing is known of their length"
    emit(document, output, lambda: facts(told))


def _write(path: Path, text: str) -> None:
    content = text.encode()
    try:
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    except OSError as wrong:
        raise Failed(f"{path}: cannot be written: {wrong.strerror or wrong}") from wrong
