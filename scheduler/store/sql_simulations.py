"""Submitted simulations in the database, with their input files and reports, and the daily comparisons."""

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
    ColumnElement,
    Double,
    Engine,
    LargeBinary,
    Named,
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

from scheduler.domain.codec import decode_stored, encode
from scheduler.domain.owner_ids import derive_owner_id
from scheduler.domain.savings_comparison import ComparisonState, DailyComparison
from scheduler.domain.simulation_task import LIVE_TASK_STATES, SimulationFiles, SimulationTask, TaskState
from scheduler.store import sql_state
from scheduler.store.api_protocol import AuditEntry, IdempotencyKey
from scheduler.store.database import METADATA, AnyRow, fetch_rows, make_autocommit_engine, replace_rows, transaction
from scheduler.store.sql_api_tables import insert_audit_entries, insert_idempotency_key


class SimulationColumns(TypedColumns):
    """`holder` runs the simulation. Its claim expires at `claimed_until_s`."""

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
    owner_id: Named[str] = Column(String, index=True, server_default="")
    description: Named[str] = Column(String, server_default="")


class SimulationTextColumns(TypedColumns):
    """`files` and `report` are compressed JSON."""

    id: Named[str] = Column(String, primary_key=True)
    files: Named[bytes] = Column(LargeBinary)
    report: Named[bytes | None] = Column(LargeBinary)


class DailyComparisonColumns(TypedColumns):
    day_s: Named[int] = Column(BigInteger, primary_key=True, autoincrement=False)
    body: Named[Any] = Column(JSON, nullable=False)


SIMULATIONS = Table("simulations", METADATA, SimulationColumns)
SIMULATION_TEXTS = Table("simulation_texts", METADATA, SimulationTextColumns)
DAILY_COMPARISONS = Table("daily_comparisons", METADATA, DailyComparisonColumns)
_LIVE = SIMULATIONS.c.state.in_([state.value for state in LIVE_TASK_STATES])


class SqlSimulations:
    """SimulationStore in SQL."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._read_engine = make_autocommit_engine(engine)

    def create(
        self,
        task: SimulationTask,
        files: SimulationFiles,
        key: IdempotencyKey | None = None,
        *,
        audit: AuditEntry | None = None,
    ) -> None:
        row = asdict(task) | {"policies": list(task.policies), "state": task.state.value}
        del row["number"]
        texts = {"id": task.id, "files": _compress_json(asdict(files)), "report": None}
        with transaction(self._engine) as connection:
            if key is not None:
                insert_idempotency_key(connection, key, task.id)
            connection.execute(insert(SIMULATIONS), row | {"holder": "", "claimed_until_s": 0.0})
            connection.execute(insert(SIMULATION_TEXTS), texts)
            insert_audit_entries(connection, [audit] if audit else [])

    def get_task(self, task_id: str) -> SimulationTask | None:
        rows = fetch_rows(self._read_engine, select(SIMULATIONS).where(SIMULATIONS.c.id == task_id))
        return next(map(_decode_task_row, rows), None)

    def list_tasks(self, *, limit: int, before: int | None = None, owner_id: str = "") -> tuple[SimulationTask, ...]:
        query = select(SIMULATIONS).order_by(SIMULATIONS.c.number.desc()).limit(limit)
        if before is not None:
            query = query.where(SIMULATIONS.c.number < before)
        if owner_id:
            query = query.where(SIMULATIONS.c.owner_id == owner_id)
        return tuple(map(_decode_task_row, fetch_rows(self._read_engine, query)))

    def count_live_tasks(self, owner_id: str) -> int:
        query = select(func.count()).select_from(SIMULATIONS).where(SIMULATIONS.c.owner_id == owner_id, _LIVE)
        with transaction(self._read_engine) as connection:
            return connection.execute(query).scalar_one()

    def get_files(self, task_id: str) -> SimulationFiles | None:
        rows = fetch_rows(self._read_engine, select(SIMULATION_TEXTS).where(SIMULATION_TEXTS.c.id == task_id))
        return next((SimulationFiles(**_decompress_json(row.files)) for row in rows), None)

    def get_report(self, task_id: str) -> dict[str, Any] | None:
        rows = fetch_rows(
            self._read_engine,
            select(SIMULATION_TEXTS).where(SIMULATION_TEXTS.c.id == task_id, SIMULATION_TEXTS.c.report.is_not(None)),
        )
        return next((_decompress_json(row.report) for row in rows), None)

    def cancel(self, task_id: str, *, now_s: float, audit: AuditEntry | None = None) -> SimulationTask | None:
        ended = {"state": TaskState.CANCELLED.value, "ended_at_s": now_s, "holder": "", "playing": ""}
        with transaction(self._engine) as connection:
            live = update(SIMULATIONS).where(SIMULATIONS.c.id == task_id, _LIVE)
            is_cancelled = connection.execute(live.values(ended)).rowcount
            insert_audit_entries(connection, [audit] if audit and is_cancelled else [])
        return self.get_task(task_id)

    def claim(self, holder: str, *, now_s: float, until_s: float) -> SimulationTask | None:
        running = SIMULATIONS.c.state == TaskState.RUNNING.value
        free = or_(SIMULATIONS.c.state == TaskState.QUEUED.value, and_(running, SIMULATIONS.c.claimed_until_s <= now_s))
        oldest = select(SIMULATIONS.c.id).where(free).order_by(SIMULATIONS.c.number).limit(1)
        for row in fetch_rows(self._read_engine, oldest):
            claimed = {"state": TaskState.RUNNING.value, "holder": holder, "claimed_until_s": until_s}
            begun = {"tries": SIMULATIONS.c.tries + 1, "started_at_s": now_s, "jobs_done": 0, "playing": ""}
            with transaction(self._engine) as connection:
                taken = update(SIMULATIONS).where(SIMULATIONS.c.id == row.id, free).values(claimed | begun)
                if not connection.execute(taken).rowcount:
                    return None  # another runner was first; the next poll looks for other simulations
            return self.get_task(row.id)
        return None

    def renew_claim(self, task_id: str, holder: str, *, until_s: float, playing: str, jobs_done: int) -> bool:
        changes = {"claimed_until_s": until_s, "playing": playing, "jobs_done": jobs_done}
        return self._update_claimed(task_id, holder, changes)

    def requeue(self, task_id: str, holder: str, *, reason: str, counts_as_try: bool) -> None:
        tries = SIMULATIONS.c.tries if counts_as_try else SIMULATIONS.c.tries - 1
        queued = {"state": TaskState.QUEUED.value, "holder": "", "playing": "", "jobs_done": 0, "started_at_s": None}
        self._update_claimed(task_id, holder, {**queued, "tries": tries, "reason": reason})

    def fail(self, task_id: str, holder: str, *, now_s: float, reason: str, tries: int) -> None:
        failed = {"state": TaskState.FAILED.value, "ended_at_s": now_s, "holder": "", "playing": ""}
        self._update_claimed(task_id, holder, {**failed, "reason": reason, "tries": tries})

    def finish(self, task_id: str, holder: str, report: Mapping[str, Any], *, now_s: float) -> None:
        ended = {"state": TaskState.SUCCEEDED.value, "ended_at_s": now_s, "holder": "", "playing": "", "reason": ""}
        compressed = _compress_json(report)
        with transaction(self._engine) as connection:
            own = (SIMULATIONS.c.id == task_id) & (SIMULATIONS.c.holder == holder)
            finished = update(SIMULATIONS).where(own).values(**ended, jobs_done=SIMULATIONS.c.jobs_total)
            if connection.execute(finished).rowcount:
                connection.execute(
                    update(SIMULATION_TEXTS).where(SIMULATION_TEXTS.c.id == task_id).values(report=compressed)
                )

    def delete_ended(self, *, before_s: float) -> None:
        old = select(SIMULATIONS.c.id).where(SIMULATIONS.c.ended_at_s < before_s)
        with transaction(self._engine) as connection:
            connection.execute(delete(SIMULATION_TEXTS).where(SIMULATION_TEXTS.c.id.in_(old)))
            connection.execute(delete(SIMULATIONS).where(SIMULATIONS.c.ended_at_s < before_s))

    def _update_claimed(self, task_id: str, holder: str, values: Mapping[str, Any]) -> bool:
        own = (SIMULATIONS.c.id == task_id) & (SIMULATIONS.c.holder == holder)
        with transaction(self._engine) as connection:
            return connection.execute(update(SIMULATIONS).where(own).values(dict(values))).rowcount == 1


class SqlDailyComparisons:
    """DailyComparisonStore in SQL."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._read_engine = make_autocommit_engine(engine)

    def get(self, day_s: int) -> DailyComparison | None:
        return next(iter(self._fetch(DAILY_COMPARISONS.c.day_s == day_s)), None)

    def list_days(self, *, from_s: float, to_s: float) -> tuple[DailyComparison, ...]:
        return self._fetch(DAILY_COMPARISONS.c.day_s >= from_s, DAILY_COMPARISONS.c.day_s < to_s)

    def list_running(self) -> tuple[DailyComparison, ...]:
        return self._fetch(DAILY_COMPARISONS.c.body["state"].as_string() == ComparisonState.RUNNING.value)

    def put(self, comparison: DailyComparison, *, epoch: int) -> None:
        with transaction(self._engine) as connection:
            sql_state.fence(connection, epoch)
            row = {"day_s": comparison.day_s, "body": encode(comparison)}
            replace_rows(connection, DAILY_COMPARISONS, [row])

    def _fetch(self, *conditions: ColumnElement[bool]) -> tuple[DailyComparison, ...]:
        found = select(DAILY_COMPARISONS).where(*conditions).order_by(DAILY_COMPARISONS.c.day_s)
        return tuple(decode_stored(DailyComparison, row.body) for row in fetch_rows(self._read_engine, found))


def _compress_json(value: Mapping[str, Any]) -> bytes:
    return zlib.compress(json.dumps(value, allow_nan=False).encode())


def _decompress_json(compressed: bytes) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(zlib.decompress(compressed))
    return value


def _decode_task_row(row: AnyRow) -> SimulationTask:
    task = SimulationTask(**{field.name: getattr(row, field.name) for field in fields(SimulationTask)})
    owner_id = task.owner_id or derive_owner_id(task.owner)  # an older API process writes none
    return replace(task, policies=tuple(task.policies), state=TaskState(task.state), owner_id=owner_id)
