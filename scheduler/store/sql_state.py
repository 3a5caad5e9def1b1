"""The lease in the database. Each change is one guarded UPDATE, so two processes never both get it.

The snapshot as rows, one a record, and back: only what changed travels.

Live state in the database: what a reader lacks of the newest snapshot, and what a commit changes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, Row, Table, delete, select, update

from scheduler.domain.codec import CodecError, decode, encode, encode_as
from scheduler.domain.fleet import DemandReading, Forecast, Loan, Node, Pool
from scheduler.domain.gpu_sets import GpuShape
from scheduler.domain.job import Job
from scheduler.domain.job_queue import JobQueue
from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.domain.scaling_curve import ScalingCurve
from scheduler.domain.snapshot import Snapshot, Switches
from scheduler.store import tables
from scheduler.store.protocol import ConflictError, FencedError, Lease
from scheduler.store.tables import CURVE_POINTS, LEASE, STATE


def acquire_lease(connection: Connection, holder: str, *, now_s: float, expires_at_s: float) -> Lease | None:
    """Renew the lease of `holder`, or take it if it is free or has expired; None otherwise."""
    renewed = connection.execute(update(LEASE).where(LEASE.c.holder == holder).values(expires_at_s=expires_at_s))
    if renewed.rowcount == 0:
        free = (LEASE.c.holder == "") | (LEASE.c.expires_at_s <= now_s)
        taken = {"holder": holder, "epoch": LEASE.c.epoch + 1, "expires_at_s": expires_at_s}
        if connection.execute(update(LEASE).where(free).values(taken)).rowcount == 0:
            return None
    epoch = connection.execute(select(LEASE.c.epoch)).scalar_one()
    return Lease(holder, epoch, expires_at_s)


def read_lease(connection: Connection) -> Lease | None:
    held = connection.execute(select(LEASE.c.holder, LEASE.c.epoch, LEASE.c.expires_at_s)).one()
    return Lease(held.holder, held.epoch, held.expires_at_s) if held.holder else None


def release_lease(connection: Connection, holder: str) -> None:
    """Leave the lease without a holder, which is a change of holder too: the old epoch commits nothing more."""
    connection.execute(update(LEASE).where(LEASE.c.holder == holder).values(holder="", epoch=LEASE.c.epoch + 1))


def fence(connection: Connection, epoch: int) -> None:
    """Keep the lease as it is until the transaction ends.

    Raises:
        FencedError: it has another epoch.
    """
    if connection.execute(update(LEASE).where(LEASE.c.epoch == epoch).values(epoch=epoch)).rowcount == 0:
        raise FencedError(f"epoch {epoch} no longer leads; nothing was written")


RecordRow = dict[str, Any]
CurveRow = Row[str, str, int, Any]


@dataclass(frozen=True, slots=True)
class RecordKind:
    """A mapping of the snapshot, the table that holds it, and the type of its records."""

    field: str
    table: Table[tables.RecordColumns]
    record: type[Any]


RECORD_KINDS = (
    RecordKind("pools", tables.POOLS, Pool),
    RecordKind("nodes", tables.NODES, Node),
    RecordKind("jobs", tables.JOBS, Job),
    RecordKind("loans", tables.LOANS, Loan),
    RecordKind("demand", tables.DEMAND, DemandReading),
    RecordKind("forecasts", tables.FORECASTS, Forecast),
    RecordKind("queues", tables.QUEUES, JobQueue),
)


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """The body of a curve's row: a plan, or why there is none; neither in the one row of a curve without points."""

    plan: ParallelPlan | None
    infeasible: str


def build_record_rows(kind: RecordKind, previous: Snapshot, snapshot: Snapshot) -> list[RecordRow]:
    """Rows to put in the place of those with the same key. A record that is the same object is left alone."""
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
    """`records` with the rows applied.

    Raises:
        CodecError: a row's body is not what this version of the program writes; the message names row and field.
    """
    fresh = dict(records)
    for key, _generation, body in rows:
        if body is None:
            fresh.pop(key, None)
        else:
            fresh[key] = _decode_body(kind.record, body, f"{kind.table.name}[{key}]")
    return fresh


def build_curve_rows(previous: Snapshot, snapshot: Snapshot) -> list[RecordRow]:
    """As `changed_rows`, one row a point."""
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
    """As `refreshed`: untouched curves stay the same objects."""
    touched: dict[str, dict[GpuShape | None, ParallelPlan | str]] = {}
    for curve_key, shape_text, _generation, body in rows:
        where = f"{tables.CURVE_POINTS.name}[{curve_key}, {shape_text}]"
        points = touched.setdefault(curve_key, dict(_flatten_curve(curves.get(curve_key))))
        shape = _decode_body(GpuShape, json.loads(shape_text), where) if shape_text else None
        if body is None:
            points.pop(shape, None)
        else:
            point = _decode_body(CurvePoint, body, where)
            points[shape] = point.plan or point.infeasible
    fresh = {**curves, **{key: _build_curve(points) for key, points in touched.items() if points}}
    return {key: curve for key, curve in fresh.items() if touched.get(key, True)}


def _flatten_curve(curve: ScalingCurve | None) -> Mapping[GpuShape | None, ParallelPlan | str]:
    """A curve as one mapping; shape None stands for the existence of a curve without points."""
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
        return decode(record, body)
    except CodecError as malformed:
        raise CodecError(f"{where}: {malformed}") from None


LIVE_TABLES: tuple[Table[Any], ...] = (*(kind.table for kind in RECORD_KINDS), CURVE_POINTS)


@dataclass(frozen=True, slots=True)
class SnapshotDelta:
    """Everything that was written after `base`: the state row (None where nothing was), and rows by table name."""

    base: Snapshot
    state: Row[*tuple[Any, ...]] | None = None
    rows: Mapping[str, Sequence[Row[*tuple[Any, ...]]]] = field(default_factory=dict)


def fetch_snapshot_delta(connection: Connection, known: Snapshot) -> SnapshotDelta:
    """What `known` lacks. Everything, where tombstones that it would need are gone or the database was put back."""
    state = connection.execute(select(STATE)).one()
    if state.generation == known.generation:
        return SnapshotDelta(known)
    base = known if state.swept_generation <= known.generation < state.generation else Snapshot()
    rows = {table.name: _fetch_rows_after(connection, table, base.generation) for table in LIVE_TABLES}
    return SnapshotDelta(base, state, rows)


def apply_snapshot_delta(delta: SnapshotDelta) -> Snapshot:
    """The newest snapshot. Records that did not change stay the same objects.

    Raises:
        CodecError: a row is not what this version of the program writes.
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
        switches=decode(Switches, delta.state.switches),
        full_pass_at_s=delta.state.full_pass_at_s,
        solver=delta.state.solver,
        curves=apply_curve_rows(delta.base.curves, delta.rows[CURVE_POINTS.name]),
        **records,
    )


def build_changed_rows(previous: Snapshot, snapshot: Snapshot) -> list[tuple[Table[Any], list[RecordRow]]]:
    """The rows to replace, by table."""
    records = [(kind.table, build_record_rows(kind, previous, snapshot)) for kind in RECORD_KINDS]
    return [*records, (CURVE_POINTS, build_curve_rows(previous, snapshot))]


def advance_generation(connection: Connection, previous: Snapshot, snapshot: Snapshot) -> None:
    """Move the state row on from `previous`.

    Raises:
        ConflictError: it has moved on already.
    """
    moved = connection.execute(
        update(STATE)
        .where(STATE.c.generation == previous.generation)
        .values(
            generation=snapshot.generation,
            now_s=snapshot.now_s,
            full_pass_at_s=snapshot.full_pass_at_s,
            solver=snapshot.solver,
            switches=encode(snapshot.switches),
        )
    )
    if moved.rowcount == 0:
        raise ConflictError(f"the stored generation is no longer {previous.generation}")


def delete_tombstones(connection: Connection, *, up_to_generation: int) -> None:
    """Remove the tombstones written up to a generation. A reader that is older starts from nothing."""
    for table in LIVE_TABLES:
        connection.execute(delete(table).where(table.c.body.is_(None), table.c.generation <= up_to_generation))
    connection.execute(update(STATE).values(swept_generation=up_to_generation))


def _fetch_rows_after(connection: Connection, table: Table[Any], generation: int) -> Sequence[Row[*tuple[Any, ...]]]:
    newer = select(table).where(table.c.generation > generation)
    return connection.execute(newer.order_by(*table.primary_key)).all()
