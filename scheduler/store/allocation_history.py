"""History of allocations: which job held which GPUs of a node, from when to when."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Protocol

from scheduler.domain.allocation_span import AllocationSpan
from scheduler.store.protocol import Commit


@dataclass(frozen=True, slots=True)
class StoredSpan:
    """A span with its row number. Numbers ascend with the begin."""

    number: int
    span: AllocationSpan


@dataclass(frozen=True, slots=True)
class SpanQuery:
    """Filter for spans that overlap the time from `from_s` to `to_s`. None and the empty string match everything."""

    from_s: float
    to_s: float
    pool: str = ""
    node: str = ""
    job_id: str = ""
    queues: frozenset[str] | None = None

    def matches(self, span: AllocationSpan) -> bool:
        return (
            span.begin_s < self.to_s
            and (span.end_s is None or span.end_s > self.from_s)
            and self.pool in ("", span.pool)
            and self.node in ("", span.node)
            and self.job_id in ("", span.job_id)
            and (self.queues is None or span.queue in self.queues)
        )


class AllocationHistory(Protocol):
    """Every method may raise UnavailableError."""

    def find_spans(self, query: SpanQuery, *, before: int | None, limit: int) -> tuple[StoredSpan, ...]:
        """Return up to `limit` spans with a number below `before` (None: from the newest), newest first."""


class MemoryAllocationHistory:
    """AllocationHistory in memory, of the commits that were appended."""

    def __init__(self) -> None:
        self._spans: list[StoredSpan] = []
        self._open: dict[tuple[str, str], int] = {}
        self._lock = threading.Lock()

    def append(self, commit: Commit) -> None:
        with self._lock:
            for ending in commit.ended_spans:
                at = self._open.pop((ending.job_id, ending.node), None)
                if at is not None:
                    stored = self._spans[at]
                    ended = replace(stored.span, end_s=ending.end_s, end=ending.end)
                    self._spans[at] = replace(stored, span=ended)
            for span in commit.begun_spans:
                self._open[span.job_id, span.node] = len(self._spans)
                self._spans.append(StoredSpan(len(self._spans) + 1, span))

    def find_spans(self, query: SpanQuery, *, before: int | None, limit: int) -> tuple[StoredSpan, ...]:
        with self._lock:
            return tuple(islice(self._iter_matching(query, before), limit))

    def _iter_matching(self, query: SpanQuery, before: int | None) -> Iterator[StoredSpan]:
        for stored in reversed(self._spans):
            if (before is None or stored.number < before) and query.matches(stored.span):
                yield stored
