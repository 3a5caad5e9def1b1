"""The books of usage in the database: one row an hour, queue, owner and kind of GPU, to which commits add."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sqlalchemy import BigInteger, Boolean, Column, Connection, Double, Named, String, Table, TypedColumns, select
from sqlalchemy.dialects import postgresql, sqlite

from scheduler.domain.usage import HOUR_S, UsageEntry, UsageKind
from scheduler.store.tables import METADATA

_INSERTS: dict[str, Any] = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}


class UsageColumns(TypedColumns):
    hour_s: Named[int] = Column(BigInteger, primary_key=True, autoincrement=False)
    queue: Named[str] = Column(String, primary_key=True)
    owner: Named[str] = Column(String, primary_key=True)
    gpu: Named[str] = Column(String, primary_key=True)
    is_lent: Named[bool] = Column(Boolean, primary_key=True)
    gpu_s: Named[float] = Column(Double)
    lost_gpu_s: Named[float] = Column(Double)


USAGE = Table("usage", METADATA, UsageColumns)
_KIND = [column.name for column in USAGE.primary_key]


def add_usage(connection: Connection, entries: Iterable[UsageEntry]) -> None:
    """Add the entries to what is booked, in the transaction of `connection`."""
    rows = [
        {**{name: getattr(entry.kind, name) for name in _KIND}, "gpu_s": entry.gpu_s, "lost_gpu_s": entry.lost_gpu_s}
        for entry in entries
    ]
    if not rows:
        return
    adding = _INSERTS[connection.dialect.name](USAGE)
    sums = {name: USAGE.c[name] + adding.excluded[name] for name in ("gpu_s", "lost_gpu_s")}
    connection.execute(adding.on_conflict_do_update(index_elements=_KIND, set_=sums), rows)


def read_usage(connection: Connection, *, from_s: float, to_s: float) -> tuple[UsageEntry, ...]:
    """What is booked of the hours that touch this time span, in order."""
    rows = connection.execute(select(USAGE).where(USAGE.c.hour_s > from_s - HOUR_S, USAGE.c.hour_s < to_s)).all()
    return tuple(
        sorted(
            UsageEntry(UsageKind(row.hour_s, row.queue, row.owner, row.gpu, row.is_lent), row.gpu_s, row.lost_gpu_s)
            for row in rows
        )
    )
