"""Live state in the database: what a reader lacks of the newest snapshot, and what a commit changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, Row, Table, delete, select, update

from scheduler.domain.codec import decode, encode
from scheduler.domain.snapshot import Snapshot, Switches
from scheduler.store.protocol import ConflictError
from scheduler.store.records import (
    RECORD_KINDS,
    RecordRow,
    changed_curve_rows,
    changed_rows,
    refreshed,
    refreshed_curves,
)
from scheduler.store.tables import CURVE_POINTS, STATE

LIVE_TABLES: tuple[Table[Any], ...] = (*(kind.table for kind in RECORD_KINDS), CURVE_POINTS)


@dataclass(frozen=True, slots=True)
class NewerRows:
    """Everything that was written after `base`: the state row (None where nothing was), and rows by table name."""

    base: Snapshot
    state: Row[*tuple[Any, ...]] | None = None
    rows: Mapping[str, Sequence[Row[*tuple[Any, ...]]]] = field(default_factory=dict)


def fetch_newer(connection: Connection, known: Snapshot) -> NewerRows:
    """What `known` lacks. Everything, where tombstones that it would need are gone or the database was put back."""
    state = connection.execute(select(STATE)).one()
    if state.generation == known.generation:
        return NewerRows(known)
    base = known if state.swept_generation <= known.generation < state.generation else Snapshot()
    rows = {table.name: _rows_after(connection, table, base.generation) for table in LIVE_TABLES}
    return NewerRows(base, state, rows)


def refresh(newer: NewerRows) -> Snapshot:
    """The newest snapshot. Records that did not change stay the same objects.

    Raises:
        CodecError: a row is not what this version of the program writes.
    """
    if newer.state is None:
        return newer.base
    records: dict[str, Any] = {
        kind.field: refreshed(kind, getattr(newer.base, kind.field), newer.rows[kind.table.name])
        for kind in RECORD_KINDS
    }
    return Snapshot(
        generation=newer.state.generation,
        now_s=newer.state.now_s,
        switches=decode(Switches, newer.state.switches),
        full_pass_at_s=newer.state.full_pass_at_s,
        solver=newer.state.solver,
        curves=refreshed_curves(newer.base.curves, newer.rows[CURVE_POINTS.name]),
        **records,
    )


def changes(previous: Snapshot, snapshot: Snapshot) -> list[tuple[Table[Any], list[RecordRow]]]:
    """The rows to replace, by table."""
    records = [(kind.table, changed_rows(kind, previous, snapshot)) for kind in RECORD_KINDS]
    return [*records, (CURVE_POINTS, changed_curve_rows(previous, snapshot))]


def advance(connection: Connection, previous: Snapshot, snapshot: Snapshot) -> None:
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


def sweep(connection: Connection, *, up_to_generation: int) -> None:
    """Remove the tombstones written up to a generation. A reader that is older starts from nothing."""
    for table in LIVE_TABLES:
        connection.execute(delete(table).where(table.c.body.is_(None), table.c.generation <= up_to_generation))
    connection.execute(update(STATE).values(swept_generation=up_to_generation))


def _rows_after(connection: Connection, table: Table[Any], generation: int) -> Sequence[Row[*tuple[Any, ...]]]:
    newer = select(table).where(table.c.generation > generation)
    return connection.execute(newer.order_by(*table.primary_key)).all()
