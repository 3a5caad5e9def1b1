"""Filter of lists of jobs, for live jobs in memory and for ended jobs in a database."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from string import ascii_lowercase, ascii_uppercase

from scheduler.domain.job import Job
from scheduler.domain.job_labels import LabelSelector
from scheduler.domain.job_state import ENDED_STATES, JobState

_LOWER_ASCII = str.maketrans(ascii_uppercase, ascii_lowercase)


def lower_ascii(text: str) -> str:
    """Return the text with ASCII letters in lower case, the only ones that every database lowers alike."""
    return text.translate(_LOWER_ASCII)


@dataclass(frozen=True, slots=True)
class JobQuery:
    """Filter for lists of jobs. None and the empty string match everything.

    `since_s` is the first second of submission that matches, `until_s` the first that no longer does. With
    `ended_since_s`, only jobs match that ended then or later. `recent_since_s` leaves out jobs that ended earlier, and
    keeps live ones. `text` is a part of the id, the name, the queue or the owner, in any case of ASCII letters.
    `selector` holds requirements on the labels, all of which must be met.
    """

    states: frozenset[JobState] | None = None
    queues: frozenset[str] | None = None
    owner: str = ""
    owner_id: str = ""
    name_prefix: str = ""
    id_prefix: str = ""
    since_s: float = -math.inf
    until_s: float = math.inf
    ended_since_s: float = -math.inf
    recent_since_s: float = -math.inf
    text: str = ""
    selector: LabelSelector = ()

    @property
    def includes_ended(self) -> bool:
        return self.states is None or bool(self.states & ENDED_STATES)

    def restrict_to_queues(self, queues: frozenset[str] | None) -> JobQuery:
        """Return this query limited to `queues`; None leaves it unchanged."""
        if queues is None:
            return self
        return replace(self, queues=queues if self.queues is None else queues & self.queues)

    def matches(self, job: Job) -> bool:
        spec = job.spec
        return (
            (self.states is None or job.state in self.states)
            and (self.queues is None or spec.queue in self.queues)
            and self.owner in ("", job.owner)
            and self.owner_id in ("", job.owner_key)
            and spec.name.startswith(self.name_prefix)
            and job.id.startswith(self.id_prefix)
            and self.since_s <= job.submitted_at_s < self.until_s
            and (self.ended_since_s == -math.inf or (job.is_ended and job.state_since_s >= self.ended_since_s))
            and (not job.is_ended or job.state_since_s >= self.recent_since_s)
            and self._matches_text(job)
            and all(requirement.matches(spec.labels) for requirement in self.selector)
        )

    def _matches_text(self, job: Job) -> bool:
        if not self.text:
            return True
        text = lower_ascii(self.text)
        return any(text in lower_ascii(value) for value in (job.id, job.spec.name, job.spec.queue, job.owner))
