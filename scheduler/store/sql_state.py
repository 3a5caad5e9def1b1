"""Live state and lease in the database: what readers fetch of the newest snapshot, and what a commit writes.

Each mapping of the snapshot has one table of key, JSON body and the generation that wrote the row, so that a reader
fetches only rows newer than its snapshot. A row without a body is a tombstone: the record was removed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    Connection,
    Double,
    Named,
    Row,
    String,
    Table,
    TypedColumns,
    delete,
    select,
    update,
)

from scheduler.domain.codec import CodecError, decode_stored, encode, encode_as
from scheduler.domain.fleet import DemandReading, Forecast, Loan, Node, Pool
from scheduler.domain.gpu_sets import GpuShape
from scheduler.domain.hardware import GpuProfile
from scheduler.domain.job import Job
from scheduler.domain.job_queue import JobQueue
from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.domain.recall_receipts import RecallReceipt
from scheduler.domain.return_times import ReturnTimes
from scheduler.domain.run_times import RunTimes
from scheduler.domain.scaling_curve import ScalingCurve
from scheduler.domain.shadow_lending import ShadowLending
from scheduler.domain.snapshot import Snapshot, Switches
from scheduler.domain.step_measurements import ModelMeasurements
from scheduler.store.database import METADATA, AnyRow
from scheduler.store.protocol import ConflictError, FencedError, Lease

RecordRow = dict[str, Any]
CurveRow = Row[str, str, int, Any]


class StateColumns(TypedColumns):
    """The only row holds the fields of the snapshot that are not mappings.

    Tombstones up to `swept_generation` have been deleted.
    """

    id: Named[int] = Column(primary_key=True, autoincrement=False)
    generation: Named[int] = Column(BigInteger)
    swept_generation: Named[int] = Column(BigInteger)
    now_s: Named[float] = Column(Double)
    full_pass_at_s: Named[float] = Column(Double)
    switches: Named[Any] = Column(JSON, nullable=False)
    solver: Named[str] = Column(String, server_default="")
    lending_set_by: Named[str] = Column(String, server_default="")
    lending_set_at_s: Named[float | None] = Column(Double)


class RecordColumns(TypedColumns):
    key: Named[str] = Column(String, primary_key=True)
    generation: Named[int] = Column(BigInteger, index=True)
    body: Named[Any] = Column(JSON(none_as_null=True), nullable=True)


class CurvePointColumns(TypedColumns):
    """One solved point per row. `shape` is the GpuShape as JSON, or empty for a curve without points."""

    curve_key: Named[str] = Column(String, primary_key=True)
    shape: Named[str] = Column(String, primary_key=True)
    generation: Named[int] = Column(BigInteger, index=True)
    body: Named[Any] = Column(JSON(none_as_null=True), nullable=True)


class LeaseColumns(TypedColumns):
    """The only row is the lease. Nobody holds it while `holder` is empty."""

    id: Named[int] = Column(primary_key=True, autoincrement=False)
    holder: Named[str] = Column(String)
    epoch: Named[int] = Column(BigInteger)
    expires_at_s: Named[float] = Column(Double)


STATE = Table("state", METADATA, StateColumns)
CURVE_POINTS = Table("curve_points", METADATA, CurvePointColumns)
LEASE = Table("lease", METADATA, LeaseColumns)
JOBS = Table("jobs", METADATA, RecordColumns)


@dataclass(frozen=True, slots=True)
class RecordKind:
    """A mapping of the snapshot: its field, its table, and the type of its records."""

    field: str
    table: Table[RecordColumns]
    record: type[Any]


RECORD_KINDS = (
    RecordKind("pools", Table("pools", METADATA, RecordColumns), Pool),
    RecordKind("nodes", Table("nodes", METADATA, RecordColumns), Node),
    RecordKind("jobs", JOBS, Job),
    RecordKind("loans", Table("loans", METADATA, RecordColumns), Loan),
    RecordKind("demand", Table("demand", METADATA, RecordColumns), DemandReading),
    RecordKind("forecasts", Table("forecasts", METADATA, RecordColumns), Forecast),
    RecordKind("queues", Table("queues", METADATA, RecordColumns), JobQueue),
    RecordKind("gpu_throughputs", Table("gpu_throughputs", METADATA, RecordColumns), float),
    RecordKind("run_times", Table("run_times", METADATA, RecordColumns), RunTimes),
    RecordKind("gpu_profiles", Table("gpu_profiles", METADATA, RecordColumns), GpuProfile),
    RecordKind("step_measurements", Table("step_measurements", METADATA, RecordColumns), ModelMeasurements),
    RecordKind("curve_hardware", Table("curve_hardware", METADATA, RecordColumns), str),
    RecordKind("return_times", Table("return_times", METADATA, RecordColumns), ReturnTimes),
    RecordKind("shadows", Table("shadows", METADATA, RecordColumns), ShadowLending),
    RecordKind("recalls", Table("recalls", METADATA, RecordColumns), RecallReceipt),
)
LIVE_TABLES: tuple[Table[Any], ...] = (*(kind.table for kind in RECORD_KINDS), CURVE_POINTS)


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """Body of a curve's row: a plan or the reason why there is none. A curve without points has one empty body."""

    plan: ParallelPlan | None
    infeasible: str


@dataclass(frozen=True, slots=True)
class SnapshotDelta:
    """All rows written after `base`, by table name, and the state row. `state` is None if nothing was written."""

    base: Snapshot
    state: AnyRow | None = None
    rows: Mapping[str, Sequence[AnyRow]] = field(default_factory=dict)


def fetch_snapshot_delta(connection: Connection, known: Snapshot) -> SnapshotDelta:
    """Fetch the rows that are newer than `known`.

    Fetches all rows if needed tombstones have been deleted, or if the database was restored to an older generation.
    """
    state = connection.execute(select(STATE)).one()
    if state.generation == known.generation:
        return SnapshotDelta(known)
    base = known if state.swept_generation <= known.generation < state.generation else Snapshot()
    rows = {table.name: _fetch_rows_after(connection, table, base.generation) for table in LIVE_TABLES}
    return SnapshotDelta(base, state, rows)


def apply_snapshot_delta(delta: SnapshotDelta) -> Snapshot:
    """Return the newest snapshot. Unchanged records stay the same objects.

    Raises:
        CodecError: a row cannot be decoded; the message names row and field.
    """
    if delta.state is None:
        return delta.base
    records: dict[str, Any] = {
        kind.field: apply_record_rows(kind, getattr(delta.base, kind.field), delta.rows[kind.table.name])
        for kind in RECORD_KINDS
    }
    return Snapshot(
        generation=delta.state.generation,
        now_s=delta.state.now_s,
        switches=decode_stored(Switches, delta.state.switches),
        full_pass_at_s=delta.state.full_pass_at_s,
        solver=delta.state.solver,
        lending_set_by=delta.state.lending_set_by,
        lending_set_at_s=delta.state.lending_set_at_s,
        curves=apply_curve_rows(delta.base.curves, delta.rows[CURVE_POINTS.name]),
        **records,
    )


def _fetch_rows_after(connection: Connection, table: Table[Any], generation: int) -> Sequence[AnyRow]:
    newer = select(table).where(table.c.generation > generation)
    return connection.execute(newer.order_by(*table.primary_key)).all()


def build_changed_rows(previous: Snapshot, snapshot: Snapshot) -> list[tuple[Table[Any], list[RecordRow]]]:
    """Return the rows that a commit of `snapshot` must replace, by table."""
    records = [(kind.table, build_record_rows(kind, previous, snapshot)) for kind in RECORD_KINDS]
    return [*records, (CURVE_POINTS, build_curve_rows(previous, snapshot))]


def advance_generation(connection: Connection, previous: Snapshot, snapshot: Snapshot) -> None:
    """Write the state row.

    Raises:
        ConflictError: the stored generation is not that of `previous`.
    """
    updated = connection.execute(
        update(STATE)
        .where(STATE.c.generation == previous.generation)
        .values(
            generation=snapshot.generation,
            now_s=snapshot.now_s,
            full_pass_at_s=snapshot.full_pass_at_s,
            solver=snapshot.solver,
            switches=encode(snapshot.switches),
            lending_set_by=snapshot.lending_set_by,
            lending_set_at_s=snapshot.lending_set_at_s,
        )
    )
    if updated.rowcount == 0:
        raise ConflictError(f"another tick committed first: the stored generation is no longer {previous.generation}")


def delete_tombstones(connection: Connection, *, up_to_generation: int) -> None:
    """Delete tombstones up to a generation. A reader with an older snapshot fetches everything again."""
    for table in LIVE_TABLES:
        connection.execute(delete(table).where(table.c.body.is_(None), table.c.generation <= up_to_generation))
    connection.execute(update(STATE).values(swept_generation=up_to_generation))


def build_record_rows(kind: RecordKind, previous: Snapshot, snapshot: Snapshot) -> list[RecordRow]:
    """Return rows for changed and removed records. A record that is the same object counts as unchanged."""
    before: Mapping[str, object] = getattr(previous, kind.field)
    after: Mapping[str, object] = getattr(snapshot, kind.field)
    if before is after:
        return []
    changed = [(key, encode(record)) for key, record in after.items() if before.get(key) is not record]
    gone = [(key, None) for key in before if key not in after]
    return [{"key": key, "generation": snapshot.generation, "body": body} for key, body in changed + gone]


def apply_record_rows(
    kind: RecordKind, records: Mapping[str, Any], rows: Iterable[Row[str, int, Any]]
) -> dict[str, Any]:
    """Return a copy of `records` with the rows applied.

    Raises:
        CodecError: a row cannot be decoded; the message names row and field.
    """
    fresh = dict(records)
    for key, _generation, body in rows:
        if body is None:
            fresh.pop(key, None)
        else:
            fresh[key] = _decode_body(kind.record, body, f"{kind.table.name}[{key}]")
    return fresh


def build_curve_rows(previous: Snapshot, snapshot: Snapshot) -> list[RecordRow]:
    """Return one row for each changed or removed point of a curve."""
    keys = {*previous.curves, *snapshot.curves} if previous.curves is not snapshot.curves else set()
    rows = []
    for curve_key in sorted(keys):
        before, after = _flatten_curve(previous.curves.get(curve_key)), _flatten_curve(snapshot.curves.get(curve_key))
        changed = [(shape, _encode_point(point)) for shape, point in after.items() if before.get(shape) is not point]
        gone = [(shape, None) for shape in before if shape not in after]
        rows += [(curve_key, _encode_shape(shape), body) for shape, body in changed + gone]
    return [
        {"curve_key": curve_key, "shape": shape, "generation": snapshot.generation, "body": body}
        for curve_key, shape, body in rows
    ]


def apply_curve_rows(curves: Mapping[str, ScalingCurve], rows: Iterable[CurveRow]) -> dict[str, ScalingCurve]:
    """Return the curves with the rows applied. Curves without rows stay the same objects."""
    changed: dict[str, dict[GpuShape | None, ParallelPlan | str]] = {}
    for curve_key, shape_text, _generation, body in rows:
        where = f"{CURVE_POINTS.name}[{curve_key}, {shape_text}]"
        points = changed.setdefault(curve_key, dict(_flatten_curve(curves.get(curve_key))))
        shape = _decode_body(GpuShape, json.loads(shape_text), where) if shape_text else None
        if body is None:
            points.pop(shape, None)
        else:
            point = _decode_body(CurvePoint, body, where)
            points[shape] = point.plan or point.infeasible
    fresh = {**curves, **{key: _build_curve(points) for key, points in changed.items() if points}}
    return {key: curve for key, curve in fresh.items() if changed.get(key, True)}


def _flatten_curve(curve: ScalingCurve | None) -> Mapping[GpuShape | None, ParallelPlan | str]:
    """Return plans and reasons as one mapping. The shape None stands for a curve without points."""
    points: dict[GpuShape | None, ParallelPlan | str] = {}
    if curve is not None:
        points.update(curve.plans.items())
        points.update(curve.infeasible.items())
    return points if points or curve is None else {None: ""}


def _build_curve(points: Mapping[GpuShape | None, ParallelPlan | str]) -> ScalingCurve:
    solved = {shape: point for shape, point in points.items() if shape is not None}
    return ScalingCurve(
        plans={shape: point for shape, point in solved.items() if isinstance(point, ParallelPlan)},
        infeasible={shape: point for shape, point in solved.items() if isinstance(point, str)},
    )


def _encode_point(point: ParallelPlan | str) -> Any:
    return encode(CurvePoint(None, point) if isinstance(point, str) else CurvePoint(point, ""))


def _encode_shape(shape: GpuShape | None) -> str:
    return json.dumps(encode_as(GpuShape, shape), separators=(",", ":")) if shape else ""


def _decode_body(record: type[Any], body: Any, where: str) -> Any:
    try:
        return decode_stored(record, body)
    except CodecError as error:
        raise CodecError(f"{where}: {error}") from None


def acquire_lease(connection: Connection, holder: str, *, now_s: float, expires_at_s: float) -> Lease | None:
    """Renew the lease of `holder`, or take a free or expired one. Return None if another holder has it.

    Each change is one guarded UPDATE, so that two processes never both get the lease.
    """
    renewed = connection.execute(update(LEASE).where(LEASE.c.holder == holder).values(expires_at_s=expires_at_s))
    if renewed.rowcount == 0:
        free = (LEASE.c.holder == "") | (LEASE.c.expires_at_s <= now_s)
        taken = {"holder": holder, "epoch": LEASE.c.epoch + 1, "expires_at_s": expires_at_s}
        if connection.execute(update(LEASE).where(free).values(taken)).rowcount == 0:
            return None
    epoch = connection.execute(select(LEASE.c.epoch)).scalar_one()
    return Lease(holder, epoch, expires_at_s)


def read_lease(connection: Connection) -> Lease | None:
    row = connection.execute(select(LEASE.c.holder, LEASE.c.epoch, LEASE.c.expires_at_s)).one()
    return Lease(row.holder, row.epoch, row.expires_at_s) if row.holder else None


def release_lease(connection: Connection, holder: str) -> None:
    """Release the lease and advance the epoch, so that the former holder can commit nothing more."""
    connection.execute(update(LEASE).where(LEASE.c.holder == holder).values(holder="", epoch=LEASE.c.epoch + 1))


def fence(connection: Connection, epoch: int) -> None:
    """Lock the lease until the transaction ends.

    Raises:
        FencedError: the lease has another epoch.
    """
    if connection.execute(update(LEASE).where(LEASE.c.epoch == epoch).values(epoch=epoch)).rowcount == 0:
        raise FencedError(f"the lease no longer has epoch {epoch}; nothing was written")
