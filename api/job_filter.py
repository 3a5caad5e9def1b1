"""Query parameters that filter lists of jobs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from fastapi import Query

from api.http.paging import TEXT_PATTERN, StatesParameter, parse_states
from api.identity.principals import Principal
from scheduler.documents.job_labels import parse_selector_parameter
from scheduler.domain.job_labels import SELECTOR_FORM, SELECTOR_LENGTH_MAX
from scheduler.domain.job_state import ENDED_STATES, JobState
from scheduler.store.job_query import JobQuery

OWN_JOBS = "me"
"""Value of `owner_id` that stands for the caller."""


@dataclass(frozen=True, slots=True)
class JobFilter:
    """Query parameters of job lists. A job must match all of them."""

    state: StatesParameter = ""
    queue: Annotated[
        str,
        Query(
            max_length=2000,
            pattern=TEXT_PATTERN,
            description="Only jobs in one of these queues, separated by commas. Empty: all.",
        ),
    ] = ""
    owner: Annotated[
        str,
        Query(
            max_length=200,
            pattern=TEXT_PATTERN,
            description="Only jobs of callers with this display name, which several callers may have. Empty: all.",
        ),
    ] = ""
    owner_id: Annotated[
        str,
        Query(
            max_length=600,
            pattern=TEXT_PATTERN,
            description="Only jobs of the caller with this stable id; `me` is your own. Empty: all.",
        ),
    ] = ""
    name: Annotated[
        str,
        Query(
            max_length=200,
            pattern=TEXT_PATTERN,
            description="Only jobs whose display name starts with this text. Empty: all.",
        ),
    ] = ""
    id: Annotated[
        str,
        Query(max_length=200, pattern=TEXT_PATTERN, description="Only jobs whose id starts with this. Empty: all."),
    ] = ""
    ended_within_s: Annotated[
        float | None,
        Query(ge=0, allow_inf_nan=False, description="Only jobs that ended at most this many seconds ago."),
    ] = None
    ended_max_age_s: Annotated[
        float | None,
        Query(
            ge=0,
            allow_inf_nan=False,
            description="Leave out jobs that ended more than this many seconds ago. Live jobs stay in the list.",
        ),
    ] = None
    search: Annotated[
        str,
        Query(
            max_length=200,
            pattern=TEXT_PATTERN,
            description="Only jobs whose id, name, queue or owner contains this text. The case of ASCII letters is "
            "ignored. Empty: all.",
        ),
    ] = ""
    selector: Annotated[
        str,
        Query(
            max_length=SELECTOR_LENGTH_MAX,
            pattern=TEXT_PATTERN,
            description=f"Only jobs whose labels meet all of these {SELECTOR_FORM}, as selectors of Kubernetes. "
            "`!=` and `notin` include jobs without the label. Empty: all.",
        ),
    ] = ""
    submitted_since_s: Annotated[
        float | None,
        Query(ge=0, allow_inf_nan=False, description="Submitted at or after this time, in seconds since 1970 (UTC)."),
    ] = None
    submitted_until_s: Annotated[
        float | None,
        Query(ge=0, allow_inf_nan=False, description="Submitted before this time, in seconds since 1970 (UTC)."),
    ] = None

    def to_query(self, principal: Principal, now_s: float) -> JobQuery:
        """Return the query of this principal.

        Raises:
            InvalidDocumentError: a state is unknown, or `selector` is no selector.
        """
        return JobQuery(
            states=parse_states(self.state, JobState, live=set(JobState) - ENDED_STATES),
            queues=frozenset(name.strip() for name in self.queue.split(",")) if self.queue else None,
            owner=self.owner,
            owner_id=principal.subject if self.owner_id == OWN_JOBS else self.owner_id,
            name_prefix=self.name,
            id_prefix=self.id,
            ended_since_s=-math.inf if self.ended_within_s is None else now_s - self.ended_within_s,
            recent_since_s=-math.inf if self.ended_max_age_s is None else now_s - self.ended_max_age_s,
            text=self.search,
            selector=parse_selector_parameter("selector", self.selector),
            since_s=-math.inf if self.submitted_since_s is None else self.submitted_since_s,
            until_s=math.inf if self.submitted_until_s is None else self.submitted_until_s,
        )
