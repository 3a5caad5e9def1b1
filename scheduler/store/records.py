"""The snapshot as rows, one a record, and back: only what changed travels."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row, Table

from scheduler.domain.codec import CodecError, decode, encode, encode_as
from scheduler.domain.fleet import DemandReading, Node, Pool
from scheduler.domain.forecast import Forecast
from scheduler.domain.gpu_shape import GpuShape
from scheduler.domain.job import Job
from scheduler.domain.job_queue import JobQueue
from scheduler.domain.loan import Loan
from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.domain.scaling_curve import ScalingCurve
from scheduler.domain.snapshot import Snapshot
from scheduler.store import tables

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


def changed_rows(kind: RecordKind, previous: Snapshot, snapshot: Snapshot) -> list[RecordRow]:
    """Rows to put in the place of those with the same key. A record that is the same object is left alone."""
    before: Mapping[str, object] = getattr(previous, kind.field)
    after: Mapping[str, object] = getattr(snapshot, kind.field)
    if before is after:
        return []
    changed = [(key, encode(record)) for key, record in after.items() if before.get(key) is not record]
    gone = [(key, None) for key in before if key not in after]
    return [{"key": key, "generation": snapshot.generation, "body": body} for key, body in changed + gone]


def refreshed(kind: RecordKind, records: Mapping[str, Any], rows: Iterable[Row[str, int, Any]]) -> dict[str, Any]:
    """`records` with the rows applied.

    Raises:
        CodecError: a row's body is not what this version of the program writes; the message names row and field.
    """
    fresh = dict(records)
    for key, _generation, body in rows:
        if body is None:
            fresh.pop(key, None)
        else:
            fresh[key] = _decoded(kind.record, body, f"{kind.table.name}[{key}]")
    return fresh


def changed_curve_rows(previous: Snapshot, snapshot: Snapshot) -> list[RecordRow]:
    """As `changed_rows`, one row a point."""
    keys = {*previous.curves, *snapshot.curves} if previous.curves is not snapshot.curves else set()
    rows = []
    for curve_key in sorted(keys):
        before, after = _points(previous.curves.get(curve_key)), _points(snapshot.curves.get(curve_key))
        changed = [(shape, _point_body(point)) for shape, point in after.items() if before.get(shape) is not point]
        gone = [(shape, None) for shape in before if shape not in after]
        rows += [(curve_key, _shape_text(shape), body) for shape, body in changed + gone]
    return [
        {"curve_key": curve_key, "shape": shape, "generation": snapshot.generation, "body": body}
        for curve_key, shape, body in rows
    ]


def refreshed_curves(curves: Mapping[str, ScalingCurve], rows: Iterable[CurveRow]) -> dict[str, ScalingCurve]:
    """As `refreshed`: untouched curves stay the same objects."""
    touched: dict[str, dict[GpuShape | None, ParallelPlan | str]] = {}
    for curve_key, shape_text, _generation, body in rows:
        where = f"{tables.CURVE_POINTS.name}[{curve_key}, {shape_text}]"
        points = touched.setdefault(curve_key, dict(_points(curves.get(curve_key))))
        shape = _decoded(GpuShape, json.loads(shape_text), where) if shape_text else None
        if body is None:
            points.pop(shape, None)
        else:
            point = _decoded(CurvePoint, body, where)
            points[shape] = point.plan or point.infeasible
    fresh = {**curves, **{key: _curve(points) for key, points in touched.items() if points}}
    return {key: curve for key, curve in fresh.items() if touched.get(key, True)}


def _points(curve: ScalingCurve | None) -> Mapping[GpuShape | None, ParallelPlan | str]:
    """A curve as one mapping; shape None stands for the existence of a curve without points."""
    points: dict[GpuShape | None, ParallelPlan | str] = {}
    if curve is not None:
        points.update(curve.plans.items())
        points.update(curve.infeasible.items())
    return points if points or curve is None else {None: ""}


def _curve(points: Mapping[GpuShape | None, ParallelPlan | str]) -> ScalingCurve:
    solved = {shape: point for shape, point in points.items() if shape is not None}
    return ScalingCurve(
        plans={shape: point for shape, point in solved.items() if isinstance(point, ParallelPlan)},
        infeasible={shape: point for shape, point in solved.items() if isinstance(point, str)},
    )


def _point_body(point: ParallelPlan | str) -> Any:
    return encode(CurvePoint(None, point) if isinstance(point, str) else CurvePoint(point, ""))


def _shape_text(shape: GpuShape | None) -> str:
    return json.dumps(encode_as(GpuShape, shape), separators=(",", ":")) if shape else ""


def _decoded(record: type[Any], body: Any, where: str) -> Any:
    try:
        return decode(record, body)
    except CodecError as malformed:
        raise CodecError(f"{where}: {malformed}") from None
