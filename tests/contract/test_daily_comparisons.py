"""Daily comparisons: one a day by the leader alone, whatever ends in between, with real processes and without."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from scheduler.domain.fleet import PoolKind
from scheduler.domain.job import Job
from scheduler.domain.job_account import JobAccount
from scheduler.domain.job_state import JobState
from scheduler.domain.savings_comparison import (
    COMPARED_POLICIES,
    DAY_S,
    ComparisonState,
    DailyComparison,
    find_day,
)
from scheduler.domain.simulation_task import SimulationFiles, SimulationTask, TaskState
from scheduler.runtime.clock import ManualClock, RealClock
from scheduler.simulator.daily_comparison import (
    FIRST_AFTER_S,
    PREPARATION_S_MAX,
    ComparisonPreparation,
    DailyComparisons,
    load_recorded_period,
    prepare_comparison,
)
from scheduler.simulator.simulation_runner import RunnerLimits, SimulationRunner
from scheduler.store.api_protocol import HistoryLog
from scheduler.store.protocol import Commit, FencedError, UnavailableError
from scheduler.store.schema_migration import migrate
from scheduler.store.sql_store import SqlStore
from tests.builders import a_fleet, a_job
from tests.webhook_receiver import wait_for

NOW_S = 20_400 * 86_400.0 + 3600.0
FILES = SimulationFiles("job_id\n", "", "pools: []\n")


@pytest.fixture
def url(tmp_path: Path) -> str:
    made = f"sqlite:///{tmp_path / 'state.sqlite'}"
    migrate(made)
    return made


@pytest.fixture
def store(url: str) -> Iterator[SqlStore]:
    opened = SqlStore(url)
    yield opened
    opened.close()


class FakePreparation(ComparisonPreparation):
    """Returns results that a test sets, and queues a simulation of its own."""

    def __init__(self, store: SqlStore) -> None:
        super().__init__("")
        self.store = store
        self.result: str | Exception | None = ""
        self.polled: list[str] = []

    def poll(self, comparison: DailyComparison) -> str | None:
        self.polled.append(comparison.simulation_id)
        if isinstance(self.result, Exception):
            raise self.result
        if self.result == "":
            task = SimulationTask(comparison.simulation_id, "ebbtide", comparison.to_s, COMPARED_POLICIES, 0, 3)
            self.store.simulations.create(task, FILES)
        return self.result


class Leader:
    """A process with a lease, and the daily comparisons that it runs."""

    def __init__(
        self, store: SqlStore, *, policy: str = "ebbtide", holder: str = "a", url: str = "", begins: bool = True
    ) -> None:
        self.store, self.clock, self.outcomes = store, ManualClock(NOW_S), list[str]()
        self.preparation = FakePreparation(store)
        lease = store.acquire_lease(holder, now_s=NOW_S, ttl_s=1e9)
        self.epoch = 0 if lease is None else lease.epoch
        self.daily = DailyComparisons(
            store,
            ComparisonPreparation(url) if url else self.preparation,
            clock=self.clock,
            epoch=lambda: self.epoch,
            policy=policy,
            on_ended=self.outcomes.append,
            begins=begins,
        )

    def step(self, *, after_s: float = 0.0) -> None:
        self.clock.move_to(self.clock.now_s() + after_s)
        self.daily.step()

    def begin(self) -> None:
        """Lead for long enough to begin a comparison."""
        self.step()
        self.step(after_s=FIRST_AFTER_S)

    def has_queued(self) -> bool:
        self.step()
        return bool(self.store.simulations.list_tasks(limit=1))

    def has_ended(self) -> bool:
        self.step()
        return not self.store.comparisons.list_running()

    def list_days(self) -> list[DailyComparison]:
        return list(self.store.comparisons.list_days(from_s=0.0, to_s=1e12))


def record_jobs(store: SqlStore, *, at_s: float) -> None:
    """Commit a fleet, and three jobs that ran before `at_s`."""
    pools, nodes = a_fleet(training=1, inference=0)
    pools = {name: pool for name, pool in pools.items() if pool.kind is PoolKind.TRAINING}
    before = store.load().snapshot
    lease = store.get_lease()
    assert lease is not None
    snapshot = replace(before, generation=before.generation + 1, now_s=at_s, pools=pools, nodes=nodes)
    ended = tuple(make_ended_job(f"j{at}", at_s - 7200.0 * (at + 1)) for at in range(3))
    store.commit(Commit(before, snapshot, lease.epoch, ended_jobs=ended))


def make_ended_job(job_id: str, at_s: float) -> Job:
    job = a_job(job_id, 2, 4, state=JobState.SUCCEEDED, now_s=at_s)
    account = JobAccount(gpu_s=3600.0, first_started_at_s=at_s, settled_at_s=at_s + 1800.0)
    return replace(job, account=account, state_since_s=at_s + 1800.0)


def test_comparison_is_stored_for_its_day_and_fenced(database_url: str) -> None:
    store = SqlStore(database_url)
    lease = store.acquire_lease("a", now_s=0.0, ttl_s=10.0)
    assert lease is not None
    days = [DailyComparison(at * DAY_S, at * DAY_S + 1.0, ComparisonState.RUNNING, f"s{at}") for at in range(3)]
    for each in days:
        store.comparisons.put(each, epoch=lease.epoch)
    failed = replace(days[1], state=ComparisonState.FAILED, reason="why", ended_at_s=9.0)
    store.comparisons.put(failed, epoch=lease.epoch)
    with pytest.raises(FencedError):
        store.comparisons.put(days[1], epoch=lease.epoch + 1)
    assert store.comparisons.get(DAY_S) == failed
    assert store.comparisons.list_days(from_s=DAY_S, to_s=2 * DAY_S) == (failed,)
    assert store.comparisons.list_running() == (days[0], days[2])
    deleted = store.retention.delete_old_rows(
        HistoryLog.COMPARISONS, before_s=DAY_S + 1.0, rows_max=9, epoch=lease.epoch
    )
    assert (deleted.rows, store.comparisons.get(0), store.comparisons.get(DAY_S)) == (2, None, None)
    store.close()


def test_recorded_jobs_are_simulated_in_processes_and_the_result_is_stored(store: SqlStore, url: str) -> None:
    leader = Leader(store, url=url)
    record_jobs(store, at_s=NOW_S)
    leader.begin()
    wait_for(leader.has_queued)
    [running] = leader.list_days()
    assert running.state is ComparisonState.RUNNING
    limits = RunnerLimits(1, memory_bytes=4 * 2**30, cpu_s=600, retention_s=1e12, poll_s=0.05)
    runner, stop = SimulationRunner(store.simulations, limits, holder="runner", clock=RealClock()), threading.Event()
    thread = threading.Thread(target=runner.run, args=(stop,))
    thread.start()
    try:
        wait_for(leader.has_ended)
    finally:
        stop.set()
        thread.join()
    [day] = leader.list_days()
    assert (day.state, day.reason, leader.outcomes) == (ComparisonState.SUCCEEDED, "", ["succeeded"])
    assert [outcome.policy for outcome in day.outcomes] == list(COMPARED_POLICIES)
    assert {(outcome.jobs, outcome.completed) for outcome in day.outcomes} == {(3, 3)}
    leader.step(after_s=60.0)
    assert leader.list_days() == [day], "one comparison a day"


def test_input_depends_on_stored_data_only(store: SqlStore, url: str) -> None:
    leader = Leader(store)
    record_jobs(store, at_s=NOW_S)
    first = load_recorded_period(store, NOW_S)
    later = DailyComparison(find_day(NOW_S), NOW_S, ComparisonState.RUNNING, "sim-savings-test")
    store.commit(
        Commit(
            before := store.load().snapshot,
            replace(before, generation=before.generation + 1),
            leader.epoch,
            ended_jobs=(make_ended_job("later", NOW_S + 60.0),),
        )
    )
    for _ in range(2):
        assert prepare_comparison(url, later) == ""
    [task] = store.simulations.list_tasks(limit=9)
    assert store.simulations.get_files(task.id) == first.files


def test_nothing_is_compared_before_and_without_leading(store: SqlStore) -> None:
    leader = Leader(store)
    leader.step()
    leader.step(after_s=FIRST_AFTER_S - 1.0)
    assert leader.list_days() == []
    leader.epoch = 0
    leader.step(after_s=FIRST_AFTER_S)
    assert leader.list_days() == []
    leader.epoch = 1
    leader.step()
    assert leader.list_days() == [], "a process that leads again waits again"


@pytest.mark.parametrize(
    ("result", "state"), [("no job has run", ComparisonState.SKIPPED), (ValueError("bad"), ComparisonState.FAILED)]
)
def test_result_of_the_preparation_is_the_state_of_the_day(
    store: SqlStore, result: str | Exception, state: ComparisonState, caplog: pytest.LogCaptureFixture
) -> None:
    leader = Leader(store)
    leader.preparation.result = result
    with caplog.at_level(logging.WARNING):
        leader.begin()
    [day] = leader.list_days()
    assert (day.state, day.reason, day.ended_at_s) == (state, str(result), leader.clock.now_s())
    assert leader.outcomes == [state.value]
    assert bool(caplog.records) == (state is ComparisonState.FAILED)
    leader.step(after_s=3600.0)
    assert len(leader.preparation.polled) == 1


def test_other_policy_set_is_skipped(store: SqlStore) -> None:
    leader = Leader(store, policy="fifo")
    leader.begin()
    [day] = leader.list_days()
    assert (day.state, "fifo" in day.reason, leader.preparation.polled) == (ComparisonState.SKIPPED, True, [])


def test_outage_and_simulation_of_another_leader_are_no_failures(store: SqlStore) -> None:
    leader = Leader(store)
    leader.preparation.result = UnavailableError("the database does not respond")
    with pytest.raises(UnavailableError):
        leader.begin()
    [day] = leader.list_days()
    leader.preparation.result = ""
    leader.preparation.poll(day)
    leader.preparation.result = ValueError("the simulation exists")
    leader.step(after_s=30.0)
    assert leader.list_days() == [day]
    assert day.state is ComparisonState.RUNNING


def test_comparison_ends_although_no_more_are_begun(store: SqlStore) -> None:
    Leader(store).begin()
    [task] = store.simulations.list_tasks(limit=9)
    leader = Leader(store, begins=False)
    store.simulations.cancel(task.id, now_s=NOW_S)
    leader.step(after_s=2.0 * DAY_S)
    assert [day.state for day in leader.list_days()] == [ComparisonState.FAILED]


def test_slow_preparation_fails(store: SqlStore) -> None:
    leader = Leader(store)
    leader.preparation.result = None
    leader.begin()
    leader.step(after_s=PREPARATION_S_MAX - 1.0)
    assert leader.list_days()[0].state is ComparisonState.RUNNING
    leader.step(after_s=1.0)
    assert leader.list_days()[0].state is ComparisonState.FAILED


def test_failed_and_cancelled_simulations_fail_the_day(store: SqlStore) -> None:
    leader = Leader(store)
    leader.begin()
    [task] = store.simulations.list_tasks(limit=9)
    store.simulations.claim("runner", now_s=NOW_S, until_s=1e12)
    store.simulations.fail(task.id, "runner", now_s=NOW_S, reason="out of memory", tries=1)
    leader.step(after_s=60.0)
    assert [(day.state, day.reason) for day in leader.list_days()] == [(ComparisonState.FAILED, "out of memory")]
    leader.step(after_s=float(DAY_S))
    second = store.simulations.list_tasks(limit=1)[0]
    assert second.id != task.id
    store.simulations.cancel(second.id, now_s=leader.clock.now_s())
    leader.step(after_s=60.0)
    assert [day.state for day in leader.list_days()] == [ComparisonState.FAILED] * 2
    assert leader.outcomes == ["failed", "failed"]


def test_simulation_that_nothing_runs_fails_after_a_day(store: SqlStore) -> None:
    leader = Leader(store)
    leader.begin()
    leader.step(after_s=DAY_S - 1.0)
    leader.step(after_s=1.0)
    first, second = leader.list_days()
    assert (first.state, second.state) == (ComparisonState.FAILED, ComparisonState.RUNNING)
    task = store.simulations.get_task(first.simulation_id)
    assert task is not None
    assert task.state is TaskState.CANCELLED


def test_new_leader_goes_on_and_the_old_one_is_fenced(store: SqlStore) -> None:
    old = Leader(store)
    old.preparation.result = None
    old.begin()
    store.release_lease("a")
    new = Leader(store, holder="b")
    assert new.epoch > old.epoch
    new.step()
    [task] = store.simulations.list_tasks(limit=9)
    old.preparation.result = ValueError("too late")
    old.step()
    [day] = new.list_days()
    assert (day.state, day.simulation_id, old.outcomes) == (ComparisonState.RUNNING, task.id, [])
