"""What lists of jobs and loans may ask for, live or ended alike, and where a page of them begins."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from heapq import nlargest
from typing import NamedTuple, TypeVar

from scheduler.domain.job import Job
from scheduler.domain.job_state import ENDED, JobState
from scheduler.domain.loan import LIVE_LOANS, Loan, LoanState

Row = TypeVar("Row")


class Place(NamedTuple):
    """Where a job or loan stands in lists, which are in descending order of it. It never changes: not even when the
    job or loan ends, so that whoever goes from page to page meets each one once."""

    at_s: float
    id: str


@dataclass(frozen=True, slots=True)
class JobQuery:
    """Jobs with all of these traits. `states` and `queues`: any of them, None: all. `since_s` is the first second of
    submission, `until_s` the first after."""

    states: frozenset[JobState] | None = None
    queues: frozenset[str] | None = None
    owner: str = ""
    name_prefix: str = ""
    since_s: float = -math.inf
    until_s: float = math.inf

    @property
    def wants_ended(self) -> bool:
        return self.states is None or bool(self.states & ENDED)

    def within(self, queues: frozenset[str] | None) -> JobQuery:
        """The same of these queues alone; None: of all."""
        if queues is None:
            return self
        return replace(self, queues=queues if self.queues is None else queues & self.queues)

    def matches(self, job: Job) -> bool:
        spec = job.spec
        return (
            (self.states is None or job.state in self.states)
            and (self.queues is None or spec.queue in self.queues)
            and self.owner in ("", job.owner)
            and spec.name.startswith(self.name_prefix)
            and self.since_s <= job.submitted_at_s < self.until_s
        )


@dataclass(frozen=True, slots=True)
class LoanQuery:
    """Loans with all of these traits. `states`: any of them, None: all."""

    states: frozenset[LoanState] | None = None
    pool: str = ""
    node: str = ""

    @property
    def wants_ended(self) -> bool:
        return self.states is None or not self.states <= LIVE_LOANS

    def matches(self, loan: Loan) -> bool:
        wanted = self.states is None or loan.state in self.states
        return wanted and self.pool in ("", loan.pool) and self.node in ("", loan.node)


def place_of_job(job: Job) -> Place:
    return Place(job.submitted_at_s, job.id)


def place_of_loan(loan: Loan) -> Place:
    return Place(loan.offered_at_s, loan.id)


def first_after(
    rows: list[Row], place_of: Callable[[Row], Place], *, after: Place | None, limit: int
) -> tuple[Row, ...]:
    """Up to `limit` rows that come after the place `after` in lists, in the order of lists."""
    following = rows if after is None else [row for row in rows if place_of(row) < after]
    return tuple(nlargest(limit, following, key=place_of))
