"""Usage in the database: GPU-seconds by hour, queue, owner and kind of GPU, and the part of them by model.

Two tables, because releases without models add to the first one, by its primary key, while they share the
database. So the parts by model may be less than the whole. The rest of the whole is usage whose model is not stated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    Double,
    Named,
    String,
    Table,
    TypedColumns,
    delete,
    select,
)

from scheduler.domain.job_queue import HOUR_S, UsageEntry, UsageKey
from scheduler.domain.owner_ids import derive_owner_id
from scheduler.store.database import METADATA, AnyRow, build_insert

_GPU_S_MIN = 1e-6
"""Rests below this are remainders of sums of real numbers."""


class UsageColumns(TypedColumns):
    """`owner` is the owner's id, and `owner_name` the display name.

    Releases before revision 0021 wrote the display name to `owner`. They still do while they share the database, so
    a row without `owner_name` is read as theirs.
    """

    hour_s: Named[int] = Column(BigInteger, primary_key=True, autoincrement=False)
    queue: Named[str] = Column(String, primary_key=True)
    owner: Named[str] = Column(String, primary_key=True)
    gpu: Named[str] = Column(String, primary_key=True)
    is_lent: Named[bool] = Column(Boolean, primary_key=True)
    gpu_s: Named[float] = Column(Double)
    lost_gpu_s: Named[float] = Column(Double)
    owner_name: Named[str] = Column(String, server_default="")


class ModelUsageColumns(TypedColumns):
    """The part of a row of usage that is of jobs which state this model. `owner` is the owner's id."""

    hour_s: Named[int] = Column(BigInteger, primary_key=True, autoincrement=False)
    queue: Named[str] = Column(String, primary_key=True)
    owner: Named[str] = Column(String, primary_key=True)
    gpu: Named[str] = Column(String, primary_key=True)
    is_lent: Named[bool] = Column(Boolean, primary_key=True)
    model: Named[str] = Column(String, primary_key=True)
    gpu_s: Named[float] = Column(Double)
    lost_gpu_s: Named[float] = Column(Double)
    owner_name: Named[str] = Column(String)


USAGE = Table("usage", METADATA, UsageColumns)
MODEL_USAGE = Table("model_usage", METADATA, ModelUsageColumns)
USAGE_TABLES = (USAGE, MODEL_USAGE)


def add_usage_entries(connection: Connection, entries: Sequence[UsageEntry]) -> None:
    """Add the entries to the stored sums."""
    _add_rows(connection, USAGE, _merge(entries))
    _add_rows(connection, MODEL_USAGE, [entry for entry in entries if entry.key.model])


def _merge(entries: Iterable[UsageEntry]) -> Iterable[UsageEntry]:
    """Return the entries without models: a statement must not change a row twice."""
    merged = dict[UsageKey, UsageEntry]()
    for entry in entries:
        key = replace(entry.key, model="") if entry.key.model else entry.key
        known = merged.get(key, UsageEntry(key, 0.0))
        gpu_s, lost_gpu_s = known.gpu_s + entry.gpu_s, known.lost_gpu_s + entry.lost_gpu_s
        merged[key] = UsageEntry(key, gpu_s, lost_gpu_s, entry.owner or known.owner)
    return merged.values()


def _add_rows(connection: Connection, table: Table[Any], entries: Iterable[UsageEntry]) -> None:
    rows = [_build_row(table, entry) for entry in entries]
    if not rows:
        return
    statement = build_insert(connection, table)
    sums = {name: table.c[name] + statement.excluded[name] for name in ("gpu_s", "lost_gpu_s")}
    changed = {**sums, "owner_name": statement.excluded.owner_name}
    keys = [column.name for column in table.primary_key]
    connection.execute(statement.on_conflict_do_update(index_elements=keys, set_=changed), rows)


def _build_row(table: Table[Any], entry: UsageEntry) -> dict[str, Any]:
    key = entry.key
    row = {
        "hour_s": key.hour_s,
        "queue": key.queue,
        "owner": key.owner_id,
        "gpu": key.gpu,
        "is_lent": key.is_lent,
        "gpu_s": entry.gpu_s,
        "lost_gpu_s": entry.lost_gpu_s,
        "owner_name": entry.owner or key.owner_id,
    }
    return row | {"model": key.model} if table is MODEL_USAGE else row


def fetch_usage_entries(connection: Connection, *, from_s: float, to_s: float) -> tuple[UsageEntry, ...]:
    """Return the usage of all hours that overlap the time span, in order."""
    whole, parts = (_fetch_rows(connection, table, from_s, to_s) for table in USAGE_TABLES)
    return tuple(sorted(_split_by_model(whole, parts)))


def _fetch_rows(connection: Connection, table: Table[Any], from_s: float, to_s: float) -> tuple[UsageEntry, ...]:
    found = select(table).where(table.c.hour_s > from_s - HOUR_S, table.c.hour_s < to_s)
    return tuple(map(_decode_row, connection.execute(found).all()))


def take_late_usage(connection: Connection, *, after_s: int) -> tuple[UsageEntry, ...]:
    """Delete the usage of hours that begin after a time, and return it."""
    entries = fetch_usage_entries(connection, from_s=after_s + HOUR_S, to_s=float("inf"))
    for table in USAGE_TABLES:
        connection.execute(delete(table).where(table.c.hour_s > after_s))
    return entries


def _split_by_model(whole: Iterable[UsageEntry], parts: Sequence[UsageEntry]) -> Iterator[UsageEntry]:
    """Yield the parts by model, and of each row the rest, whose model is not stated."""
    sums = defaultdict[UsageKey, tuple[float, float]](lambda: (0.0, 0.0))
    for part in parts:
        key = replace(part.key, model="")
        gpu_s, lost_gpu_s = sums[key]
        sums[key] = (gpu_s + part.gpu_s, lost_gpu_s + part.lost_gpu_s)
    for entry in whole:
        gpu_s, lost_gpu_s = sums.pop(entry.key, (0.0, 0.0))
        if not (gpu_s or lost_gpu_s):
            yield entry
            continue
        rest = replace(
            entry, gpu_s=_drop_noise(entry.gpu_s - gpu_s), lost_gpu_s=_drop_noise(entry.lost_gpu_s - lost_gpu_s)
        )
        if rest.gpu_s or rest.lost_gpu_s:
            yield rest
    yield from parts


def _drop_noise(gpu_s: float) -> float:
    return gpu_s if abs(gpu_s) >= _GPU_S_MIN else 0.0


def _decode_row(row: AnyRow) -> UsageEntry:
    owner_id = row.owner if row.owner_name else derive_owner_id(row.owner)
    model = row.model if "model" in row._fields else ""
    key = UsageKey(row.hour_s, row.queue, owner_id, row.gpu, row.is_lent, model)
    return UsageEntry(key, row.gpu_s, row.lost_gpu_s, row.owner_name or row.owner)
