"""History of allocations in the database. A row is inserted when its span begins, and completed when it ends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    ColumnElement,
    Connection,
    Double,
    Engine,
    Index,
    Named,
    String,
    Table,
    TypedColumns,
    bindparam,
    func,
    or_,
    select,
    update,
)

from scheduler.domain.allocation_span import AllocationSpan, SpanEnd, SpanEnding
from scheduler.store.allocation_history import GenerationUse, SpanQuery, StoredSpan
from scheduler.store.database import METADATA, ROW_NUMBER, AnyRow, fetch_rows, insert_rows
from scheduler.store.protocol import Commit


class AllocationSpanColumns(TypedColumns):
    """The open span of a job on a node has neither `end_s` nor `end_reason`. There is at most one."""

    number: Named[int] = Column(ROW_NUMBER, primary_key=True)
    job_id: Named[str] = Column(String)
    name: Named[str] = Column(String)
    queue: Named[str] = Column(String)
    owner: Named[str] = Column(String)
    owner_id: Named[str] = Column(String)
    generation: Named[int] = Column(BigInteger)
    node: Named[str] = Column(String)
    pool: Named[str] = Column(String)
    gpu: Named[str] = Column(String)
    indices: Named[Any] = Column(JSON, nullable=False)
    is_lent: Named[bool] = Column(Boolean)
    begin_s: Named[float] = Column(Double)
    end_s: Named[float | None] = Column(Double)
    end_reason: Named[str | None] = Column(String)
    model: Named[str] = Column(String, server_default="")


ALLOCATION_SPANS = Table("allocation_spans", METADATA, AllocationSpanColumns)
_ROW = ALLOCATION_SPANS.c
Index("ix_allocation_spans_end", _ROW.end_s, _ROW.begin_s)
Index("ix_allocation_spans_job", _ROW.job_id, _ROW.node, _ROW.end_s)
Index("ix_allocation_spans_node", _ROW.node, _ROW.end_s)


def write_span_changes(connection: Connection, commit: Commit) -> None:
    """End and begin the spans of a commit, in this order."""
    _end_spans(connection, commit.ended_spans)
    insert_rows(connection, ALLOCATION_SPANS, [_build_row(span) for span in commit.begun_spans])


def _end_spans(connection: Connection, endings: Sequence[SpanEnding]) -> None:
    if endings:
        is_open = (_ROW.job_id == bindparam("j"), _ROW.node == bindparam("n"), _ROW.end_s.is_(None))
        ended = update(ALLOCATION_SPANS).where(*is_open).values(end_s=bindparam("at"), end_reason=bindparam("why"))
        rows = [{"j": each.job_id, "n": each.node, "at": each.end_s, "why": each.end.value} for each in endings]
        connection.execute(ended, rows)


def _build_row(span: AllocationSpan) -> dict[str, Any]:
    return {
        "job_id": span.job_id,
        "name": span.name,
        "queue": span.queue,
        "owner": span.owner,
        "owner_id": span.owner_id,
        "generation": span.generation,
        "node": span.node,
        "pool": span.pool,
        "gpu": span.gpu,
        "indices": list(span.gpus),
        "is_lent": span.is_lent,
        "begin_s": span.begin_s,
        "end_s": span.end_s,
        "end_reason": None if span.end is None else span.end.value,
        "model": span.model,
    }


def _decode_row(row: AnyRow) -> StoredSpan:
    span = AllocationSpan(
        job_id=row.job_id,
        name=row.name,
        queue=row.queue,
        owner=row.owner,
        owner_id=row.owner_id,
        generation=row.generation,
        node=row.node,
        pool=row.pool,
        gpu=row.gpu,
        gpus=tuple(row.indices),
        is_lent=row.is_lent,
        begin_s=row.begin_s,
        end_s=row.end_s,
        end=None if row.end_reason is None else SpanEnd(row.end_reason),
        model=row.model,
    )
    return StoredSpan(row.number, span)


class SqlAllocationHistory:
    """AllocationHistory in SQL.

    Args:
        engine: an engine whose statements each are a transaction.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def find_spans(self, query: SpanQuery, *, before: int | None, limit: int) -> tuple[StoredSpan, ...]:
        conditions = list(_build_conditions(query))
        if before is not None:
            conditions.append(_ROW.number < before)
        found = select(ALLOCATION_SPANS).where(*conditions).order_by(_ROW.number.desc()).limit(limit)
        return tuple(map(_decode_row, fetch_rows(self._engine, found)))

    def sum_generations(self, job_id: str, *, now_s: float) -> tuple[GenerationUse, ...]:
        keys = (_ROW.generation, _ROW.gpu, _ROW.is_lent)
        held_s = func.coalesce(_ROW.end_s, now_s) - _ROW.begin_s
        sums = (
            func.min(_ROW.begin_s).label("begin_s"),
            func.max(_ROW.end_s).label("end_s"),
            (func.count() - func.count(_ROW.end_s)).label("open_spans"),
            func.sum(func.json_array_length(_ROW.indices) * held_s).label("gpu_s"),
        )
        found = select(*keys, *sums).where(_ROW.job_id == job_id).group_by(*keys)
        uses = (
            GenerationUse(
                row.generation, row.gpu, row.is_lent, row.begin_s, None if row.open_spans else row.end_s, row.gpu_s
            )
            for row in fetch_rows(self._engine, found)
        )
        return tuple(sorted(uses, key=attrgetter("generation", "gpu", "is_lent")))


def _build_conditions(query: SpanQuery) -> Iterable[ColumnElement[bool]]:
    yield _ROW.begin_s < query.to_s
    yield or_(_ROW.end_s.is_(None), _ROW.end_s > query.from_s)
    if query.pool:
        yield _ROW.pool == query.pool
    if query.node:
        yield _ROW.node == query.node
    if query.job_id:
        yield _ROW.job_id == query.job_id
    if query.queues is not None:
        yield _ROW.queue.in_(sorted(query.queues))
