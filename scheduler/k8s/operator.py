"""Operator: custom resources in, ticks as ever, custom resources out. It makes no choices of its own.

One loop, as a controller's: what resources and nodes ask for goes into the inbox, the controller ticks, and what the
snapshot says then is written back. Only the holder of the Lease does any of it, and only on mirrors that are whole and
fresh: a resource that a mirror lacks counts as deleted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from scheduler.domain.job import Job
from scheduler.domain.loan import Loan
from scheduler.domain.reason import Reason
from scheduler.domain.tick_report import TickReport
from scheduler.k8s.cluster_mirrors import ClusterMirrors
from scheduler.k8s.demand import DemandSources, with_demand
from scheduler.k8s.effects import Effects
from scheduler.k8s.election import Election
from scheduler.k8s.intake import Resources, Taken, take_in
from scheduler.k8s.operating import Pulse, Round, Standing
from scheduler.k8s.publish import publish, unknown_jobs
from scheduler.k8s.publish_fleet import unknown_loans
from scheduler.k8s.story import Story
from scheduler.k8s.writer import Writer
from scheduler.k8s.writing import World
from scheduler.runtime.clock import Clock
from scheduler.runtime.controller import Controller
from scheduler.runtime.outage import Outage
from scheduler.store.protocol import FencedError, Loaded, Store, UnavailableError

log = logging.getLogger(__name__)

ENDED_LOANS = 1000
"""Of those that have ended, so many are looked through for what became of a Loan."""


@dataclass(frozen=True, slots=True)
class OperatorPace:
    """`poll_s` between two looks for something to do. Between two rounds of reading and writing resources `round_s` at
    most, and `calm_s` at least where something is heard: of a thousand pods there is always news. Who leads and cannot
    reach the database for `outage_s` leaves the Lease to others for as long: it may be this replica alone that cannot.
    """

    poll_s: float = 0.1
    calm_s: float = 0.5
    round_s: float = 5.0
    outage_s: float = 10.0


class Operator:
    """Mutable on purpose: it remembers what it saw last, and nothing that it could not see again."""

    def __init__(
        self,
        *,
        mirrors: ClusterMirrors,
        election: Election,
        controller: Controller,
        store: Store,
        clock: Clock,
        demand: DemandSources,
        writer: Writer,
        story: Story,
        effects: Effects,
        job_namespace: str,
        on_round: Callable[[Round], None] = lambda done: None,
        pace: OperatorPace | None = None,
    ) -> None:
        self._mirrors = mirrors
        self._election = election
        self._controller = controller
        self._store = store
        self._clock = clock
        self._demand = demand
        self._writer = writer
        self._story = story
        self._effects = effects
        self._job_namespace = job_namespace
        self._on_round = on_round
        self._pace = pace or OperatorPace()
        self._outage = Outage(time.monotonic)
        self._voting: threading.Thread | None = None
        self._pulse = Pulse(self._dead)
        self._waiting: Mapping[str, Reason] = {}
        self._seen = -1
        self._rounded_at_s = float("-inf")

    def run(self, stop: threading.Event) -> None:
        """Until `stop` is set: lead while elected, wait for it otherwise. Hands over at once when it ends."""
        self._mirrors.start()
        self._demand.start()
        self._voting = threading.Thread(target=self._election.run, args=(stop,), name="election", daemon=True)
        self._voting.start()
        try:
            while not stop.is_set():
                stop.wait(self._round())
        finally:
            self._controller.close()
            self._election.release()
            self._demand.stop()
            self._mirrors.stop()
            self._effects.close()

    @property
    def may_lead(self) -> bool:
        """It was elected, and sees the cluster as it is."""
        return self._election.is_leading and self._mirrors.are_synced and not self._mirrors.stale

    @property
    def epoch(self) -> int:
        """That of the store's lease, 0 without one."""
        return self._controller.epoch

    def unlive(self) -> str:
        """Why this process should be started anew; empty where it goes on. That the API server or the database does
        not answer is no reason: another process would fare no better."""
        return self._pulse.fault()

    def unready(self) -> str:
        """What it still waits for before it could lead; empty where it could."""
        unlisted = self._mirrors.unlisted
        return f"not listed yet: {', '.join(kind.plural for kind in unlisted)}" if unlisted else ""

    def _round(self) -> float:
        """One look, whatever the database does; how long to wait before the next, in s."""
        pause_s = self._pace.poll_s
        try:
            self.step()
            self._try_database()
        except UnavailableError as error:
            pause_s = self._outage.note(error)
            if self._outage.lasts_s > self._pace.outage_s:
                self._election.stand_back(self._pace.outage_s)
        self._pulse.beat()
        self._on_round(Round(self._standing(), self._mirrors.silent_s))
        return pause_s

    def _try_database(self) -> None:
        """After an outage, see whether it is over: who does not lead asks nothing of the database otherwise."""
        if not self._outage.lasts_s:
            return
        if not self._controller.leads:
            self._controller.stand_down()  # a write that changes nothing
            self._store.load()
        self._outage.end()
        self._election.come_back()

    def _standing(self) -> Standing:
        if self._outage.lasts_s:
            return Standing.NO_DATABASE
        if self._controller.leads:
            return Standing.LEADING
        return Standing.BLIND if self._election.is_leading and not self.may_lead else Standing.WAITING

    def _dead(self) -> tuple[str, ...]:
        """Threads without which this operator will never lead again."""
        watches = tuple(f"the watch of {kind.plural}" for kind in self._mirrors.unwatched)
        has_voted = self._voting is not None and not self._voting.is_alive()
        return (*watches, "the election") if has_voted else watches

    def step(self) -> TickReport | None:
        """One look: read what resources ask for, tick, write back what is; each only where there may be something."""
        if not self.may_lead:
            return self._controller.step()  # which gives up leading, if it did
        changes, since_s = self._mirrors.changes, time.monotonic() - self._rounded_at_s
        is_due = since_s >= (self._pace.round_s if changes == self._seen else self._pace.calm_s)
        taken, settled = self._take_in() if is_due else (None, frozenset[str]())
        report = self._controller.step()
        if report is not None:
            self._waiting = report.waiting
        has_changed = report is not None and report.committed
        if not self._controller.leads or (taken is None and not has_changed):
            return report
        if taken is None:
            taken, settled = self._take_in()
        self._seen, self._rounded_at_s = changes, time.monotonic()
        self._write(taken, settled)
        return report

    def _take_in(self) -> tuple[Taken, frozenset[str]]:
        """Send what differs; which of those commands have gone into the snapshot already."""
        loaded, now_s = self._store.load(), self._clock.now_s()
        taken = take_in(self._mirrors.resources(), loaded, now_s, job_namespace=self._job_namespace)
        taken = with_demand(taken, self._demand.look(taken.fleet.pools, now_s), loaded.snapshot)
        waiting = {command.id for command in loaded.inbox}
        repeated = [command.id for command in taken.commands if not self._store.send(command)]
        return taken, frozenset(repeated) - waiting

    def _write(self, taken: Taken, settled: frozenset[str]) -> None:
        """Make resources say what the snapshot says, and tell what has happened."""
        loaded, resources = self._store.load(), taken.resources
        world = World(
            snapshot=loaded.snapshot,
            taken=taken,
            now_s=self._clock.now_s(),
            epoch=self._controller.epoch,
            job_namespace=self._job_namespace,
            waiting=self._waiting,
            ended_jobs=self._ended_jobs(resources, loaded),
            ended_loans=self._ended_loans(resources, loaded),
            settled=settled,
            podded=self._mirrors.podded,
        )
        try:
            self._effects.take(self._writer.effects(publish(world)))
            self._effects.take(self._writer.effects(self._story.steps(world)))
        except FencedError as later:
            log.warning("a later leader has written already: %s", later)
            self._controller.stand_down()

    def _ended_jobs(self, resources: Resources, loaded: Loaded) -> dict[str, Job]:
        found = ((job_id, self._store.ended_job(job_id)) for job_id in unknown_jobs(resources, loaded.snapshot))
        return {job_id: job for job_id, job in found if job is not None}

    def _ended_loans(self, resources: Resources, loaded: Loaded) -> dict[str, Loan]:
        unknown = set(unknown_loans(resources, loaded.snapshot))
        if not unknown:
            return {}
        return {loan.id: loan for loan in self._store.ended_loans(limit=ENDED_LOANS) if loan.id in unknown}
