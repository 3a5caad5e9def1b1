"""History in the database: what a commit appends, and the rows as domain values again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from sqlalchemy import (
    Column,
    ColumnElement,
    Connection,
    Row,
    Select,
    String,
    Table,
    any_,
    bindparam,
    func,
    or_,
    select,
    update,
)

from scheduler.domain.codec import decode, decode_as, encode, encode_as
from scheduler.domain.decision import Decision
from scheduler.domain.event import Event
from scheduler.domain.fleet import DemandReading
from scheduler.domain.job import Job
from scheduler.domain.loan import Loan
from scheduler.store.bulk import array, array_of
from scheduler.store.protocol import Commit, Page, StoredDecision, StoredEvent
from scheduler.store.queries import JobQuery, LoanQuery, Place
from scheduler.store.tables import DECISIONS, ENDED_JOBS, ENDED_LOANS, EVENTS, INBOX, READINGS

AnyRow = Row[*tuple[Any, ...]]
_CONSUME = update(INBOX).values(consumed_at_generation=bindparam("at_generation"), consumed_at_s=bindparam("at_s"))
_CONSUME_EACH = _CONSUME.where(INBOX.c.id == bindparam("command_id"), INBOX.c.consumed_at_generation.is_(None))
_CONSUME_ALL = _CONSUME.where(
    INBOX.c.id == any_(array_of("command_ids", String())), INBOX.c.consumed_at_generation.is_(None)
)


def appended(commit: Commit) -> list[tuple[Table[Any], list[dict[str, Any]]]]:
    """The rows that a commit appends, by table."""
    generation, now_s = commit.snapshot.generation, commit.snapshot.now_s
    events = [{"at_s": event.at_s, "subject": event.subject, "body": encode(event)} for event in commit.events]
    decisions = [{"at_s": now_s, "body": encode_as(Decision, decision)} for decision in commit.decisions]
    jobs = [{"id": job.id, "body": encode(job), **_listed_job(job)} for job in commit.ended_jobs]
    loans = [{"id": loan.id, "body": encode(loan), **_listed_loan(loan)} for loan in commit.ended_loans]
    readings = [{"pool": pool, **encode(reading)} for pool, reading in commit.readings]
    of_generation = ((EVENTS, events), (DECISIONS, decisions), (ENDED_JOBS, jobs), (ENDED_LOANS, loans))
    logs = [(table, [{"generation": generation, **row} for row in rows]) for table, rows in of_generation]
    return [*logs, (READINGS, readings)]


def _listed_job(job: Job) -> dict[str, Any]:
    spec = job.spec
    known = {"submitted_at_s": job.submitted_at_s, "state": job.state.value, "owner": job.owner}
    return {**known, "queue": spec.queue, "name": spec.name}


def _listed_loan(loan: Loan) -> dict[str, Any]:
    return {"offered_at_s": loan.offered_at_s, "state": loan.state.value, "pool": loan.pool, "node": loan.node}


def consume(connection: Connection, commit: Commit) -> None:
    """Mark commands of the inbox as done with. Their ids stay taken."""
    now = {"at_generation": commit.snapshot.generation, "at_s": commit.snapshot.now_s}
    if commit.consumed and connection.dialect.name == "sqlite":
        connection.execute(_CONSUME_EACH, [{"command_id": each, **now} for each in commit.consumed])
    elif commit.consumed:
        connection.execute(_CONSUME_ALL, {"command_ids": array(commit.consumed), **now})


def select_events(page: Page, subject: str) -> Select[*tuple[Any, ...]]:
    query = select(EVENTS).where(EVENTS.c.number > page.after)
    if subject:
        query = query.where(EVENTS.c.subject == subject)
    return query.order_by(EVENTS.c.number).limit(page.limit)


def select_last_events(subject: str, limit: int) -> Select[*tuple[Any, ...]]:
    return select(EVENTS).where(EVENTS.c.subject == subject).order_by(EVENTS.c.number.desc()).limit(limit)


def stored_event(row: AnyRow) -> StoredEvent:
    return StoredEvent(row.number, row.generation, decode(Event, row.body))


def select_decisions(page: Page) -> Select[*tuple[Any, ...]]:
    query = select(DECISIONS).where(DECISIONS.c.number > page.after)
    return query.order_by(DECISIONS.c.number).limit(page.limit)


def stored_decision(row: AnyRow) -> StoredDecision:
    return StoredDecision(row.number, row.generation, row.at_s, decode_as(Decision, row.body))


def select_readings(pool: str, since_s: float) -> Select[*tuple[Any, ...]]:
    query = select(READINGS).where(READINGS.c.pool == pool, READINGS.c.at_s >= since_s)
    return query.order_by(READINGS.c.at_s, READINGS.c.number)


def reading(row: AnyRow) -> DemandReading:
    return DemandReading(row.at_s, row.gpus, row.asked_gpus)


def select_ended(table: Table[Any], *, limit: int) -> Select[*tuple[Any, ...]]:
    return select(table).order_by(table.c.number.desc()).limit(limit)


def select_ended_jobs(wanted: JobQuery, after: Place | None, limit: int) -> Select[*tuple[Any, ...]]:
    """Without bodies: most lists hold what was listed a moment ago."""
    row = ENDED_JOBS.c
    traits: list[ColumnElement[bool]] = []
    if wanted.states is not None:
        traits.append(row.state.in_(sorted(wanted.states)))
    if wanted.queues is not None:
        traits.append(row.queue.in_(sorted(wanted.queues)))
    if wanted.owner:
        traits.append(row.owner == wanted.owner)
    if wanted.name_prefix:
        traits.append(func.substr(row.name, 1, len(wanted.name_prefix)) == wanted.name_prefix)
    if wanted.since_s > -math.inf:
        traits.append(row.submitted_at_s >= wanted.since_s)
    if wanted.until_s < math.inf:
        traits.append(row.submitted_at_s < wanted.until_s)
    keys = select(row.number, row.id, row.generation)
    return _in_order(keys.where(*traits), row.submitted_at_s, row.id, after, limit=limit)


def select_ended_bodies(numbers: Sequence[int]) -> Select[*tuple[Any, ...]]:
    return select(ENDED_JOBS).where(ENDED_JOBS.c.number.in_(numbers))


def select_ended_loans(wanted: LoanQuery, after: Place | None, limit: int) -> Select[*tuple[Any, ...]]:
    row = ENDED_LOANS.c
    traits: list[ColumnElement[bool]] = []
    if wanted.states is not None:
        traits.append(row.state.in_(sorted(wanted.states)))
    if wanted.pool:
        traits.append(row.pool == wanted.pool)
    if wanted.node:
        traits.append(row.node == wanted.node)
    return _in_order(select(ENDED_LOANS).where(*traits), row.offered_at_s, row.id, after, limit=limit)


def _in_order(
    rows: Select[*tuple[Any, ...]], at_s: Column[float], name: Column[str], after: Place | None, *, limit: int
) -> Select[*tuple[Any, ...]]:
    if after is not None:
        # The first condition follows from the second, and lets every database begin in the middle of the index.
        rows = rows.where(at_s <= after.at_s, or_(at_s < after.at_s, name < after.id))
    return rows.order_by(at_s.desc(), name.desc()).limit(limit)
