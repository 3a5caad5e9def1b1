"""Repair of times that a wrong clock wrote: a store whose times lie in the future hangs until they have passed.

The controller's time never goes back, so it stays ahead of the machines' contacts, and leases and backoffs end late.
Every stored time later than halfway between now and the latest recorded time was written by the wrong clock, and is
moved back by the difference. So durations between such times stay what they were.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import JSON, Column, Connection, Double, Table, bindparam, delete, func, or_, select, update

import scheduler.store.sql_store  # noqa: F401  (defines every table of METADATA)
from scheduler.domain.job_queue import HOUR_S
from scheduler.store.database import METADATA, make_snapshot_engine, open_engine, transaction
from scheduler.store.machines import MACHINES
from scheduler.store.schema_migration import require_current_revision
from scheduler.store.sql_api_tables import AUDIT_LOG
from scheduler.store.sql_capacity_history import CAPACITY_BINS, FLEET_CHECKPOINTS, take_late_bins, write_bins
from scheduler.store.sql_history import EVENTS
from scheduler.store.sql_run_log import AGENT_REPORTS
from scheduler.store.sql_simulations import DAILY_COMPARISONS
from scheduler.store.sql_state import LEASE, STATE
from scheduler.store.sql_usage import USAGE, USAGE_TABLES, add_usage_entries, take_late_usage

CLOCK_LEAD_S_MAX = 60.0
"""A store whose latest time is further in the future than this has been written by a wrong clock."""
_PAST_COLUMNS = (STATE.c.now_s, MACHINES.c.seen_at_s, AGENT_REPORTS.c.at_s, EVENTS.c.at_s)
"""Columns whose times have passed when they are written."""
_UNCHANGED = {table.name for table in (AUDIT_LOG, *USAGE_TABLES, CAPACITY_BINS, FLEET_CHECKPOINTS, DAILY_COMPARISONS)}
"""The audit log permits no changes, and usage and the use of pools are added to other hours."""
_USERS_FIELD = "spec"
"""Field of a job with what its user wrote: a deadline in the far future may be meant."""
_ROWS_AT_ONCE = 1000


@dataclass(frozen=True, slots=True)
class ClockReset:
    """How far the store was ahead of the clock, and how many rows were repaired by table."""

    lead_s: float
    rows: Mapping[str, int]


def find_clock_lead(url: str, *, now_s: float) -> float:
    """Return how far the latest recorded time is ahead of `now_s`, in seconds; negative if it has passed.

    Raises:
        StoreError: the database cannot be opened, or must be migrated.
    """
    engine = open_engine(url)
    try:
        require_current_revision(engine)
        with transaction(make_snapshot_engine(engine)) as connection:
            return _find_latest_s(connection) - now_s
    finally:
        engine.dispose()


def reset_clock(url: str, *, now_s: float) -> ClockReset:
    """Move all times that a wrong clock wrote back, in one transaction. The lease has no holder afterwards.

    Entries of the audit log stay as they were written. Stop controllers and API processes before: they remember the
    latest time that they have seen.

    Raises:
        StoreError: the database cannot be opened, or must be migrated.
    """
    engine = open_engine(url)
    try:
        require_current_revision(engine)
        with transaction(engine) as connection:
            epoch = LEASE.c.epoch + 1  # the first write of the transaction, so that nobody writes in between
            connection.execute(update(LEASE).values(holder="", epoch=epoch, expires_at_s=0.0))
            lead_s = _find_latest_s(connection) - now_s
            if lead_s <= CLOCK_LEAD_S_MAX:
                return ClockReset(lead_s, {})
            shift = _TimeShift(after_s=now_s + lead_s / 2, by_s=lead_s)
            tables = [table for table in METADATA.sorted_tables if table.name not in _UNCHANGED]
            rows = {table.name: _shift_table(connection, table, shift) for table in tables}
            rows[USAGE.name] = _shift_usage(connection, shift)
            rows[CAPACITY_BINS.name] = _shift_capacity(connection, shift)
            for column in (FLEET_CHECKPOINTS.c.at_s, DAILY_COMPARISONS.c.day_s):
                rows[column.table.name] = _delete_late_rows(connection, column, shift)
            generation = STATE.c.generation + 1  # readers fetch everything again
            connection.execute(update(STATE).values(generation=generation, swept_generation=generation))
            return ClockReset(lead_s, {name: count for name, count in rows.items() if count})
    finally:
        engine.dispose()


@dataclass(frozen=True, slots=True)
class _TimeShift:
    """Moves times later than `after_s` back by `by_s`."""

    after_s: float
    by_s: float

    def apply(self, value: Any) -> Any:
        is_late = isinstance(value, int | float) and not isinstance(value, bool) and self.after_s < value < float("inf")
        return value - self.by_s if is_late else value

    def apply_to_document(self, document: Any) -> Any:
        """Return the document with all its times shifted. Fields with seconds are named `..._s`."""
        if isinstance(document, list):
            return [self.apply_to_document(item) for item in document]
        if not isinstance(document, dict):
            return document
        return {name: self._apply_to_field(name, value) for name, value in document.items()}

    def _apply_to_field(self, name: str, value: Any) -> Any:
        if name == _USERS_FIELD:
            return value
        return (
            self.apply(value) if name.endswith("_s") and not isinstance(value, dict) else self.apply_to_document(value)
        )


def _find_latest_s(connection: Connection) -> float:
    return max(float(connection.execute(select(func.max(column))).scalar() or 0.0) for column in _PAST_COLUMNS)


def _shift_table(connection: Connection, table: Table[Any], shift: _TimeShift) -> int:
    """Shift the times in columns and bodies of a table, and return the number of changed rows."""
    times = [column for column in table.c if isinstance(column.type, Double) and column.name.endswith("_s")]
    bodies = [column for column in table.c if isinstance(column.type, JSON)]
    if not times and not bodies:
        return 0
    keys = list(table.primary_key)
    found = select(*keys, *times, *bodies).order_by(*keys)
    if not bodies:
        found = found.where(or_(*(column > shift.after_s for column in times)))
    changes = list[dict[str, Any]]()
    for row in connection.execute(found).mappings():
        changed = _shift_row(row, times, bodies, shift)
        if changed != {column.name: row[column.name] for column in (*times, *bodies)}:
            changes.append({f"key_{key.name}": row[key.name] for key in keys} | changed)
    statement = update(table).where(*(key == bindparam(f"key_{key.name}", type_=key.type) for key in keys))
    for start in range(0, len(changes), _ROWS_AT_ONCE):
        connection.execute(statement, changes[start : start + _ROWS_AT_ONCE])
    return len(changes)


def _shift_row(
    row: Mapping[Any, Any], times: Iterable[Column[Any]], bodies: Iterable[Column[Any]], shift: _TimeShift
) -> dict[str, Any]:
    """Return the new values. An expiry moves with the time of its creation: it may be far ahead on purpose."""
    keeps_expiry = shift.apply(row.get("created_at_s")) == row.get("created_at_s") and "created_at_s" in row
    changed = {
        column.name: row[column.name]
        if column.name == "expires_at_s" and keeps_expiry
        else shift.apply(row[column.name])
        for column in times
    }
    return changed | {column.name: shift.apply_to_document(row[column.name]) for column in bodies}


def _shift_usage(connection: Connection, shift: _TimeShift) -> int:
    """Add the usage of late hours to the hours in which it happened."""
    entries = take_late_usage(connection, after_s=int(shift.after_s))
    hours = round(shift.by_s / HOUR_S) * int(HOUR_S)
    add_usage_entries(
        connection, [replace(each, key=replace(each.key, hour_s=each.key.hour_s - hours)) for each in entries]
    )
    return len(entries)


def _shift_capacity(connection: Connection, shift: _TimeShift) -> int:
    """Add the late bins of all tiers to those of the hours in which they happened."""
    bins = take_late_bins(connection, after_s=int(shift.after_s))
    hours_s = round(shift.by_s / HOUR_S) * int(HOUR_S)
    write_bins(connection, [replace(each, at_s=each.at_s - hours_s) for each in bins])
    return len(bins)


def _delete_late_rows(connection: Connection, at_s: Column[int], shift: _TimeShift) -> int:
    """Delete rows with a wrong time. The next checkpoint is written in minutes, the next comparison in a day."""
    return connection.execute(delete(at_s.table).where(at_s > int(shift.after_s))).rowcount
