"""A restore from an older backup while later generations run: real database and controller, simulated machines.

tests/e2e/test_restore.py does the same with real agents and ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from scheduler.domain.commands import AddNode, Command, CommandBody, CreatePool, ResumeJob, SubmitJob, SuspendJob
from scheduler.domain.fleet import Pool, PoolKind
from scheduler.domain.job import Job
from scheduler.domain.job_spec import JobSpec
from scheduler.domain.job_state import JobState
from scheduler.domain.observation import BegunRun
from scheduler.executors.simulated_executor import SimulatedExecutor
from scheduler.simulator.campaign.checks import CaseChecks
from scheduler.simulator.campaign.host import Host
from scheduler.store.backup import restore_backup, write_backup
from scheduler.store.schema_migration import GENERATION_LEAP, migrate
from scheduler.store.sql_store import SqlStore
from tests.builders import a_node
from tests.simulated_host import start_host

NODE = a_node("t0", gpus=4)
STEPS_MAX = 500


@dataclass(slots=True)
class Site:
    """One controller at a time on a database, and the machines, which a restore does not touch."""

    url: str
    world: SimulatedExecutor
    checks: CaseChecks
    store: SqlStore
    host: Host
    sent: int = 0

    def send(self, body: CommandBody) -> None:
        self.sent += 1
        self.store.send(Command(f"c{self.sent}", self.world.now_s, body, "ada"))

    def submit(self, name: str, gpus: int) -> None:
        self.send(SubmitJob(name, JobSpec(name, gpus, gpus, steps=1_000_000)))
        self.run_until(lambda: self.state(name) is JobState.RUNNING)

    def job(self, name: str) -> Job | None:
        return self.store.load().snapshot.jobs.get(name)

    def state(self, name: str) -> JobState | None:
        job = self.job(name)
        return None if job is None else job.state

    def run_until(self, is_done: Callable[[], bool]) -> None:
        for _ in range(STEPS_MAX):
            if is_done():
                return
            self.world.advance_to(max(self.world.now_s, min(self.world.now_s + 5.0, self.world.next_event_s())))
            self.host.step()
            self.checks.check_world(self.world, self.store.load().snapshot)
            if self.world.next_event_s() > self.world.now_s:
                self.world.advance_to(self.world.now_s + 1.0)
        pytest.fail(f"the condition did not come true in {STEPS_MAX} steps")

    def back_up(self, path: Path) -> None:
        """Back up the database. The simulated executor has no run log, so its runs are recorded as begun before."""
        lease = self.store.get_lease()
        assert lease is not None
        for run in self.world.list_live_runs():
            plan = self.store.load().snapshot.jobs[run.job_id].allocation.plan
            assert plan is not None
            begun = BegunRun(run.job_id, run.generation, run.gpus, (), self.world.now_s, {}, plan)
            self.store.run_log.begin_run(begun, epoch=lease.epoch)
        write_backup(self.url, path, files={}, now_s=self.world.now_s)

    def restore(self, path: Path) -> None:
        """End the controller, restore the database, and start a controller that knows nothing else."""
        self.store.close()
        restore_backup(path, self.url, now_s=self.world.now_s, is_forced=True)
        self.store = SqlStore(self.url)
        self.host = start_host(self.store, self.world, self.checks)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    migrate(url := f"sqlite:///{tmp_path / 'state.sqlite'}")
    world, checks = SimulatedExecutor([NODE]), CaseChecks()
    store = SqlStore(url)
    made = Site(url, world, checks, store, start_host(store, world, checks))
    made.send(CreatePool(Pool("training", PoolKind.TRAINING)))
    made.send(AddNode(NODE))
    yield made
    made.store.close()


def test_restore_keeps_known_runs_and_never_runs_a_job_or_a_gpu_twice(site: Site, tmp_path: Path) -> None:
    site.submit("steady", 2)
    site.submit("moved", 1)
    site.back_up(tmp_path / "backup")
    site.send(SuspendJob("moved"))
    site.run_until(lambda: site.state("moved") is JobState.SUSPENDED)
    site.submit("later", 1)
    site.send(ResumeJob("moved"))
    site.run_until(lambda: site.state("moved") is JobState.RUNNING)
    (lost,) = [run for run in site.world.list_live_runs() if run.job_id == "moved"]

    site.restore(tmp_path / "backup")
    site.submit("waiting", 1)
    site.run_until(lambda: site.state("moved") is JobState.RUNNING)

    steady, moved = site.job("steady"), site.job("moved")
    assert steady is not None
    assert moved is not None
    assert (steady.state, steady.allocation.generation) == (JobState.RUNNING, 1)
    assert moved.allocation.generation > GENERATION_LEAP > lost.generation
    assert moved.account.failures == 0
    assert sorted(run.job_id for run in site.world.list_live_runs()) == ["moved", "steady", "waiting"]
    assert site.checks.violations == ()
