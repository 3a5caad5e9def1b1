"""History of allocations: which job held which GPUs of a node, from when to when."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
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


@dataclass(frozen=True, slots=True)
class GenerationUse:
    """GPU-seconds that one generation of a job held on GPUs of one kind. `end_s` is None while it holds some."""

    generation: int
    gpu: str
    is_lent: bool
    begin_s: float
    end_s: float | None
    gpu_s: float


class AllocationHistory(Protocol):
    """Every method may raise UnavailableError."""

    def sum_generations(self, job_id: str, *, now_s: float) -> tuple[GenerationUse, ...]:
        """Return the use of a job by generation, GPU model and whether it was lent, in this order.

        Spans that are open count until `now_s`.
        """

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

    def sum_generations(self, job_id: str, *, now_s: float) -> tuple[GenerationUse, ...]:
        groups = defaultdict[tuple[int, str, bool], list[AllocationSpan]](list)
        with self._lock:
            for span in (stored.span for stored in self._spans if stored.span.job_id == job_id):
                groups[span.generation, span.gpu, span.is_lent].append(span)
        return tuple(_sum_spans(*key, groups[key], now_s) for key in sorted(groups))

    def _iter_matching(self, query: SpanQuery, before: int | None) -> Iterator[StoredSpan]:
        for stored in reversed(self._spans):
            if (before is None or stored.number < before) and query.matches(stored.span):
                yield stored


def _sum_spans(
    generation: int, gpu: str, is_lent: bool, spans: Sequence[AllocationSpan], now_s: float
) -> GenerationUse:
    ends_s = [each.end_s for each in spans if each.end_s is not None]
    return GenerationUse(
        generation,
        gpu,
        is_lent,
        begin_s=min(each.begin_s for each in spans),
        end_s=max(ends_s) if len(ends_s) == len(spans) else None,
        gpu_s=sum(len(each.gpus) * ((now_s if each.end_s is None else each.end_s) - each.begin_s) for each in spans),
    )
