"""History of allocations in memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from scheduler.store.allocation_history import SpanQuery, StoredSpan
from scheduler.store.protocol import Commit


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
