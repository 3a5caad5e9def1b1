"""History in the database: events, decisions, ended jobs and loans, demand readings and samples.

A commit appends to history. Only retention deletes rows.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    ColumnElement,
    Connection,
    Double,
    Index,
    Named,
    Select,
    String,
    Table,
    TypedColumns,
    bindparam,
    delete,
    func,
    literal,
    or_,
    select,
)

from scheduler.domain.codec import decode_stored, decode_stored_as, encode, encode_as
from scheduler.domain.decisions import Decision
from scheduler.domain.events import Event
from scheduler.domain.fleet import DemandReading, Loan
from scheduler.domain.job import Job
from scheduler.domain.job_records import Sample, SlottedSample
from scheduler.domain.reading_bins import ROUNDING_BINS
from scheduler.store.api_protocol import LoanQuery, SortKey
from scheduler.store.database import (
    CODE_POINT_ORDERED,
    METADATA,
    ROW_NUMBER,
    AnyRow,
    BinNumber,
    StateSince,
    build_insert,
)
from scheduler.store.protocol import Commit, Page, StoredDecision, StoredEvent


class EventColumns(TypedColumns):
    number: Named[int] = Column(ROW_NUMBER, primary_key=True)
    generation: Named[int] = Column(BigInteger)
    at_s: Named[float] = Column(Double)
    subject: Named[str] = Column(String)
    body: Named[Any] = Column(JSON, nullable=False)


class DecisionColumns(TypedColumns):
    number: Named[int] = Column(ROW_NUMBER, primary_key=True)
    generation: Named[int] = Column(BigInteger)
    at_s: Named[float] = Column(Double)
    body: Named[Any] = Column(JSON, nullable=False)


class EndedJobColumns(TypedColumns):
    """Lists of jobs are sorted and filtered by the columns other than `body`."""

    number: Named[int] = Column(ROW_NUMBER, primary_key=True)
    id: Named[str] = Column(CODE_POINT_ORDERED, index=True)
    generation: Named[int] = Column(BigInteger)
    body: Named[Any] = Column(JSON, nullable=False)
    submitted_at_s: Named[float] = Column(Double, server_default="0")
    state: Named[str] = Column(String, server_default="")
    queue: Named[str] = Column(String, server_default="")
    owner: Named[str] = Column(String, server_default="")
    name: Named[str] = Column(CODE_POINT_ORDERED, server_default="")
    owner_id: Named[str] = Column(String, server_default="")


class EndedLoanColumns(TypedColumns):
    number: Named[int] = Column(ROW_NUMBER, primary_key=True)
    id: Named[str] = Column(CODE_POINT_ORDERED, index=True)
    generation: Named[int] = Column(BigInteger)
    body: Named[Any] = Column(JSON, nullable=False)
    offered_at_s: Named[float] = Column(Double, server_default="0")
    state: Named[str] = Column(String, server_default="")
    pool: Named[str] = Column(String, server_default="")
    node: Named[str] = Column(String, server_default="")


class ReadingColumns(TypedColumns):
    number: Named[int] = Column(ROW_NUMBER, primary_key=True)
    pool: Named[str] = Column(String)
    at_s: Named[float] = Column(Double)
    gpus: Named[float] = Column(Double)
    asked_gpus: Named[float] = Column(Double)


class JobSampleColumns(TypedColumns):
    """A job has a fixed number of places; a new sample replaces the one in its place."""

    job_id: Named[str] = Column(String, primary_key=True)
    place: Named[int] = Column(primary_key=True, autoincrement=False)
    at_s: Named[float] = Column(Double)
    steps: Named[float] = Column(Double)
    loss: Named[float | None] = Column(Double)
    samples_per_s: Named[float | None] = Column(Double)
    peak_bytes: Named[int | None] = Column(BigInteger)


EVENTS = Table("events", METADATA, EventColumns)
DECISIONS = Table("decisions", METADATA, DecisionColumns)
ENDED_JOBS = Table("ended_jobs", METADATA, EndedJobColumns)
ENDED_LOANS = Table("ended_loans", METADATA, EndedLoanColumns)
READINGS = Table("readings", METADATA, ReadingColumns)
JOB_SAMPLES = Table("job_samples", METADATA, JobSampleColumns)

Index(None, EVENTS.c.subject, EVENTS.c.number)
Index(None, READINGS.c.pool, READINGS.c.at_s)
# These indexes cover all filters of lists, so that rows that do not match are skipped inside the index.
_JOB = ENDED_JOBS.c
_FILTERS = (_JOB.queue, _JOB.owner, _JOB.name, _JOB.owner_id)
Index("ix_ended_jobs_list", _JOB.submitted_at_s, _JOB.id, _JOB.state, *_FILTERS)
# With one of these, a list of the jobs of one state, of a queue or of an owner reads only matching rows, in order.
_ORDER = (_JOB.state, _JOB.submitted_at_s, _JOB.id)
Index("ix_ended_jobs_state_list", *_ORDER, *_FILTERS)
Index("ix_ended_jobs_queue_list", _JOB.queue, *_ORDER, _JOB.owner, _JOB.name, _JOB.owner_id)
Index("ix_ended_jobs_owner_list", _JOB.owner, *_ORDER, _JOB.queue, _JOB.name, _JOB.owner_id)
Index("ix_ended_jobs_owner_id_list", _JOB.owner_id, *_ORDER, _JOB.queue, _JOB.owner, _JOB.name)
Index("ix_ended_jobs_name", _JOB.name)
Index("ix_ended_jobs_ended_at", StateSince(_JOB.body), _JOB.number)
_LOAN = ENDED_LOANS.c
Index("ix_ended_loans_list", _LOAN.offered_at_s, _LOAN.id, _LOAN.state, _LOAN.pool, _LOAN.node)

_SAMPLE_KEY_COLUMNS = ["job_id", "place"]
_SAMPLE_VALUE_COLUMNS = ("at_s", "steps", "loss", "samples_per_s", "peak_bytes")


def build_appended_rows(commit: Commit) -> list[tuple[Table[Any], list[dict[str, Any]]]]:
    """Return the rows that a commit appends, by table."""
    generation, now_s = commit.snapshot.generation, commit.snapshot.now_s
    events = [{"at_s": event.at_s, "subject": event.subject, "body": encode(event)} for event in commit.events]
    decisions = [{"at_s": now_s, "body": encode_as(Decision, decision)} for decision in commit.decisions]
    jobs = [{"id": job.id, "body": encode(job), **_build_job_list_columns(job)} for job in commit.ended_jobs]
    loans = [{"id": loan.id, "body": encode(loan), **_build_loan_list_columns(loan)} for loan in commit.ended_loans]
    readings = [
        {"pool": pool, "at_s": each.at_s, "gpus": each.gpus, "asked_gpus": each.asked_gpus}
        for pool, each in (*commit.backfill, *commit.readings)
    ]
    per_generation = ((EVENTS, events), (DECISIONS, decisions), (ENDED_JOBS, jobs), (ENDED_LOANS, loans))
    logs = [(table, [{"generation": generation, **row} for row in rows]) for table, rows in per_generation]
    return [*logs, (READINGS, readings)]


def _build_job_list_columns(job: Job) -> dict[str, Any]:
    spec = job.spec
    owner = {"owner": job.owner, "owner_id": job.owner_key}
    return {
        "submitted_at_s": job.submitted_at_s, "state": job.state.value, **owner, "queue": spec.queue, "name": spec.name
    }  # fmt: skip


def _build_loan_list_columns(loan: Loan) -> dict[str, Any]:
    return {"offered_at_s": loan.created_at_s, "state": loan.state.value, "pool": loan.pool, "node": loan.node}


def select_events(page: Page, subject: str) -> Select[*tuple[Any, ...]]:
    query = select(EVENTS).where(EVENTS.c.number > page.after)
    if subject:
        query = query.where(EVENTS.c.subject == subject)
    return query.order_by(EVENTS.c.number).limit(page.limit)


def select_last_events(subject: str, limit: int) -> Select[*tuple[Any, ...]]:
    return select(EVENTS).where(EVENTS.c.subject == subject).order_by(EVENTS.c.number.desc()).limit(limit)


def decode_event_row(row: AnyRow) -> StoredEvent:
    return StoredEvent(row.number, row.generation, decode_stored(Event, row.body))


def select_event_subjects(page: Page) -> Select[*tuple[Any, ...]]:
    query = select(EVENTS.c.number, EVENTS.c.subject).where(EVENTS.c.number > page.after)
    return query.order_by(EVENTS.c.number).limit(page.limit)


def select_events_by_number(numbers: Collection[int]) -> Select[*tuple[Any, ...]]:
    return select(EVENTS).where(EVENTS.c.number.in_(numbers)).order_by(EVENTS.c.number)


def select_ended_job_queues(job_ids: Collection[str]) -> Select[*tuple[Any, ...]]:
    query = select(ENDED_JOBS.c.id, ENDED_JOBS.c.queue).where(ENDED_JOBS.c.id.in_(job_ids))
    return query.order_by(ENDED_JOBS.c.number)


def select_decisions(page: Page) -> Select[*tuple[Any, ...]]:
    query = select(DECISIONS).where(DECISIONS.c.number > page.after)
    return query.order_by(DECISIONS.c.number).limit(page.limit)


def decode_decision_row(row: AnyRow) -> StoredDecision:
    return StoredDecision(row.number, row.generation, row.at_s, decode_stored_as(Decision, row.body))


def select_readings(pool: str, since_s: float) -> Select[*tuple[Any, ...]]:
    query = select(READINGS).where(READINGS.c.pool == pool, READINGS.c.at_s >= since_s)
    return query.order_by(READINGS.c.at_s, READINGS.c.number)


def select_reading_bins(pool: str, since_s: float, bin_s: float) -> Select[*tuple[Any, ...]]:
    """Return the query of the columns of ReadingBin, so that a fortnight of readings leaves the database as its bins.

    Values of first and last readings are looked up in the index of times. Window functions take three times as long.
    """
    of_pool = READINGS.c.pool == pool
    number = BinNumber(READINGS.c.at_s / literal(bin_s, Double) + literal(ROUNDING_BINS, Double)).label("bin")
    bins = (
        select(
            number,
            func.min(READINGS.c.at_s).label("first_at_s"),
            func.max(READINGS.c.at_s).label("last_at_s"),
            func.max(READINGS.c.asked_gpus).label("peak_gpus"),
            func.count().label("readings"),
        )
        .where(of_pool, READINGS.c.at_s >= since_s)
        .group_by(number)
        .subquery()
    )
    at = READINGS.alias()

    def find_gpus(at_s: ColumnElement[float], order: ColumnElement[int]) -> ColumnElement[float]:
        found = select(at.c.asked_gpus).where(at.c.pool == pool, at.c.at_s == at_s).order_by(order).limit(1)
        return found.scalar_subquery()

    first_gpus, last_gpus = find_gpus(bins.c.first_at_s, at.c.number), find_gpus(bins.c.last_at_s, at.c.number.desc())
    columns = (bins.c.first_at_s, first_gpus, bins.c.last_at_s, last_gpus, bins.c.peak_gpus, bins.c.readings)
    return select(*columns).order_by(bins.c.bin)


def delete_replaced_readings(connection: Connection, backfill: Sequence[tuple[str, DemandReading]]) -> None:
    """Delete the stored readings that have the pool and the time of a back-filled one."""
    if backfill:
        replaced = delete(READINGS).where(READINGS.c.pool == bindparam("p"), READINGS.c.at_s == bindparam("t"))
        connection.execute(replaced, [{"p": pool, "t": reading.at_s} for pool, reading in backfill])


def decode_reading_row(row: AnyRow) -> DemandReading:
    return DemandReading(row.at_s, row.gpus, row.asked_gpus)


def select_last_ended(table: Table[Any], *, limit: int) -> Select[*tuple[Any, ...]]:
    return select(table).order_by(table.c.number.desc()).limit(limit)


def select_ended_loans(query: LoanQuery, after: SortKey | None, limit: int) -> Select[*tuple[Any, ...]]:
    row = ENDED_LOANS.c
    conditions: list[ColumnElement[bool]] = []
    if query.states is not None:
        conditions.append(row.state.in_(sorted(query.states)))
    if query.pool:
        conditions.append(row.pool == query.pool)
    if query.node:
        conditions.append(row.node == query.node)
    if query.until_s < math.inf:
        conditions.append(row.offered_at_s < query.until_s)
    if query.since_s > -math.inf:
        conditions.append(StateSince(row.body) > query.since_s)
    return order_and_limit(select(ENDED_LOANS).where(*conditions), row.offered_at_s, row.id, after, limit=limit)


def order_and_limit(
    rows: Select[*tuple[Any, ...]],
    at_s: ColumnElement[float],
    name: ColumnElement[str],
    after: SortKey | None,
    *,
    limit: int,
) -> Select[*tuple[Any, ...]]:
    """Return up to `limit` of the rows that follow the key `after`, by time and name in descending order."""
    if after is not None:
        # The first condition is implied by the second, but lets every database start inside the index.
        rows = rows.where(at_s <= after.at_s, or_(at_s < after.at_s, name < after.id))
    return rows.order_by(at_s.desc(), name.desc()).limit(limit)


def upsert_samples(connection: Connection, samples: Iterable[SlottedSample]) -> None:
    """Store each sample in its place. The last of several samples for one place wins."""
    last = {(each.job_id, each.slot): each.sample for each in samples}
    if not last:
        return
    rows = [
        {"job_id": job_id, "place": place, **{name: getattr(sample, name) for name in _SAMPLE_VALUE_COLUMNS}}
        for (job_id, place), sample in last.items()
    ]
    statement = build_insert(connection, JOB_SAMPLES)
    newer = {name: statement.excluded[name] for name in _SAMPLE_VALUE_COLUMNS}
    connection.execute(statement.on_conflict_do_update(index_elements=_SAMPLE_KEY_COLUMNS, set_=newer), rows)


def select_samples(job_id: str) -> Select[*tuple[Any, ...]]:
    return select(JOB_SAMPLES).where(JOB_SAMPLES.c.job_id == job_id).order_by(JOB_SAMPLES.c.at_s)


def decode_sample_row(row: AnyRow) -> Sample:
    return Sample(row.at_s, row.steps, row.loss, row.samples_per_s, row.peak_bytes)
