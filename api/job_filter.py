"""JobFilter: what lists of jobs may be asked for in a query."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from fastapi import Query

from api.filters import TEXT, States, states_in
from scheduler.domain.job_state import ENDED, JobState
from scheduler.store.queries import JobQuery


@dataclass(frozen=True, slots=True)
class JobFilter:
    """Only jobs with all of the given traits."""

    state: States = ""
    queue: Annotated[
        str, Query(max_length=2000, pattern=TEXT, description="Of one of these queues, separated by commas.")
    ] = ""
    owner: Annotated[str, Query(max_length=200, pattern=TEXT, description="Submitted by this principal.")] = ""
    name: Annotated[str, Query(max_length=200, pattern=TEXT, description="With a name that begins so.")] = ""
    submitted_since_s: Annotated[
        float | None, Query(ge=0, allow_inf_nan=False, description="Submitted then or later: seconds since 1970 (UTC).")
    ] = None
    submitted_until_s: Annotated[
        float | None, Query(ge=0, allow_inf_nan=False, description="Submitted earlier than that.")
    ] = None

    def query(self) -> JobQuery:
        """Raises RefusedError for a state that does not exist."""
        return JobQuery(
            states=states_in(self.state, JobState, live=set(JobState) - ENDED),
            queues=frozenset(name.strip() for name in self.queue.split(",")) if self.queue else None,
            owner=self.owner,
            name_prefix=self.name,
            since_s=-math.inf if self.submitted_since_s is None else self.submitted_since_s,
            until_s=math.inf if self.submitted_until_s is None else self.submitted_until_s,
        )
