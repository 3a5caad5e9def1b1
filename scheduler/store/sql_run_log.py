"""SqlRunLog: the run log in the database of a SqlStore. The leader begins and forgets, the API's processes report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection, Engine, Select, delete, insert, select, update
from sqlalchemy.exc import IntegrityError

from scheduler.domain.agent_report import AgentReport, BegunRun, Doom
from scheduler.domain.codec import decode, encode
from scheduler.domain.observation import Run
from scheduler.store import leadership
from scheduler.store.engine import for_reading, transaction
from scheduler.store.history import AnyRow
from scheduler.store.tables import AGENT_REPORTS, BEGUN_RUNS

_BEGUN = select(BEGUN_RUNS).order_by(BEGUN_RUNS.c.job_id, BEGUN_RUNS.c.generation)
_REPORTS = select(AGENT_REPORTS).order_by(AGENT_REPORTS.c.job_id, AGENT_REPORTS.c.node)
_DECODED_MAX = 4096


class SqlRunLog:
    """See RunLog. `engine` is a store's, whose database has been migrated."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._reading = for_reading(engine)
        self._decoded: dict[tuple[str, int], BegunRun] = {}  # as they were begun, which never changes
        self._told: dict[tuple[str, str], tuple[Any, AgentReport]] = {}  # rows of the last look, decoded

    def begin(self, run: BegunRun, *, epoch: int) -> bool:
        row = {"job_id": run.job_id, "generation": run.generation, "body": encode(run)}
        try:
            with transaction(self._engine) as connection:
                leadership.fence(connection, epoch)
                connection.execute(insert(BEGUN_RUNS), row)
        except IntegrityError:  # the only constraint that a row can break is that job and generation are new
            return False
        return True

    def doom(self, job_id: str, generation: int, doom: Doom, *, epoch: int) -> None:
        same = (BEGUN_RUNS.c.job_id == job_id) & (BEGUN_RUNS.c.generation == generation)
        with transaction(self._engine) as connection:
            leadership.fence(connection, epoch)
            connection.execute(update(BEGUN_RUNS).where(same).values(doom=encode(doom)))

    def end(self, run: Run, *, epoch: int) -> None:
        same = (BEGUN_RUNS.c.job_id == run.job_id) & (BEGUN_RUNS.c.generation == run.generation)
        with transaction(self._engine) as connection:
            leadership.fence(connection, epoch)
            connection.execute(update(BEGUN_RUNS).where(same, BEGUN_RUNS.c.ended.is_(None)).values(ended=encode(run)))

    def begun(self) -> tuple[BegunRun, ...]:
        return tuple(map(self._begun_run, self._rows(_BEGUN)))

    def begun_of(self, job_id: str) -> tuple[BegunRun, ...]:
        return tuple(map(self._begun_run, self._rows(_BEGUN.where(BEGUN_RUNS.c.job_id == job_id))))

    def report(self, *reports: AgentReport) -> None:
        rows = [
            {"job_id": each.job_id, "node": each.node}
            | {"at_s": each.at_s, "generation": each.generation, "body": encode(each)}
            for each in reports
        ]
        if rows:
            with transaction(self._engine) as connection:
                for row in rows:
                    _put(connection, row)

    def report_of(self, job_id: str, node: str) -> AgentReport | None:
        own = _REPORTS.where(AGENT_REPORTS.c.job_id == job_id, AGENT_REPORTS.c.node == node)
        return next((decode(AgentReport, row.body) for row in self._rows(own)), None)

    def reports(self) -> tuple[AgentReport, ...]:
        """Read at each look of an executor, and most are what they were: only others are decoded."""
        before, self._told = self._told, {}
        for row in self._rows(_REPORTS):
            key, body = (row.job_id, row.node), row.body
            known = before.get(key)
            self._told[key] = known if known and known[0] == body else (body, decode(AgentReport, body))
        return tuple(report for _, report in self._told.values())

    def forget(self, job_id: str, *, up_to_generation: int, epoch: int) -> None:
        with transaction(self._engine) as connection:
            leadership.fence(connection, epoch)
            for table in (BEGUN_RUNS, AGENT_REPORTS):
                old = (table.c.job_id == job_id) & (table.c.generation <= up_to_generation)
                connection.execute(delete(table).where(old))

    def _rows(self, query: Select[*tuple[Any, ...]]) -> list[AnyRow]:
        with transaction(self._reading) as connection:
            return list(connection.execute(query).all())

    def _begun_run(self, row: AnyRow) -> BegunRun:
        key = (row.job_id, row.generation)
        begun = self._decoded.get(key) or decode(BegunRun, row.body)
        self._decoded[key] = begun
        if len(self._decoded) > _DECODED_MAX:
            self._decoded = {}  # at once, because several threads may read it now
        doom = None if row.doom is None else decode(Doom, row.doom)
        return replace(begun, doom=doom, end=None if row.ended is None else decode(Run, row.ended))


def _put(connection: Connection, row: Mapping[str, Any]) -> None:
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
