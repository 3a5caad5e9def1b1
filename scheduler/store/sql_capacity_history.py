"""History of the use of pools in the database.

A commit adds its bins to every tier. So the tiers agree, and nothing has to be rolled up later.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Connection,
    Double,
    Engine,
    Index,
    LargeBinary,
    Named,
    String,
    Table,
    TypedColumns,
    case,
    delete,
    insert,
    select,
)

from scheduler.domain.capacity_history import CAPACITY_TIERS, MAX_FIELDS, SUMMED_FIELDS, CapacityBin, roll_up
from scheduler.domain.codec import decode_stored, encode
from scheduler.domain.fleet import ForecastFan
from scheduler.store import sql_state
from scheduler.store.capacity_history import HOUR_S, FleetCheckpoint
from scheduler.store.database import (
    METADATA,
    AnyRow,
    build_insert,
    fetch_rows,
    make_autocommit_engine,
    replace_rows,
    transaction,
)
from scheduler.store.protocol import Commit


class CapacityBinColumns(TypedColumns):
    """Columns are the fields of `CapacityBin`."""

    step_s: Named[int] = Column(BigInteger, primary_key=True, autoincrement=False)
    pool: Named[str] = Column(String, primary_key=True)
    at_s: Named[int] = Column(BigInteger, primary_key=True, autoincrement=False)
    seconds: Named[float] = Column(Double)
    inference_gpu_s: Named[float] = Column(Double)
    used_gpu_s: Named[float] = Column(Double)
    lent_used_gpu_s: Named[float] = Column(Double)
    lent_idle_gpu_s: Named[float] = Column(Double)
    free_gpu_s: Named[float] = Column(Double)
    other_gpu_s: Named[float] = Column(Double)
    down_gpu_s: Named[float] = Column(Double)
    lent_idle_waited_gpu_s: Named[float] = Column(Double)
    free_waited_gpu_s: Named[float] = Column(Double)
    lent_node_s: Named[float] = Column(Double)
    demand_gpu_s: Named[float] = Column(Double)
    demand_s: Named[float] = Column(Double)
    short_s: Named[float] = Column(Double)
    lends: Named[int] = Column(BigInteger)
    recalls: Named[int] = Column(BigInteger)
    returns: Named[int] = Column(BigInteger)
    late_returns: Named[int] = Column(BigInteger)
    demand_gpus_max: Named[float] = Column(Double)
    lent_nodes_max: Named[int] = Column(BigInteger)
    pending_jobs_max: Named[int] = Column(BigInteger)
    pending_gpus_max: Named[int] = Column(BigInteger)


class FleetCheckpointColumns(TypedColumns):
    at_s: Named[int] = Column(BigInteger, primary_key=True, autoincrement=False)
    is_hourly: Named[bool] = Column(Boolean)
    body: Named[bytes] = Column(LargeBinary)


class FleetChangeColumns(TypedColumns):
    """One row for each commit that changed the fleet as checkpoints show it."""

    generation: Named[int] = Column(BigInteger, primary_key=True, autoincrement=False)
    at_s: Named[float] = Column(Double)
    body: Named[bytes] = Column(LargeBinary)


class ForecastFanColumns(TypedColumns):
    pool: Named[str] = Column(String, primary_key=True)
    body: Named[Any] = Column(JSON, nullable=False)


CAPACITY_BINS = Table("capacity_bins", METADATA, CapacityBinColumns)
FLEET_CHECKPOINTS = Table("fleet_checkpoints", METADATA, FleetCheckpointColumns)
FLEET_CHANGES = Table("fleet_changes", METADATA, FleetChangeColumns)
FORECAST_FANS = Table("forecast_fans", METADATA, ForecastFanColumns)
_BIN = CAPACITY_BINS.c
Index("ix_capacity_bins_time", _BIN.step_s, _BIN.at_s)
Index("ix_fleet_changes_time", FLEET_CHANGES.c.at_s)
_KEY_COLUMNS = [column.name for column in CAPACITY_BINS.primary_key]
_FIELDS = ("pool", "step_s", "at_s", *SUMMED_FIELDS, *MAX_FIELDS)
_COLUMNS = [_BIN[name] for name in _FIELDS]


class SqlCapacityHistory:
    """CapacityHistory in SQL."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._read_engine = make_autocommit_engine(engine)

    def list_bins(self, step_s: int, *, from_s: float, to_s: float, pool: str = "") -> tuple[CapacityBin, ...]:
        found = select(*_COLUMNS).where(_BIN.step_s == step_s, _BIN.at_s > from_s - step_s, _BIN.at_s < to_s)
        if pool:
            found = found.where(_BIN.pool == pool)
        rows = fetch_rows(self._read_engine, found.order_by(_BIN.pool, _BIN.at_s))
        return tuple(map(decode_bin_row, rows))

    def find_checkpoint(self, at_s: float) -> FleetCheckpoint | None:
        row = FLEET_CHECKPOINTS.c
        newest = select(FLEET_CHECKPOINTS).where(row.at_s <= int(at_s)).order_by(row.at_s.desc()).limit(1)
        found = fetch_rows(self._read_engine, newest)
        return next((FleetCheckpoint(each.at_s, each.is_hourly, each.body) for each in found), None)

    def add_checkpoint(self, at_s: int, body: bytes, *, epoch: int) -> None:
        row = FLEET_CHECKPOINTS.c
        hour_s = at_s // HOUR_S * HOUR_S
        earlier = select(row.at_s).where(row.at_s >= hour_s, row.at_s < at_s).limit(1)
        with transaction(self._engine) as connection:
            sql_state.fence(connection, epoch)
            is_hourly = connection.execute(earlier).first() is None
            written = {"is_hourly": is_hourly, "body": body}
            insert = build_insert(connection, FLEET_CHECKPOINTS).values(at_s=at_s, **written)
            connection.execute(insert.on_conflict_do_update(index_elements=["at_s"], set_=written))

    def list_fleet_changes(self, *, after: int, until_s: float) -> tuple[bytes, ...]:
        row = FLEET_CHANGES.c
        found = select(row.body).where(row.generation > after, row.at_s <= until_s).order_by(row.generation)
        return tuple(each.body for each in fetch_rows(self._read_engine, found))

    def put_fans(self, fans: tuple[ForecastFan, ...], *, epoch: int) -> None:
        with transaction(self._engine) as connection:
            sql_state.fence(connection, epoch)
            replace_rows(connection, FORECAST_FANS, [{"pool": fan.pool, "body": encode(fan)} for fan in fans])

    def list_fans(self) -> tuple[ForecastFan, ...]:
        rows = fetch_rows(self._read_engine, select(FORECAST_FANS).order_by(FORECAST_FANS.c.pool))
        return tuple(decode_stored(ForecastFan, row.body) for row in rows)


def write_capacity(connection: Connection, commit: Commit) -> None:
    """Add the narrowest bins of a commit to the stored bins of every tier, and its change of the fleet."""
    if commit.capacity:
        write_bins(connection, [each for tier in CAPACITY_TIERS for each in roll_up(commit.capacity, tier.step_s)])
    if commit.fleet_change:
        snapshot = commit.snapshot
        row = {"generation": snapshot.generation, "at_s": snapshot.now_s, "body": commit.fleet_change}
        connection.execute(insert(FLEET_CHANGES), row)


def take_late_bins(connection: Connection, *, after_s: int) -> list[CapacityBin]:
    """Delete the bins of all tiers that begin after a time, and return them."""
    bins = [decode_bin_row(row) for row in connection.execute(select(*_COLUMNS).where(_BIN.at_s > after_s)).all()]
    connection.execute(delete(CAPACITY_BINS).where(_BIN.at_s > after_s))
    return bins


def write_bins(connection: Connection, bins: Iterable[CapacityBin]) -> None:
    """Merge the bins with the stored ones of their places."""
    rows = [{name: getattr(each, name) for name in _FIELDS} for each in bins]
    if not rows:
        return
    statement = build_insert(connection, CAPACITY_BINS)
    new = statement.excluded
    sums = {name: _BIN[name] + new[name] for name in SUMMED_FIELDS}
    largest = {name: case((new[name] > _BIN[name], new[name]), else_=_BIN[name]) for name in MAX_FIELDS}
    connection.execute(statement.on_conflict_do_update(index_elements=_KEY_COLUMNS, set_={**sums, **largest}), rows)


def decode_bin_row(row: AnyRow) -> CapacityBin:
    """Return the bin of a row of `_COLUMNS`. Access by position is much faster than by name."""
    return CapacityBin(**dict(zip(_FIELDS, row, strict=True)))
