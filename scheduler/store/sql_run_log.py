"""The run log in the database: begun runs and the newest report of each agent."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Connection,
    Double,
    Engine,
    Named,
    String,
    Table,
    Text,
    TypedColumns,
    cast,
    delete,
    false,
    insert,
    select,
    update,
)
from sqlalchemy.exc import IntegrityError

from scheduler.domain.codec import decode_stored, encode
from scheduler.domain.observation import AgentReport, BegunRun, KillOrder, Run
from scheduler.store import sql_state
from scheduler.store.database import METADATA, AnyRow, fetch_rows, make_snapshot_engine, transaction


class BegunRunColumns(TypedColumns):
    """`body` is the run at its begin and never changes."""

    job_id: Named[str] = Column(String, primary_key=True)
    generation: Named[int] = Column(BigInteger, primary_key=True, autoincrement=False)
    body: Named[Any] = Column(JSON, nullable=False)
    doom: Named[Any] = Column(JSON(none_as_null=True), nullable=True)
    ended: Named[Any] = Column(JSON(none_as_null=True), nullable=True)
    is_restored: Named[bool] = Column(Boolean, server_default=false())


class AgentReportColumns(TypedColumns):
    """The newest report of each agent, one row per job and node."""

    job_id: Named[str] = Column(String, primary_key=True)
    node: Named[str] = Column(String, primary_key=True)
    at_s: Named[float] = Column(Double)
    generation: Named[int] = Column(BigInteger)
    body: Named[Any] = Column(JSON, nullable=False)


BEGUN_RUNS = Table("begun_runs", METADATA, BegunRunColumns)
AGENT_REPORTS = Table("agent_reports", METADATA, AgentReportColumns)
_RUN_KEY, _REPORT_KEY = (BEGUN_RUNS.c.job_id, BEGUN_RUNS.c.generation), (AGENT_REPORTS.c.job_id, AGENT_REPORTS.c.node)
# Bodies are read as text. Each tick reads all of them, and parses only those that it does not know.
_SELECT_BEGUN_RUNS = select(
    *_RUN_KEY,
    cast(BEGUN_RUNS.c.body, Text).label("body"),
    BEGUN_RUNS.c.doom,
    BEGUN_RUNS.c.ended,
    BEGUN_RUNS.c.is_restored,
).order_by(*_RUN_KEY)
_SELECT_REPORTS = select(*_REPORT_KEY, cast(AGENT_REPORTS.c.body, Text).label("body")).order_by(*_REPORT_KEY)
_RUN_CACHE_MAX = 4096


class SqlRunLog:
    """RunLog in SQL. The leader writes runs, the API processes write reports."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._read_engine = make_snapshot_engine(engine)
        self._run_cache: dict[tuple[str, int], BegunRun] = {}  # bodies never change
        self._report_cache: dict[tuple[str, str], tuple[str, AgentReport]] = {}  # of the last list_reports

    def begin_run(self, run: BegunRun, *, epoch: int) -> bool:
        row = {"job_id": run.job_id, "generation": run.generation, "body": encode(run), "is_restored": False}
        try:
            with transaction(self._engine) as connection:
                sql_state.fence(connection, epoch)
                connection.execute(insert(BEGUN_RUNS), row)
        except IntegrityError:  # the row exists: no other constraint can fail
            return False
        return True

    def record_kill_order(self, job_id: str, generation: int, kill_order: KillOrder, *, epoch: int) -> None:
        same = (BEGUN_RUNS.c.job_id == job_id) & (BEGUN_RUNS.c.generation == generation)
        with transaction(self._engine) as connection:
            sql_state.fence(connection, epoch)
            connection.execute(update(BEGUN_RUNS).where(same).values(doom=encode(kill_order)))

    def record_end(self, run: Run, *, epoch: int) -> None:
        same = (BEGUN_RUNS.c.job_id == run.job_id) & (BEGUN_RUNS.c.generation == run.generation)
        with transaction(self._engine) as connection:
            sql_state.fence(connection, epoch)
            connection.execute(update(BEGUN_RUNS).where(same, BEGUN_RUNS.c.ended.is_(None)).values(ended=encode(run)))

    def list_begun_runs(self) -> tuple[BegunRun, ...]:
        return tuple(map(self._decode_run_row, fetch_rows(self._read_engine, _SELECT_BEGUN_RUNS)))

    def list_begun_runs_of(self, job_id: str) -> tuple[BegunRun, ...]:
        query = _SELECT_BEGUN_RUNS.where(BEGUN_RUNS.c.job_id == job_id)
        return tuple(map(self._decode_run_row, fetch_rows(self._read_engine, query)))

    def record_reports(self, *reports: AgentReport) -> None:
        rows = [
            {"job_id": each.job_id, "node": each.node}
            | {"at_s": each.at_s, "generation": each.generation, "body": encode(each)}
            for each in reports
        ]
        if rows:
            with transaction(self._engine) as connection:
                for row in rows:
                    _upsert_report(connection, row)

    def get_report(self, job_id: str, node: str) -> AgentReport | None:
        query = _SELECT_REPORTS.where(AGENT_REPORTS.c.job_id == job_id, AGENT_REPORTS.c.node == node)
        return next(
            (decode_stored(AgentReport, json.loads(row.body)) for row in fetch_rows(self._read_engine, query)), None
        )

    def list_reports(self) -> tuple[AgentReport, ...]:
        """Return all reports."""
        before, now = self._report_cache, dict[tuple[str, str], tuple[str, AgentReport]]()
        for row in fetch_rows(self._read_engine, _SELECT_REPORTS):
            key, body = (row.job_id, row.node), row.body
            cached = before.get(key)
            now[key] = cached if cached and cached[0] == body else (body, decode_stored(AgentReport, json.loads(body)))
        self._report_cache = now
        return tuple(report for _, report in now.values())

    def delete_runs(self, job_id: str, *, up_to_generation: int, epoch: int) -> None:
        with transaction(self._engine) as connection:
            sql_state.fence(connection, epoch)
            for table in (BEGUN_RUNS, AGENT_REPORTS):
                old = (table.c.job_id == job_id) & (table.c.generation <= up_to_generation)
                connection.execute(delete(table).where(old))

    def _decode_run_row(self, row: AnyRow) -> BegunRun:
        key = (row.job_id, row.generation)
        begun = self._run_cache.get(key) or decode_stored(BegunRun, json.loads(row.body))
        self._run_cache[key] = begun
        if len(self._run_cache) > _RUN_CACHE_MAX:
            self._run_cache = {}  # replaced instead of cleared: other threads may be reading it
        if row.doom is None and row.ended is None and not row.is_restored:
            return begun
        doom = None if row.doom is None else decode_stored(KillOrder, row.doom)
        end = None if row.ended is None else decode_stored(Run, row.ended)
        return replace(begun, doom=doom, end=end, is_restored=row.is_restored)


def _upsert_report(connection: Connection, row: Mapping[str, Any]) -> None:
    table = AGENT_REPORTS
    older = (table.c.job_id == row["job_id"]) & (table.c.node == row["node"]) & (table.c.at_s <= row["at_s"])
    update_older = update(table).where(older).values(row)
    if connection.execute(update_older).rowcount:
        return
    try:
        with connection.begin_nested():
            connection.execute(insert(table), row)
    except IntegrityError:  # the row exists: it is newer, or another process has just inserted it
        connection.execute(update_older)
