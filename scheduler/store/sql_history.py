"""History in the database: what a commit appends, and the rows as domain values again.

The books of usage in the database: one row an hour, queue, owner and kind of GPU, to which commits add.

Samples of jobs' work in the database: at most `SAMPLES_MAX` rows a job, which newer ones take over by and by.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    ColumnElement,
    Connection,
    Double,
    Named,
    Row,
    Select,
    String,
    Table,
    TypedColumns,
    any_,
    bindparam,
    func,
    or_,
    select,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite

from scheduler.domain.codec import decode, decode_as, encode, encode_as
from scheduler.domain.decisions import Decision
from scheduler.domain.events import Event
from scheduler.domain.fleet import DemandReading, Loan
from scheduler.domain.job import Job
from scheduler.domain.job_queue import HOUR_S, UsageEntry, UsageKey
from scheduler.domain.job_records import Sample, SlottedSample
from scheduler.store.api_protocol import JobQuery, LoanQuery, SortKey
from scheduler.store.database import bind_array, format_array_literal
from scheduler.store.protocol import Commit, Page, StoredDecision, StoredEvent
from scheduler.store.tables import DECISIONS, ENDED_JOBS, ENDED_LOANS, EVENTS, INBOX, METADATA, READINGS

AnyRow = Row[*tuple[Any, ...]]
_MARK_CONSUMED = update(INBOX).values(
    consumed_at_generation=bindparam("at_generation"), consumed_at_s=bindparam("at_s")
)
_MARK_CONSUMED_BY_ID = _MARK_CONSUMED.where(
    INBOX.c.id == bindparam("command_id"), INBOX.c.consumed_at_generation.is_(None)
)
_MARK_CONSUMED_BY_IDS = _MARK_CONSUMED.where(
    INBOX.c.id == any_(bind_array("command_ids", String())), INBOX.c.consumed_at_generation.is_(None)
)


def build_appended_rows(commit: Commit) -> list[tuple[Table[Any], list[dict[str, Any]]]]:
    """The rows that a commit appends, by table."""
    generation, now_s = commit.snapshot.generation, commit.snapshot.now_s
    events = [{"at_s": event.at_s, "subject": event.subject, "body": encode(event)} for event in commit.events]
    decisions = [{"at_s": now_s, "body": encode_as(Decision, decision)} for decision in commit.decisions]
    jobs = [{"id": job.id, "body": encode(job), **_build_job_list_columns(job)} for job in commit.ended_jobs]
    loans = [{"id": loan.id, "body": encode(loan), **_build_loan_list_columns(loan)} for loan in commit.ended_loans]
    readings = [{"pool": pool, **encode(reading)} for pool, reading in commit.readings]
    of_generation = ((EVENTS, events), (DECISIONS, decisions), (ENDED_JOBS, jobs), (ENDED_LOANS, loans))
    logs = [(table, [{"generation": generation, **row} for row in rows]) for table, rows in of_generation]
    return [*logs, (READINGS, readings)]


def _build_job_list_columns(job: Job) -> dict[str, Any]:
    spec = job.spec
    known = {"submitted_at_s": job.submitted_at_s, "state": job.state.value, "owner": job.owner}
    return {**known, "queue": spec.queue, "name": spec.name}


def _build_loan_list_columns(loan: Loan) -> dict[str, Any]:
    return {"offered_at_s": loan.offered_at_s, "state": loan.state.value, "pool": loan.pool, "node": loan.node}


def mark_consumed(connection: Connection, commit: Commit) -> None:
    """Mark commands of the inbox as done with. Their ids stay taken."""
    now = {"at_generation": commit.snapshot.generation, "at_s": commit.snapshot.now_s}
    if commit.consumed_command_ids and connection.dialect.name == "sqlite":
        connection.execute(_MARK_CONSUMED_BY_ID, [{"command_id": each, **now} for each in commit.consumed_command_ids])
    elif commit.consumed_command_ids:
        connection.execute(
            _MARK_CONSUMED_BY_IDS, {"command_ids": format_array_literal(commit.consumed_command_ids), **now}
        )


def select_events(page: Page, subject: str) -> Select[*tuple[Any, ...]]:
    query = select(EVENTS).where(EVENTS.c.number > page.after)
    if subject:
        query = query.where(EVENTS.c.subject == subject)
    return query.order_by(EVENTS.c.number).limit(page.limit)


def select_last_events(subject: str, limit: int) -> Select[*tuple[Any, ...]]:
    return select(EVENTS).where(EVENTS.c.subject == subject).order_by(EVENTS.c.number.desc()).limit(limit)


def decode_event_row(row: AnyRow) -> StoredEvent:
    return StoredEvent(row.number, row.generation, decode(Event, row.body))


def select_decisions(page: Page) -> Select[*tuple[Any, ...]]:
    query = select(DECISIONS).where(DECISIONS.c.number > page.after)
    return query.order_by(DECISIONS.c.number).limit(page.limit)


def decode_decision_row(row: AnyRow) -> StoredDecision:
    return StoredDecision(row.number, row.generation, row.at_s, decode_as(Decision, row.body))


def select_readings(pool: str, since_s: float) -> Select[*tuple[Any, ...]]:
    query = select(READINGS).where(READINGS.c.pool == pool, READINGS.c.at_s >= since_s)
    return query.order_by(READINGS.c.at_s, READINGS.c.number)


def decode_reading_row(row: AnyRow) -> DemandReading:
    return DemandReading(row.at_s, row.gpus, row.asked_gpus)


def select_last_ended(table: Table[Any], *, limit: int) -> Select[*tuple[Any, ...]]:
    return select(table).order_by(table.c.number.desc()).limit(limit)


def select_ended_job_keys(query: JobQuery, after: SortKey | None, limit: int) -> Select[*tuple[Any, ...]]:
    """Without bodies: most lists hold what was listed a moment ago."""
    row = ENDED_JOBS.c
    traits: list[ColumnElement[bool]] = []
    if query.states is not None:
        traits.append(row.state.in_(sorted(query.states)))
    if query.queues is not None:
        traits.append(row.queue.in_(sorted(query.queues)))
    if query.owner:
        traits.append(row.owner == query.owner)
    if query.name_prefix:
        traits.append(func.substr(row.name, 1, len(query.name_prefix)) == query.name_prefix)
    if query.since_s > -math.inf:
        traits.append(row.submitted_at_s >= query.since_s)
    if query.until_s < math.inf:
        traits.append(row.submitted_at_s < query.until_s)
    keys = select(row.number, row.id, row.generation)
    return _order_and_limit(keys.where(*traits), row.submitted_at_s, row.id, after, limit=limit)


def select_ended_job_rows(numbers: Sequence[int]) -> Select[*tuple[Any, ...]]:
    return select(ENDED_JOBS).where(ENDED_JOBS.c.number.in_(numbers))


def select_ended_loans(query: LoanQuery, after: SortKey | None, limit: int) -> Select[*tuple[Any, ...]]:
    row = ENDED_LOANS.c
    traits: list[ColumnElement[bool]] = []
    if query.states is not None:
        traits.append(row.state.in_(sorted(query.states)))
    if query.pool:
        traits.append(row.pool == query.pool)
    if query.node:
        traits.append(row.node == query.node)
    return _order_and_limit(select(ENDED_LOANS).where(*traits), row.offered_at_s, row.id, after, limit=limit)


def _order_and_limit(
    rows: Select[*tuple[Any, ...]], at_s: Column[float], name: Column[str], after: SortKey | None, *, limit: int
) -> Select[*tuple[Any, ...]]:
    if after is not None:
        # The first condition follows from the second, and lets every database begin in the middle of the index.
        rows = rows.where(at_s <= after.at_s, or_(at_s < after.at_s, name < after.id))
    return rows.order_by(at_s.desc(), name.desc()).limit(limit)


_USAGE_INSERTS: dict[str, Any] = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}


class UsageColumns(TypedColumns):
    hour_s: Named[int] = Column(BigInteger, primary_key=True, autoincrement=False)
    queue: Named[str] = Column(String, primary_key=True)
    owner: Named[str] = Column(String, primary_key=True)
    gpu: Named[str] = Column(String, primary_key=True)
    is_lent: Named[bool] = Column(Boolean, primary_key=True)
    gpu_s: Named[float] = Column(Double)
    lost_gpu_s: Named[float] = Column(Double)


USAGE = Table("usage", METADATA, UsageColumns)
_USAGE_KEY_COLUMNS = [column.name for column in USAGE.primary_key]


def add_usage_entries(connection: Connection, entries: Iterable[UsageEntry]) -> None:
    """Add the entries to what is booked, in the transaction of `connection`."""
    rows = [
        {
            **{name: getattr(entry.key, name) for name in _USAGE_KEY_COLUMNS},
            "gpu_s": entry.gpu_s,
            "lost_gpu_s": entry.lost_gpu_s,
        }
        for entry in entries
    ]
    if not rows:
        return
    adding = _USAGE_INSERTS[connection.dialect.name](USAGE)
    sums = {name: USAGE.c[name] + adding.excluded[name] for name in ("gpu_s", "lost_gpu_s")}
    connection.execute(adding.on_conflict_do_update(index_elements=_USAGE_KEY_COLUMNS, set_=sums), rows)


def fetch_usage_entries(connection: Connection, *, from_s: float, to_s: float) -> tuple[UsageEntry, ...]:
    """What is booked of the hours that touch this time span, in order."""
    rows = connection.execute(select(USAGE).where(USAGE.c.hour_s > from_s - HOUR_S, USAGE.c.hour_s < to_s)).all()
    return tuple(
        sorted(
            UsageEntry(UsageKey(row.hour_s, row.queue, row.owner, row.gpu, row.is_lent), row.gpu_s, row.lost_gpu_s)
            for row in rows
        )
    )


_SAMPLE_INSERTS: dict[str, Any] = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}


class JobSampleColumns(TypedColumns):
    job_id: Named[str] = Column(String, primary_key=True)
    place: Named[int] = Column(primary_key=True, autoincrement=False)
    at_s: Named[float] = Column(Double)
    steps: Named[float] = Column(Double)
    loss: Named[float | None] = Column(Double)
    samples_per_s: Named[float | None] = Column(Double)
    peak_bytes: Named[int | None] = Column(BigInteger)


JOB_SAMPLES = Table("job_samples", METADATA, JobSampleColumns)
_SAMPLE_KEY_COLUMNS = ["job_id", "place"]
_SAMPLE_VALUE_COLUMNS = ("at_s", "steps", "loss", "samples_per_s", "peak_bytes")


def upsert_samples(connection: Connection, samples: Iterable[SlottedSample]) -> None:
    """Put samples into their places, in the transaction of `connection`; the last one of a place is the one kept."""
    last = {(each.job_id, each.slot): each.sample for each in samples}
    if not last:
        return
    rows = [
        {"job_id": job_id, "place": place, **{name: getattr(sample, name) for name in _SAMPLE_VALUE_COLUMNS}}
        for (job_id, place), sample in last.items()
    ]
    putting = _SAMPLE_INSERTS[connection.dialect.name](JOB_SAMPLES)
    newer = {name: putting.excluded[name] for name in _SAMPLE_VALUE_COLUMNS}
    connection.execute(putting.on_conflict_do_update(index_elements=_SAMPLE_KEY_COLUMNS, set_=newer), rows)


def select_samples(job_id: str) -> Select[*tuple[Any, ...]]:
    return select(JOB_SAMPLES).where(JOB_SAMPLES.c.job_id == job_id).order_by(JOB_SAMPLES.c.at_s)


def decode_sample_row(row: Row[*tuple[Any, ...]]) -> Sample:
    return Sample(row.at_s, row.steps, row.loss, row.samples_per_s, row.peak_bytes)
