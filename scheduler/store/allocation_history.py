"""History of allocations: which job held which GPUs of a node, from when to when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from scheduler.domain.allocation_span import AllocationSpan


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
