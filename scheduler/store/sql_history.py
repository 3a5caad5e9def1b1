"""History in the database: events, decisions, ended jobs and loans, demand readings and samples.

A commit appends to history. Only retention deletes rows.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    ColumnElement,
    Connection,
    Double,
    Engine,
    Index,
    Named,
    Select,
    String,
    Table,
    TypedColumns,
    bindparam,
    delete,
    func,
    or_,
    select,
    union_all,
)

from scheduler.domain.codec import decode_stored, decode_stored_as, encode, encode_as
from scheduler.domain.decisions import Decision
from scheduler.domain.events import Event
from scheduler.domain.fleet import DemandReading, Loan
from scheduler.domain.job import Job
from scheduler.domain.job_records import Sample, SlottedSample
from scheduler.domain.job_state import ENDED_STATES
from scheduler.store.api_protocol import LoanQuery, SortKey
from scheduler.store.database import (
    METADATA,
    ROW_NUMBER,
    AnyRow,
    Contains,
    StateSince,
    build_insert,
    fetch_rows,
    transaction,
)
from scheduler.store.job_query import JobQuery, lower_ascii
from scheduler.store.protocol import Commit, Page, StoredDecision, StoredEvent

CODE_POINT_ORDERED = String().with_variant(String(collation="C"), "postgresql")
"""Sorted by code points in every database, as in Python."""


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


def delete_replaced_readings(connection: Connection, backfill: Sequence[tuple[str, DemandReading]]) -> None:
    """Delete the stored readings that have the pool and the time of a back-filled one."""
    if backfill:
        replaced = delete(READINGS).where(READINGS.c.pool == bindparam("p"), READINGS.c.at_s == bindparam("t"))
        connection.execute(replaced, [{"p": pool, "t": reading.at_s} for pool, reading in backfill])


def decode_reading_row(row: AnyRow) -> DemandReading:
    return DemandReading(row.at_s, row.gpus, row.asked_gpus)


def select_last_ended(table: Table[Any], *, limit: int) -> Select[*tuple[Any, ...]]:
    return select(table).order_by(table.c.number.desc()).limit(limit)


SORTED_JOBS_MAX = 2000
"""Most jobs that are sorted for a page. If a filter leaves more, the list is read in order until the page is full."""
_QUEUES_SPLIT_MAX = 30
_NUMBER_MAX = 2**63 - 1
_LAST_CHARACTER = "\U0010ffff"


def find_ended_job_keys(engine: Engine, query: JobQuery, after: SortKey | None, limit: int) -> list[AnyRow]:
    """Return the keys of one page of jobs, without bodies: SqlStore caches the jobs that were listed before.

    The cost does not depend on the number of jobs that do not match, except for a text: it is sought in the index of
    the list until the page is full.
    """
    last_before = 0
    ended_since_s = max(query.ended_since_s, query.recent_since_s)
    if ended_since_s > -math.inf:
        with transaction(engine) as connection:
            last_before = _find_last_ended_before(connection, ended_since_s)
    for matching in _list_index_ranges(query, last_before):
        sorted_whole = select(ENDED_JOBS.c.number).where(*matching).limit(SORTED_JOBS_MAX + 1)
        if len(fetch_rows(engine, sorted_whole)) <= SORTED_JOBS_MAX:
            return fetch_rows(engine, _select_few_keys(query, matching, last_before, after, limit))
    return fetch_rows(engine, _select_keys_in_order(query, last_before, after, limit))


def _list_index_ranges(query: JobQuery, last_before: int) -> Iterator[tuple[ColumnElement[bool], ...]]:
    """Yield conditions of the query that may leave few jobs, and that an index answers, though not in order."""
    row = ENDED_JOBS.c
    if query.name_prefix:
        yield row.name >= query.name_prefix, row.name < query.name_prefix + _LAST_CHARACTER
    if query.id_prefix:
        yield row.id >= query.id_prefix, row.id < query.id_prefix + _LAST_CHARACTER
    if last_before:
        yield (row.number > last_before,)


def _select_few_keys(
    query: JobQuery,
    matching: tuple[ColumnElement[bool], ...],
    last_before: int,
    after: SortKey | None,
    limit: int,
) -> Select[*tuple[Any, ...]]:
    """Select keys from the at most SORTED_JOBS_MAX jobs that are `matching`."""
    # The limit keeps databases from walking the whole list in its order instead of sorting the few rows.
    few = select(*(column for column in ENDED_JOBS.c if column.name != "body")).where(*matching)
    row = few.limit(SORTED_JOBS_MAX).subquery().c
    keys = select(row.number, row.id, row.generation).where(*_build_conditions(query, row, last_before))
    return order_and_limit(keys, row.submitted_at_s, row.id, after, limit=limit)


def _select_keys_in_order(
    query: JobQuery, last_before: int, after: SortKey | None, limit: int
) -> Select[*tuple[Any, ...]]:
    row = ENDED_JOBS.c
    keys = select(row.number, row.id, row.generation, row.submitted_at_s)
    parts = [
        order_and_limit(
            keys.where(*_build_conditions(part, row, last_before)), row.submitted_at_s, row.id, after, limit=limit
        )
        for part in _split_query(query)
    ]
    if len(parts) == 1:
        return parts[0]
    merged = union_all(*(part.subquery().select() for part in parts)).subquery()
    return order_and_limit(select(merged), merged.c.submitted_at_s, merged.c.id, None, limit=limit)


def _split_query(query: JobQuery) -> Iterator[JobQuery]:
    """Yield queries that one index answers in order, each for one state, and for one queue if no owner is given."""
    states = ENDED_STATES if query.states is None else query.states & ENDED_STATES
    queues = query.queues
    has_owner = bool(query.owner or query.owner_id)
    if (query.states is None and queues is None and not has_owner) or not states or queues == frozenset():
        yield query
        return
    by_queue = queues is not None and not has_owner and len(queues) <= _QUEUES_SPLIT_MAX
    for queue in sorted(queues or ()) if by_queue else (None,):
        for state in sorted(states):
            chosen = queues if queue is None else frozenset((queue,))
            yield replace(query, states=frozenset((state,)), queues=chosen)


def _build_conditions(query: JobQuery, row: Any, last_before: int) -> list[ColumnElement[bool]]:
    """Return the conditions on `row`, the columns of jobs. `last_before` is the number of the last job too old."""
    conditions: list[ColumnElement[bool]] = []
    if query.states is not None:
        conditions.append(row.state.in_(sorted(query.states)))
    if query.queues is not None:
        conditions.append(row.queue.in_(sorted(query.queues)))
    if query.owner:
        conditions.append(row.owner == query.owner)
    if query.owner_id:
        conditions.append(row.owner_id == query.owner_id)
    if query.name_prefix:
        conditions.append(func.substr(row.name, 1, len(query.name_prefix)) == query.name_prefix)
    if query.id_prefix:
        conditions.append(func.substr(row.id, 1, len(query.id_prefix)) == query.id_prefix)
    if query.text:
        text = lower_ascii(query.text)
        conditions.append(or_(*(Contains(part, text) for part in (row.id, row.name, row.queue, row.owner))))
    if last_before:
        conditions.append(row.number > last_before)
    if query.since_s > -math.inf:
        conditions.append(row.submitted_at_s >= query.since_s)
    if query.until_s < math.inf:
        conditions.append(row.submitted_at_s < query.until_s)
    return conditions


def _find_last_ended_before(connection: Connection, at_s: float) -> int:
    """Return the number of the last job that ended before `at_s`, or 0.

    Jobs are numbered in the order in which they end.
    """
    ended_at_s = StateSince(_JOB.body)
    earlier = select(_JOB.number).where(ended_at_s < at_s).order_by(ended_at_s.desc(), _JOB.number.desc())
    return connection.execute(earlier.limit(1)).scalar() or 0


def select_ended_job_rows(numbers: Sequence[int]) -> Select[*tuple[Any, ...]]:
    return select(ENDED_JOBS).where(ENDED_JOBS.c.number.in_(numbers))


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
