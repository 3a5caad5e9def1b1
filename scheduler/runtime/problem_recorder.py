"""ProblemRecorder: writes when problems begin and end, while this process leads; and the evidence that it reads.

It runs in its own thread of the leader, so that no tick waits for it. All it knows is in the database, so a new leader
continues the episodes of its predecessor.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Set

from scheduler.domain.events import EventCode, Webhook
from scheduler.domain.fleet import NodeState
from scheduler.domain.job import Job
from scheduler.domain.job_queue import HOUR_S
from scheduler.domain.job_state import JobState
from scheduler.domain.problems import ProblemEpisode, ProblemKey, SubjectKind, get_problem_key
from scheduler.domain.snapshot import Snapshot
from scheduler.runtime.clock import Clock
from scheduler.scheduling.policy_sets import PolicySet
from scheduler.scheduling.problems.detection import find_problems
from scheduler.scheduling.problems.episodes import build_controller_gap, describe_ending, find_pool_of, update_episodes
from scheduler.scheduling.problems.evidence import Evidence, GpuTimeUse
from scheduler.scheduling.problems.job_activity import ActivityLog
from scheduler.scheduling.problems.job_problems import FAILED_S
from scheduler.scheduling.usage import compute_unsettled_usage
from scheduler.store.api_protocol import ApiStore, ServiceStore
from scheduler.store.job_query import JobQuery
from scheduler.store.protocol import FencedError, Page, UnavailableError

PERIOD_S = 5.0
_CPU_SHARE_MAX = 0.02
GAP_S_MIN = 60.0
"""A shorter time without a leader is a usual change of leaders."""
FAILED_JOBS_MAX = 200
EVENTS_MAX = 5000
"""Events read at once. A service that records more between two reads counts the newest ones."""
EVENTS_PER_PAGE = 1000
WEBHOOKS_MAX = 1000
NODE_EVENTS_MAX = 50
NODE_LOOKUPS_MAX = 20
"""Down nodes for which one refresh looks up the time. The others follow with the next ones."""


class ProblemRecorder:
    """Recorder of problems for the leader.

    Create it before this process can lead: it reads since when no controller leads.

    Args:
        epoch: returns the epoch of the lease; 0 while this process does not lead.
        policies: the policies of the controller.
    """

    def __init__(self, store: ApiStore, *, clock: Clock, epoch: Callable[[], int], policies: PolicySet) -> None:
        self._store = store
        self._clock = clock
        self._epoch = epoch
        self._policies = policies
        self._evidence = EvidenceReader()
        self._recorded_epoch = 0
        self._open: dict[ProblemKey, ProblemEpisode] = {}
        self._led_until_s = self._read_led_until()

    def run(self, stop: threading.Event) -> None:
        """Run until `stop` is set."""
        pause_s = PERIOD_S
        while not stop.wait(pause_s):
            started_s, pause_s = self._clock.elapsed_s(), PERIOD_S
            try:
                self.step()
            except (UnavailableError, FencedError):  # the control loop logs an outage; a new leader continues
                continue
            pause_s = max(PERIOD_S, (self._clock.elapsed_s() - started_s) / _CPU_SHARE_MAX)

    def step(self) -> None:
        """Record the problems that begin or end now, if this process leads.

        Raises:
            FencedError: another process leads now.
            UnavailableError: the database does not respond.
        """
        now_s, epoch = self._clock.now_s(), self._epoch()
        if epoch == 0:
            self._recorded_epoch, self._led_until_s = 0, self._read_led_until()
            return
        recorded_epoch, self._recorded_epoch = self._recorded_epoch, 0  # after an error, read again what was written
        changed = list[ProblemEpisode]()
        if recorded_epoch != epoch:
            self._open = {get_problem_key(each): each for each in self._store.problems.list_open()}
            if now_s - self._led_until_s > GAP_S_MIN:
                changed.append(build_controller_gap(self._led_until_s, now_s))
        changed += self._find_changes(self._store.load().snapshot, now_s)
        if changed:
            self._store.problems.put_episodes(changed, epoch=epoch)
        self._open.update((get_problem_key(each), each) for each in changed)
        self._open = {key: each for key, each in self._open.items() if not each.is_closed}
        self._recorded_epoch, self._led_until_s = epoch, now_s

    def _find_changes(self, snapshot: Snapshot, now_s: float) -> tuple[ProblemEpisode, ...]:
        evidence = self._evidence.read(self._store, self._policies, snapshot, now_s, has_leader=True)
        return update_episodes(
            self._open,
            find_problems(snapshot, evidence),
            now_s,
            find_pool=lambda problem: find_pool_of(problem, snapshot, evidence.machines),
            find_last_end=lambda problem: self._store.problems.find_last_end(get_problem_key(problem)),
            describe=lambda episode, begun: self._describe(episode, snapshot, evidence, begun),
        )

    def _describe(self, episode: ProblemEpisode, snapshot: Snapshot, evidence: Evidence, begun: Set[ProblemKey]) -> str:
        job = None
        if episode.kind is SubjectKind.JOB:
            job = snapshot.jobs.get(episode.subject) or self._store.get_ended_job(episode.subject)
        return describe_ending(episode, snapshot, evidence, job, begun)

    def _read_led_until(self) -> float:
        """Return until when a controller led, as far as the lease or else the last commit tells."""
        lease, now_s = self._store.get_lease(), self._clock.now_s()
        if lease is not None:
            return lease.expires_at_s
        committed = self._store.load().snapshot
        if not committed.generation:
            return now_s
        return committed.now_s + self._policies.settings.full_pass_period_s  # an idle leader commits once in this time


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
