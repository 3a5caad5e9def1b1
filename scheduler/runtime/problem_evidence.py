"""EvidenceReader: the facts from which problems follow in addition to the snapshot, read from the store."""

from __future__ import annotations

from collections.abc import Mapping

from scheduler.domain.events import EventCode, Webhook
from scheduler.domain.fleet import NodeState
from scheduler.domain.job import Job
from scheduler.domain.job_queue import HOUR_S
from scheduler.domain.job_state import JobState
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling.policy_sets import PolicySet
from scheduler.scheduling.problems.evidence import Evidence, GpuTimeUse
from scheduler.scheduling.problems.job_activity import ActivityLog
from scheduler.scheduling.problems.job_problems import FAILED_S
from scheduler.scheduling.usage import compute_unsettled_usage
from scheduler.store.api_protocol import ApiStore, ServiceStore
from scheduler.store.job_query import JobQuery
from scheduler.store.protocol import Page

FAILED_JOBS_MAX = 200
EVENTS_MAX = 5000
"""Events read at once. A service that records more between two reads counts the newest ones."""
EVENTS_PER_PAGE = 1000
WEBHOOKS_MAX = 1000
NODE_EVENTS_MAX = 50
NODE_LOOKUPS_MAX = 20
"""Down nodes for which one refresh looks up the time. The others follow with the next ones."""


class EvidenceReader:
    """Reader of evidence. It remembers what it read, so that each call reads new events only. Use it from one thread
    at a time.
    """

    def __init__(self) -> None:
        self._events = RecentEvents()
        self._down_times = DownTimes()

    def read(
        self, store: ApiStore, policies: PolicySet, snapshot: Snapshot, now_s: float, *, has_leader: bool
    ) -> Evidence:
        """Return the evidence for a snapshot at a time."""
        return Evidence(
            now_s,
            policies.settings,
            policies.lends,
            has_leader,
            _find_failed_jobs(store, now_s),
            self._events.read(store).count(now_s),
            measure_gpu_time(store, now_s),
            store.machines.list_machines(),
            _list_webhooks(store),
            self._down_times.read(store, snapshot),
        )


class RecentEvents:
    """Reader of new events that counts the disturbances of each job in the last hour."""

    def __init__(self) -> None:
        self._log = ActivityLog()
        self._number = 0

    def read(self, store: ApiStore) -> ActivityLog:
        """Read the events since the last call. The first call reads the newest `EVENTS_MAX`."""
        newest = store.get_last_event_number()
        if newest < self._number:  # another database was restored
            self._log, self._number = ActivityLog(), 0
        after = max(self._number, newest - EVENTS_MAX)
        while after < newest:
            rows = store.list_events(Page(after=after, limit=EVENTS_PER_PAGE))
            if not rows:
                break
            self._log.record(row.event for row in rows)
            after = rows[-1].number
        self._number = max(after, newest)
        return self._log


class DownTimes:
    """When nodes that are down went down, from their events. Each is looked up once."""

    def __init__(self) -> None:
        self._since_s: dict[str, float | None] = {}

    def read(self, store: ApiStore, snapshot: Snapshot) -> Mapping[str, float]:
        down = snapshot.index.down
        self._since_s = {name: since_s for name, since_s in self._since_s.items() if name in down}
        for name in sorted(down - self._since_s.keys())[:NODE_LOOKUPS_MAX]:
            self._since_s[name] = _find_down_since(store, name)
        return {name: since_s for name, since_s in self._since_s.items() if since_s is not None}


def _find_down_since(store: ApiStore, node: str) -> float | None:
    events = [row.event for row in store.list_last_events(node, limit=NODE_EVENTS_MAX)]
    times_s = [
        event.at_s for event in events if event.code is EventCode.NODE_CHANGED and event.cause == NodeState.DOWN.value
    ]
    return times_s[-1] if times_s else None


def _find_failed_jobs(store: ApiStore, now_s: float) -> tuple[Job, ...]:
    query = JobQuery(states=frozenset({JobState.FAILED}), ended_since_s=now_s - FAILED_S)
    return store.find_ended_jobs(query, after=None, limit=FAILED_JOBS_MAX)


def measure_gpu_time(store: ApiStore, now_s: float) -> GpuTimeUse:
    """Return the GPU time since the start of the previous hour, as `/v1/usage` reports it: one to two hours."""
    from_s = (now_s // HOUR_S - 1) * HOUR_S
    usage = store.load_usage(from_s=from_s, to_s=from_s + 2 * HOUR_S)
    unsettled = compute_unsettled_usage(usage.snapshot, max(now_s, usage.snapshot.now_s), from_s=from_s)
    entries = [entry for entry in (*usage.entries, *unsettled) if entry.key.hour_s >= from_s]
    return GpuTimeUse(from_s, sum(each.gpu_s for each in entries), sum(each.lost_gpu_s for each in entries))


def _list_webhooks(store: ApiStore) -> tuple[Webhook, ...]:
    return store.webhooks.list_webhooks(after=0, limit=WEBHOOKS_MAX) if isinstance(store, ServiceStore) else ()
