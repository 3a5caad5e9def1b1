"""ProblemRecorder: writes when problems begin and end, while this process leads.

It runs in its own thread of the leader, so that no tick waits for it. All it knows is in the database, so a new leader
continues the episodes of its predecessor.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Set

from scheduler.domain.problems import ProblemEpisode, ProblemKey, SubjectKind, get_problem_key
from scheduler.domain.snapshot import Snapshot
from scheduler.runtime.clock import Clock
from scheduler.runtime.problem_evidence import EvidenceReader
from scheduler.scheduling.policy_sets import PolicySet
from scheduler.scheduling.problems.detection import find_problems
from scheduler.scheduling.problems.endings import describe_ending
from scheduler.scheduling.problems.episodes import build_controller_gap, find_pool_of, update_episodes
from scheduler.scheduling.problems.evidence import Evidence
from scheduler.store.api_protocol import ApiStore
from scheduler.store.protocol import FencedError, UnavailableError

PERIOD_S = 5.0
_CPU_SHARE_MAX = 0.02
GAP_S_MIN = 60.0
"""A shorter time without a leader is a usual change of leaders."""


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
