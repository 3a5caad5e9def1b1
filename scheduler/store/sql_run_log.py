"""SqlRunLog: the run log in the database of a SqlStore. The leader begins and forgets, the API's processes report."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Engine, Select, delete, insert, select, update
from sqlalchemy.exc import IntegrityError

from scheduler.domain.agent_report import AgentReport, BegunRun
from scheduler.domain.codec import decode, encode
from scheduler.store import leadership
from scheduler.store.engine import for_reading
from scheduler.store.history import AnyRow
from scheduler.store.tables import AGENT_REPORTS, BEGUN_RUNS

_BEGUN = select(BEGUN_RUNS).order_by(BEGUN_RUNS.c.job_id, BEGUN_RUNS.c.generation)
_REPORTS = select(AGENT_REPORTS).order_by(AGENT_REPORTS.c.job_id, AGENT_REPORTS.c.node)


class SqlRunLog:
    """See RunLog. `engine` is a store's, whose database has been migrated."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._reading = for_reading(engine)

    def begin(self, run: BegunRun, *, epoch: int) -> bool:
        row = {"job_id": run.job_id, "generation": run.generation, "body": encode(run)}
        try:
            with self._engine.begin() as connection:
                leadership.fence(connection, epoch)
                connection.execute(insert(BEGUN_RUNS), row)
        except IntegrityError:  # the only constraint that a row can break is that job and generation are new
            return False
        return True

    def begun(self) -> tuple[BegunRun, ...]:
        return tuple(decode(BegunRun, row.body) for row in self._rows(_BEGUN))

    def begun_of(self, job_id: str) -> tuple[BegunRun, ...]:
        return tuple(decode(BegunRun, row.body) for row in self._rows(_BEGUN.where(BEGUN_RUNS.c.job_id == job_id)))

    def report(self, report: AgentReport) -> None:
        table, key = AGENT_REPORTS, {"job_id": report.job_id, "node": report.node}
        values = {"at_s": report.at_s, "generation": report.generation, "body": encode(report)}
        same = (table.c.job_id == report.job_id) & (table.c.node == report.node)
        with self._engine.begin() as connection:
            if connection.execute(update(table).where(same).values(node=report.node)).rowcount:
                connection.execute(update(table).where(same, table.c.at_s <= report.at_s).values(values))
                return
            try:
                with connection.begin_nested():
                    connection.execute(insert(table), {**key, **values})
            except IntegrityError:  # another process was first: the newer of the two stays
                connection.execute(update(table).where(same, table.c.at_s <= report.at_s).values(values))

    def reports(self) -> tuple[AgentReport, ...]:
        return tuple(decode(AgentReport, row.body) for row in self._rows(_REPORTS))

    def forget(self, job_id: str, *, up_to_generation: int) -> None:
        with self._engine.begin() as connection:
            for table in (BEGUN_RUNS, AGENT_REPORTS):
                old = (table.c.job_id == job_id) & (table.c.generation <= up_to_generation)
                connection.execute(delete(table).where(old))

    def _rows(self, query: Select[*tuple[Any, ...]]) -> list[AnyRow]:
        with self._reading.begin() as connection:
            return list(connection.execute(query).all())
