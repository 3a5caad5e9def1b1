"""Disturbances of each job in the last hour, counted from its events."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from scheduler.domain.events import Event, EventCode
from scheduler.domain.job_state import PLACED_STATES, JobState

ACTIVITY_WINDOW_S = 3600.0


class Disturbance(StrEnum):
    """Something that stops the ranks of a job: its GPUs or its plan change, it is preempted, or its workers fail."""

    RESIZE = "resize"
    PREEMPTION = "preemption"
    RESTART = "restart"


@dataclass(frozen=True, slots=True)
class JobActivity:
    """Disturbances of one job within `ACTIVITY_WINDOW_S`, and the time of the first of them."""

    first_at_s: float
    resizes: int = 0
    preemptions: int = 0
    restarts: int = 0


_DISTURBANCES = {
    EventCode.JOB_GROWN: Disturbance.RESIZE,
    EventCode.JOB_SHRUNK: Disturbance.RESIZE,
    EventCode.JOB_MOVED: Disturbance.RESIZE,
    EventCode.JOB_REARRANGED: Disturbance.RESIZE,
    EventCode.JOB_PREEMPTED: Disturbance.PREEMPTION,
}
_RESTART_STATES = frozenset({JobState.QUEUED, JobState.PLANNING})


class ActivityLog:
    """Disturbances of jobs in the last hour. Feed it all events in order.

    A restart is a change from a state with GPUs to one that waits for them. The earlier state of a job is known from
    the first event with a state on, so a restart just after the log began can be missed, and none is made up.
    """

    def __init__(self) -> None:
        self._entries: deque[tuple[float, str, Disturbance]] = deque()
        self._states: dict[str, JobState] = {}

    def record(self, events: Iterable[Event]) -> None:
        for event in events:
            before = self._states.get(event.subject)
            if event.job is not None:
                self._put_state(event.subject, event.job.state)
            disturbance = _DISTURBANCES.get(event.code)
            if event.code is EventCode.JOB_STATE and before in PLACED_STATES and event.cause in _RESTART_STATES:
                disturbance = Disturbance.RESTART
            if disturbance is not None:
                self._entries.append((event.at_s, event.subject, disturbance))

    def count(self, now_s: float) -> Mapping[str, JobActivity]:
        """Return the disturbances since an hour before `now_s`, by job id, and drop older ones."""
        while self._entries and self._entries[0][0] <= now_s - ACTIVITY_WINDOW_S:
            self._entries.popleft()
        counts: dict[str, dict[Disturbance, int]] = {}
        first_at_s: dict[str, float] = {}
        for at_s, job_id, disturbance in self._entries:
            of_job = counts.setdefault(job_id, dict.fromkeys(Disturbance, 0))
            of_job[disturbance] += 1
            first_at_s.setdefault(job_id, at_s)
        return {job_id: JobActivity(first_at_s[job_id], *of_job.values()) for job_id, of_job in counts.items()}

    def _put_state(self, job_id: str, state: JobState) -> None:
        """Keep the states of placed jobs only, so that the log does not grow with the number of ended jobs."""
        if state in PLACED_STATES:
            self._states[job_id] = state
        else:
            self._states.pop(job_id, None)
