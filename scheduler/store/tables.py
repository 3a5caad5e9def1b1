"""The tables of SqlStore, in types that every dialect of SQLAlchemy knows.

Live state has one table a mapping of the snapshot: key, JSON body, and the generation of the snapshot that wrote
the row, so that a reader fetches only what is newer than what it has. A row without a body is a tombstone: the
record is gone as of that generation. History tables only ever grow, in order of `number`.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, BigInteger, Column, Double, Index, Integer, MetaData, Named, String, Table, TypedColumns

METADATA = MetaData(
    naming_convention={"pk": "pk_%(table_name)s", "ix": "ix_%(table_name)s_%(column_0_N_name)s"},
)
SINGLE_ROW_ID = 1
ROW_NUMBER = BigInteger().with_variant(Integer(), "sqlite")
"""SQLite numbers rows by itself in columns of this type alone, and as far."""
_CODE_POINT_ORDERED = String().with_variant(String(collation="C"), "postgresql")
"""Ordered by code points in every database, as Python does."""


class StateColumns(TypedColumns):
    """One row: all of the snapshot that is no mapping. Tombstones up to `swept_generation` have been removed."""

    id: Named[int] = Column(primary_key=True, autoincrement=False)
    generation: Named[int] = Column(BigInteger)
    swept_generation: Named[int] = Column(BigInteger)
    now_s: Named[float] = Column(Double)
    full_pass_at_s: Named[float] = Column(Double)
    switches: Named[Any] = Column(JSON, nullable=False)
    solver: Named[str] = Column(String, server_default="")


class LeaseColumns(TypedColumns):
    """One row. Nobody holds the lease while `holder` is empty."""

    id: Named[int] = Column(primary_key=True, autoincrement=False)
    holder: Named[str] = Column(String)
    epoch: Named[int] = Column(BigInteger)
    expires_at_s: Named[float] = Column(Double)


class RecordColumns(TypedColumns):
    key: Named[str] = Column(String, primary_key=True)
    generation: Named[int] = Column(BigInteger, index=True)
    body: Named[Any] = Column(JSON(none_as_null=True), nullable=True)


class CurvePointColumns(TypedColumns):
    """One solved point a row. `shape` is the GpuShape as JSON, empty for a curve that has no points."""

    curve_key: Named[str] = Column(String, primary_key=True)
    shape: Named[str] = Column(String, primary_key=True)
    generation: Named[int] = Column(BigInteger, index=True)
    body: Named[Any] = Column(JSON(none_as_null=True), nullable=True)


class InboxColumns(TypedColumns):
    """Consumed commands stay for long, because an id is taken once; those that submitted a job stay for ever."""

    number: Named[int] = Column(ROW_NUMBER, primary_key=True)
    id: Named[str] = Column(String, unique=True, index=True)
    consumed_at_generation: Named[int | None] = Column(BigInteger, index=True)
    body: Named[Any] = Column(JSON, nullable=False)
    consumed_at_s: Named[float | None] = Column(Double)


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
    """What lists of jobs are ordered by and ask for stands beside the body."""

    number: Named[int] = Column(ROW_NUMBER, primary_key=True)
    id: Named[str] = Column(_CODE_POINT_ORDERED, index=True)
    generation: Named[int] = Column(BigInteger)
    body: Named[Any] = Column(JSON, nullable=False)
    submitted_at_s: Named[float] = Column(Double, server_default="0")
    state: Named[str] = Column(String, server_default="")
    queue: Named[str] = Column(String, server_default="")
    owner: Named[str] = Column(String, server_default="")
    name: Named[str] = Column(String, server_default="")


class EndedLoanColumns(TypedColumns):
    number: Named[int] = Column(ROW_NUMBER, primary_key=True)
    id: Named[str] = Column(_CODE_POINT_ORDERED, index=True)
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


class BegunRunColumns(TypedColumns):
    """`body` is the run as it was begun; what became of it since stands beside it."""

    job_id: Named[str] = Column(String, primary_key=True)
    generation: Named[int] = Column(BigInteger, primary_key=True, autoincrement=False)
    body: Named[Any] = Column(JSON, nullable=False)
    doom: Named[Any] = Column(JSON(none_as_null=True), nullable=True)
    ended: Named[Any] = Column(JSON(none_as_null=True), nullable=True)


class AgentReportColumns(TypedColumns):
    """One row an agent: its newest report."""

    job_id: Named[str] = Column(String, primary_key=True)
    node: Named[str] = Column(String, primary_key=True)
    at_s: Named[float] = Column(Double)
    generation: Named[int] = Column(BigInteger)
    body: Named[Any] = Column(JSON, nullable=False)


class RetentionMarkColumns(TypedColumns):
    """One row a log that was ever swept. `rows_untold` are those that no entry of the audit log tells of yet."""

    log: Named[str] = Column(String, primary_key=True)
    up_to_number: Named[int] = Column(BigInteger)
    up_to_s: Named[float] = Column(Double)
    rows_untold: Named[int] = Column(BigInteger)


STATE = Table("state", METADATA, StateColumns)
LEASE = Table("lease", METADATA, LeaseColumns)

POOLS = Table("pools", METADATA, RecordColumns)
NODES = Table("nodes", METADATA, RecordColumns)
JOBS = Table("jobs", METADATA, RecordColumns)
LOANS = Table("loans", METADATA, RecordColumns)
DEMAND = Table("demand", METADATA, RecordColumns)
FORECASTS = Table("forecasts", METADATA, RecordColumns)
QUEUES = Table("queues", METADATA, RecordColumns)
CURVE_POINTS = Table("curve_points", METADATA, CurvePointColumns)

INBOX = Table("inbox", METADATA, InboxColumns)
EVENTS = Table("events", METADATA, EventColumns)
DECISIONS = Table("decisions", METADATA, DecisionColumns)
ENDED_JOBS = Table("ended_jobs", METADATA, EndedJobColumns)
ENDED_LOANS = Table("ended_loans", METADATA, EndedLoanColumns)
READINGS = Table("readings", METADATA, ReadingColumns)

BEGUN_RUNS = Table("begun_runs", METADATA, BegunRunColumns)
AGENT_REPORTS = Table("agent_reports", METADATA, AgentReportColumns)
RETENTION_MARKS = Table("swept", METADATA, RetentionMarkColumns)

Index(None, EVENTS.c.subject, EVENTS.c.number)
Index(None, READINGS.c.pool, READINGS.c.at_s)
# All that lists ask for, so that rows which they do not want are passed over inside the index.
_JOB = ENDED_JOBS.c
Index("ix_ended_jobs_list", _JOB.submitted_at_s, _JOB.id, _JOB.state, _JOB.queue, _JOB.owner, _JOB.name)
_LOAN = ENDED_LOANS.c
Index("ix_ended_loans_list", _LOAN.offered_at_s, _LOAN.id, _LOAN.state, _LOAN.pool, _LOAN.node)
