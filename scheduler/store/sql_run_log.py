"""SqlRunLog: the run log in the database of a SqlStore. The leader begins and forgets, the API's processes report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection, Engine, Select, delete, insert, select, update
from sqlalchemy.exc import IntegrityError

from scheduler.domain.codec import decode, encode
from scheduler.domain.observation import AgentReport, BegunRun, KillOrder, Run
from scheduler.store import sql_state
from scheduler.store.database import make_snapshot_engine, transaction
from scheduler.store.sql_history import AnyRow
from scheduler.store.tables import AGENT_REPORTS, BEGUN_RUNS

_SELECT_BEGUN_RUNS = select(BEGUN_RUNS).order_by(BEGUN_RUNS.c.job_id, BEGUN_RUNS.c.generation)
_SELECT_REPORTS = select(AGENT_REPORTS).order_by(AGENT_REPORTS.c.job_id, AGENT_REPORTS.c.node)
_RUN_CACHE_MAX = 4096


class SqlRunLog:
    """See RunLog. `engine` is a store's, whose database has been migrated."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._read_engine = make_snapshot_engine(engine)
        self._run_cache: dict[tuple[str, int], BegunRun] = {}  # as they were begun, which never changes
        self._report_cache: dict[tuple[str, str], tuple[Any, AgentReport]] = {}  # rows of the last look, decoded

    def begin_run(self, run: BegunRun, *, epoch: int) -> bool:
        row = {"job_id": run.job_id, "generation": run.generation, "body": encode(run)}
        try:
            with transaction(self._engine) as connection:
                sql_state.fence(connection, epoch)
                connection.execute(insert(BEGUN_RUNS), row)
        except IntegrityError:  # the only constraint that a row can break is that job and generation are new
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
        return tuple(map(self._decode_run_row, self._fetch_rows(_SELECT_BEGUN_RUNS)))

    def list_begun_runs_of(self, job_id: str) -> tuple[BegunRun, ...]:
        return tuple(
            map(self._decode_run_row, self._fetch_rows(_SELECT_BEGUN_RUNS.where(BEGUN_RUNS.c.job_id == job_id)))
        )

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
        own = _SELECT_REPORTS.where(AGENT_REPORTS.c.job_id == job_id, AGENT_REPORTS.c.node == node)
        return next((decode(AgentReport, row.body) for row in self._fetch_rows(own)), None)

    def list_reports(self) -> tuple[AgentReport, ...]:
        """Read at each look of an executor, and most are what they were: only others are decoded."""
        before, self._report_cache = self._report_cache, {}
        for row in self._fetch_rows(_SELECT_REPORTS):
            key, body = (row.job_id, row.node), row.body
            known = before.get(key)
            self._report_cache[key] = known if known and known[0] == body else (body, decode(AgentReport, body))
        return tuple(report for _, report in self._report_cache.values())

    def delete_runs(self, job_id: str, *, up_to_generation: int, epoch: int) -> None:
        with transaction(self._engine) as connection:
            sql_state.fence(connection, epoch)
            for table in (BEGUN_RUNS, AGENT_REPORTS):
                old = (table.c.job_id == job_id) & (table.c.generation <= up_to_generation)
                connection.execute(delete(table).where(old))

    def _fetch_rows(self, query: Select[*tuple[Any, ...]]) -> list[AnyRow]:
        with transaction(self._read_engine) as connection:
            return list(connection.execute(query).all())

    def _decode_run_row(self, row: AnyRow) -> BegunRun:
        key = (row.job_id, row.generation)
        begun = self._run_cache.get(key) or decode(BegunRun, row.body)
        self._run_cache[key] = begun
        if len(self._run_cache) > _RUN_CACHE_MAX:
            self._run_cache = {}  # at once, because several threads may read it now
        doom = None if row.doom is None else decode(KillOrder, row.doom)
        return replace(begun, doom=doom, end=None if row.ended is None else decode(Run, row.ended))


def _upsert_report(connection: Connection, row: Mapping[str, Any]) -> None:
    table = AGENT_REPORTS
    older = (table.c.job_id == row["job_id"]) & (table.c.node == row["node"]) & (table.c.at_s <= row["at_s"])
    newer = update(table).where(older).values(row)
    if connection.execute(newer).rowcount:
        return
    try:
        with connection.begin_nested():
            connection.execute(insert(table), row)
    except IntegrityError:  # there is one: a newer report, or that of another process which was first just now
        connection.execute(newer)
