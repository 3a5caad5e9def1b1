"""SqlSimulations: simulations that were handed in, with their files and reports, in the database of a SqlStore.

Whoever claims one plays it for as long as it keeps saying so; once it is silent, another may begin it again. What it
writes counts only while the claim is its own, so that nothing comes of a simulation that was cancelled meanwhile.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    Double,
    Engine,
    LargeBinary,
    Named,
    Select,
    String,
    Table,
    TypedColumns,
    and_,
    delete,
    func,
    insert,
    or_,
    select,
    update,
)

from scheduler.domain.simulation_task import LIVE, SimulationFiles, SimulationTask, TaskState
from scheduler.store.engine import for_glancing, transaction
from scheduler.store.history import AnyRow
from scheduler.store.sql_keys import CreationKey, take_key
from scheduler.store.tables import METADATA


class SimulationColumns(TypedColumns):
    """`holder` plays it, and is taken for gone at `claimed_until_s`."""

    number: Named[int] = Column(primary_key=True)
    id: Named[str] = Column(String, unique=True, index=True)
    owner: Named[str] = Column(String, index=True)
    created_at_s: Named[float] = Column(Double)
    policies: Named[Any] = Column(JSON, nullable=False)
    seed: Named[int] = Column(BigInteger)
    jobs_total: Named[int] = Column(BigInteger)
    state: Named[str] = Column(String, index=True)
    playing: Named[str] = Column(String)
    jobs_done: Named[int] = Column(BigInteger)
    tries: Named[int] = Column()
    started_at_s: Named[float | None] = Column(Double)
    ended_at_s: Named[float | None] = Column(Double)
    reason: Named[str] = Column(String)
    holder: Named[str] = Column(String)
    claimed_until_s: Named[float] = Column(Double)


class SimulationTextColumns(TypedColumns):
    """`files` and `report` are compressed JSON."""

    id: Named[str] = Column(String, primary_key=True)
    files: Named[bytes] = Column(LargeBinary)
    report: Named[bytes | None] = Column(LargeBinary)


SIMULATIONS = Table("simulations", METADATA, SimulationColumns)
TEXTS = Table("simulation_texts", METADATA, SimulationTextColumns)
_LIVE = SIMULATIONS.c.state.in_([state.value for state in LIVE])


class SqlSimulations:
    """`engine` is a store's, whose database has been migrated."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._reading = for_glancing(engine)

    def create(self, task: SimulationTask, files: SimulationFiles, key: CreationKey | None = None) -> None:
        """Raises KeyTakenError."""
        row = asdict(task) | {"policies": list(task.policies), "state": task.state.value}
        del row["number"]
        texts = {"id": task.id, "files": _packed(asdict(files)), "report": None}
        with transaction(self._engine) as connection:
            if key is not None:
                take_key(connection, key, task.id)
            connection.execute(insert(SIMULATIONS), row | {"holder": "", "claimed_until_s": 0.0})
            connection.execute(insert(TEXTS), texts)

    def task(self, task_id: str) -> SimulationTask | None:
        return next(map(_task, self._rows(select(SIMULATIONS).where(SIMULATIONS.c.id == task_id))), None)

    def tasks(self, *, limit: int, before: int | None = None, owner: str = "") -> tuple[SimulationTask, ...]:
        """Newest first, up to `limit` of those with a lower number than `before`; of one owner or of all."""
        query = select(SIMULATIONS).order_by(SIMULATIONS.c.number.desc()).limit(limit)
        if before is not None:
            query = query.where(SIMULATIONS.c.number < before)
        return tuple(map(_task, self._rows(query.where(SIMULATIONS.c.owner == owner) if owner else query)))

    def live_count(self, owner: str) -> int:
        """How many of that owner's have not ended."""
        query = select(func.count()).select_from(SIMULATIONS).where(SIMULATIONS.c.owner == owner, _LIVE)
        with transaction(self._reading) as connection:
            return connection.execute(query).scalar_one()

    def files(self, task_id: str) -> SimulationFiles | None:
        rows = self._rows(select(TEXTS).where(TEXTS.c.id == task_id))
        return next((SimulationFiles(**_unpacked(row.files)) for row in rows), None)

    def report(self, task_id: str) -> dict[str, Any] | None:
        rows = self._rows(select(TEXTS).where(TEXTS.c.id == task_id, TEXTS.c.report.is_not(None)))
        return next((_unpacked(row.report) for row in rows), None)

    def cancel(self, task_id: str, *, now_s: float) -> SimulationTask | None:
        """The task, cancelled unless it had ended already. Whoever plays it finds that out by itself."""
        ended = {"state": TaskState.CANCELLED.value, "ended_at_s": now_s, "holder": "", "playing": ""}
        with transaction(self._engine) as connection:
            connection.execute(update(SIMULATIONS).where(SIMULATIONS.c.id == task_id, _LIVE).values(ended))
        return self.task(task_id)

    def claim(self, holder: str, *, now_s: float, until_s: float) -> SimulationTask | None:
        """The task that waits longest, or whose player is silent: from now on `holder`'s. None: there is none."""
        running = SIMULATIONS.c.state == TaskState.RUNNING.value
        free = or_(SIMULATIONS.c.state == TaskState.QUEUED.value, and_(running, SIMULATIONS.c.claimed_until_s <= now_s))
        for row in self._rows(select(SIMULATIONS.c.id).where(free).order_by(SIMULATIONS.c.number).limit(1)):
            claimed = {"state": TaskState.RUNNING.value, "holder": holder, "claimed_until_s": until_s}
            begun = {"tries": SIMULATIONS.c.tries + 1, "started_at_s": now_s, "jobs_done": 0, "playing": ""}
            with transaction(self._engine) as connection:
                taken = update(SIMULATIONS).where(SIMULATIONS.c.id == row.id, free).values(claimed | begun)
                if not connection.execute(taken).rowcount:
                    return None  # another was first; the next look finds what else there is
            return self.task(row.id)
        return None

    def renew(self, task_id: str, holder: str, *, until_s: float, playing: str, jobs_done: int) -> bool:
        """Say that it is still played, and how far it is. False: it is not `holder`'s any more."""
        known = {"claimed_until_s": until_s, "playing": playing, "jobs_done": jobs_done}
        return self._write(task_id, holder, known)

    def give_back(self, task_id: str, holder: str, *, reason: str, counts: bool) -> None:
        """It waits again; `counts` tells whether this was one of its tries."""
        tries = SIMULATIONS.c.tries if counts else SIMULATIONS.c.tries - 1
        queued = {"state": TaskState.QUEUED.value, "holder": "", "playing": "", "jobs_done": 0, "started_at_s": None}
        self._write(task_id, holder, {**queued, "tries": tries, "reason": reason})

    def fail(self, task_id: str, holder: str, *, now_s: float, reason: str, tries: int) -> None:
        failed = {"state": TaskState.FAILED.value, "ended_at_s": now_s, "holder": "", "playing": ""}
        self._write(task_id, holder, {**failed, "reason": reason, "tries": tries})

    def finish(self, task_id: str, holder: str, report: Mapping[str, Any], *, now_s: float) -> None:
        done = {"state": TaskState.SUCCEEDED.value, "ended_at_s": now_s, "holder": "", "playing": "", "reason": ""}
        packed = _packed(report)
        with transaction(self._engine) as connection:
            own = (SIMULATIONS.c.id == task_id) & (SIMULATIONS.c.holder == holder)
            finished = update(SIMULATIONS).where(own).values(**done, jobs_done=SIMULATIONS.c.jobs_total)
            if connection.execute(finished).rowcount:
                connection.execute(update(TEXTS).where(TEXTS.c.id == task_id).values(report=packed))

    def forget(self, *, before_s: float) -> None:
        """Delete what ended before that."""
        old = select(SIMULATIONS.c.id).where(SIMULATIONS.c.ended_at_s < before_s)
        with transaction(self._engine) as connection:
            connection.execute(delete(TEXTS).where(TEXTS.c.id.in_(old)))
            connection.execute(delete(SIMULATIONS).where(SIMULATIONS.c.ended_at_s < before_s))

    def _write(self, task_id: str, holder: str, values: Mapping[str, Any]) -> bool:
        own = (SIMULATIONS.c.id == task_id) & (SIMULATIONS.c.holder == holder)
        with transaction(self._engine) as connection:
            return connection.execute(update(SIMULATIONS).where(own).values(dict(values))).rowcount == 1

    def _rows(self, query: Select[*tuple[Any, ...]]) -> list[AnyRow]:
        with transaction(self._reading) as connection:
            return list(connection.execute(query).all())


def _packed(value: Mapping[str, Any]) -> bytes:
    return zlib.compress(json.dumps(value, allow_nan=False).encode())


def _unpacked(packed: bytes) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(zlib.decompress(packed))
    return value


def _task(row: AnyRow) -> SimulationTask:
    made = SimulationTask(**{field.name: getattr(row, field.name) for field in fields(SimulationTask)})
    return replace(made, policies=tuple(made.policies), state=TaskState(made.state))
