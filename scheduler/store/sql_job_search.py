"""Searches of ended jobs in the database, whose cost does not grow with the number of jobs that do not match."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import ColumnElement, Connection, Engine, Select, func, or_, select, union_all

from scheduler.domain.job_state import ENDED_STATES
from scheduler.store.api_protocol import SortKey
from scheduler.store.database import AnyRow, Contains, StateSince, fetch_rows, transaction
from scheduler.store.job_query import JobQuery, lower_ascii
from scheduler.store.sql_history import ENDED_JOBS, order_and_limit
from scheduler.store.sql_job_labels import LABELS, build_label_conditions, build_label_ranges, find_equality

SORTED_JOBS_MAX = 2000
"""Most jobs that are sorted for a page. If a filter leaves more, the list is read in order until the page is full."""
_QUEUES_SPLIT_MAX = 30
_NUMBER_MAX = 2**63 - 1
_LAST_CHARACTER = "\U0010ffff"


def find_ended_job_keys(engine: Engine, query: JobQuery, after: SortKey | None, limit: int) -> list[AnyRow]:
    """Return the keys of one page of jobs, without bodies: SqlStore caches the jobs that were listed before.

    The cost does not depend on the number of jobs that do not match, except for a text: it is sought in the index of
    the list until the page is full.
    """
    last_before = 0
    ended_since_s = max(query.ended_since_s, query.recent_since_s)
    if ended_since_s > -math.inf:
        with transaction(engine) as connection:
            last_before = _find_last_ended_before(connection, ended_since_s)
    for matching, entries in _list_index_ranges(query, last_before):
        if len(fetch_rows(engine, entries.limit(SORTED_JOBS_MAX + 1))) <= SORTED_JOBS_MAX:
            return fetch_rows(engine, _select_few_keys(query, matching, last_before, after, limit))
    return fetch_rows(engine, _select_keys_in_order(query, last_before, after, limit))


_Rows = Select[*tuple[Any, ...]]


def _list_index_ranges(query: JobQuery, last_before: int) -> Iterator[tuple[tuple[ColumnElement[bool], ...], _Rows]]:
    """Yield conditions of the query that may leave few jobs, and that an index answers, though not in order.

    Each comes with the rows of the index, one a job.
    """
    row = ENDED_JOBS.c
    for in_range in build_label_ranges(query.selector):
        labels = select(LABELS.c.job_id).where(*in_range)
        yield (row.id.in_(labels.limit(SORTED_JOBS_MAX)),), labels
    ranges: list[tuple[ColumnElement[bool], ...]] = []
    if query.name_prefix:
        ranges.append((row.name >= query.name_prefix, row.name < query.name_prefix + _LAST_CHARACTER))
    if query.id_prefix:
        ranges.append((row.id >= query.id_prefix, row.id < query.id_prefix + _LAST_CHARACTER))
    if last_before:
        ranges.append((row.number > last_before,))
    if query.selector and query.queues is not None:
        ranges.append((row.queue.in_(sorted(query.queues)),))
    yield from ((each, select(row.number).where(*each)) for each in ranges)


def _select_few_keys(
    query: JobQuery,
    matching: tuple[ColumnElement[bool], ...],
    last_before: int,
    after: SortKey | None,
    limit: int,
) -> Select[*tuple[Any, ...]]:
    """Select keys from the at most SORTED_JOBS_MAX jobs that are `matching`."""
    # The limit keeps databases from walking the whole list in its order instead of sorting the few rows.
    few = select(*(column for column in ENDED_JOBS.c if column.name != "body")).where(*matching)
    row = few.limit(SORTED_JOBS_MAX).subquery().c
    keys = select(row.number, row.id, row.generation).where(*_build_conditions(query, row, last_before))
    return order_and_limit(keys, row.submitted_at_s, row.id, after, limit=limit)


def _select_keys_in_order(
    query: JobQuery, last_before: int, after: SortKey | None, limit: int
) -> Select[*tuple[Any, ...]]:
    row = ENDED_JOBS.c
    keys = select(row.number, row.id, row.generation, row.submitted_at_s)
    if (label := find_equality(query.selector)) is not None:
        labels, (value,) = LABELS.c, label.values
        others = replace(query, selector=tuple(each for each in query.selector if each != label))
        keys = keys.join(LABELS, labels.job_id == row.id).where(labels.key == label.key, labels.value == value)
        keys = keys.where(*_build_conditions(others, row, last_before))
        return order_and_limit(keys, labels.submitted_at_s, labels.job_id, after, limit=limit)
    parts = [
        order_and_limit(
            keys.where(*_build_conditions(part, row, last_before)), row.submitted_at_s, row.id, after, limit=limit
        )
        for part in _split_query(query)
    ]
    if len(parts) == 1:
        return parts[0]
    merged = union_all(*(part.subquery().select() for part in parts)).subquery()
    return order_and_limit(select(merged), merged.c.submitted_at_s, merged.c.id, None, limit=limit)


def _split_query(query: JobQuery) -> Iterator[JobQuery]:
    """Yield queries that one index answers in order, each for one state, and for one queue if no owner is given."""
    states = ENDED_STATES if query.states is None else query.states & ENDED_STATES
    queues = query.queues
    has_owner = bool(query.owner or query.owner_id)
    if (query.states is None and queues is None and not has_owner) or not states or queues == frozenset():
        yield query
        return
    by_queue = queues is not None and not has_owner and len(queues) <= _QUEUES_SPLIT_MAX
    for queue in sorted(queues or ()) if by_queue else (None,):
        for state in sorted(states):
            chosen = queues if queue is None else frozenset((queue,))
            yield replace(query, states=frozenset((state,)), queues=chosen)


def _build_conditions(query: JobQuery, row: Any, last_before: int) -> list[ColumnElement[bool]]:
    """Return the conditions on `row`, the columns of jobs. `last_before` is the number of the last job too old."""
    conditions: list[ColumnElement[bool]] = []
    if query.states is not None:
        conditions.append(row.state.in_(sorted(query.states)))
    if query.queues is not None:
        conditions.append(row.queue.in_(sorted(query.queues)))
    if query.owner:
        conditions.append(row.owner == query.owner)
    if query.owner_id:
        conditions.append(row.owner_id == query.owner_id)
    if query.name_prefix:
        conditions.append(func.substr(row.name, 1, len(query.name_prefix)) == query.name_prefix)
    if query.id_prefix:
        conditions.append(func.substr(row.id, 1, len(query.id_prefix)) == query.id_prefix)
    if query.text:
        text = lower_ascii(query.text)
        conditions.append(or_(*(Contains(part, text) for part in (row.id, row.name, row.queue, row.owner))))
    conditions += build_label_conditions(query.selector, row.id)
    if last_before:
        conditions.append(row.number > last_before)
    if query.since_s > -math.inf:
        conditions.append(row.submitted_at_s >= query.since_s)
    if query.until_s < math.inf:
        conditions.append(row.submitted_at_s < query.until_s)
    return conditions


def _find_last_ended_before(connection: Connection, at_s: float) -> int:
    """Return the number of the last job that ended before `at_s`, or 0.

    Jobs are numbered in the order in which they end.
    """
    ended_at_s = StateSince(ENDED_JOBS.c.body)
    earlier = (
        select(ENDED_JOBS.c.number).where(ended_at_s < at_s).order_by(ended_at_s.desc(), ENDED_JOBS.c.number.desc())
    )
    return connection.execute(earlier.limit(1)).scalar() or 0


def select_ended_job_rows(numbers: Sequence[int]) -> Select[*tuple[Any, ...]]:
    return select(ENDED_JOBS).where(ENDED_JOBS.c.number.in_(numbers))
