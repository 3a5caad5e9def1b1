"""The engine: when it ticks, when it stops, and what it survives."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.documents.simulation import ClusterQueueDocument
from scheduler.documents.trace_files import DemandRow, JobRow
from scheduler.domain.job_queue import JobQueue
from scheduler.domain.job_state import JobState
from scheduler.scheduling.policies.policy_set import load_policy_set
from scheduler.simulator import engine
from scheduler.simulator.demand import DemandChange, LookaheadIterator
from scheduler.simulator.engine import LivelockError, Scenario, Simulation, TickRecord
from scheduler.simulator.fault_injection import LossyStore, NoFaults
from scheduler.simulator.simulate import build_scenario
from scheduler.simulator.throughput_curves import CurveCache
from scheduler.store.protocol import Store
from tests.simulation.synthetic import small_cluster

FIFO = load_policy_set("fifo")


class Times:
    """Notes when ticks happened."""

    def __init__(self) -> None:
        self.at_s: list[float] = []

    def on_tick(self, tick: TickRecord) -> None:
        self.at_s.append(tick.report.now_s)

    def on_demand_change(self, change: DemandChange) -> None:
        """Not of interest."""


def a_world(*jobs: JobRow) -> Scenario:
    demand = [DemandRow(2, 0.0, "inference", 8.0, is_load=False)]
    return build_scenario(jobs, demand, small_cluster(training=1, inference=1), FIFO, seed=0, curves=CurveCache())


def test_everything_that_falls_on_one_instant_costs_one_tick() -> None:
    times = Times()
    jobs = [JobRow(at, f"job-{at}", 1000.0, 50.0, 1) for at in range(5)]
    Simulation(a_world(*jobs), FIFO, observers=[times]).run()
    assert times.at_s.count(1000.0) <= 2
    assert times.at_s.count(1050.0) <= 3, "ended, and seen free"
    assert set(times.at_s) == {1000.0, 1050.0}, "and nothing happens in between"


def test_queues_of_the_cluster_are_declared_before_the_first_job() -> None:
    cluster = small_cluster(training=1, inference=1).model_copy(
        update={"queues": [ClusterQueueDocument(name="q", limit_gpus=4)]}
    )
    demand = [DemandRow(2, 0.0, "inference", 8.0, is_load=False)]
    job = JobRow(2, "a", 0.0, 50.0, 1, queue="q")
    world = build_scenario([job], demand, cluster, FIFO, seed=0, curves=CurveCache())
    assert Simulation(world, FIFO).run().queues == {"q": JobQueue("q", limit_gpus=4)}


def test_a_simulation_begins_with_the_first_submission_and_the_demand_of_that_time() -> None:
    times = Times()
    simulation = Simulation(a_world(JobRow(2, "a", 90_000.0, 50.0, 1)), FIFO, observers=[times])
    last = simulation.run()
    assert times.at_s[0] == 90_000.0
    assert last.demand["inference"].gpus > 0.0


def test_a_job_that_can_never_run_does_not_keep_the_simulation_going(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "GIVEN_UP_AFTER_S", 7200.0)
    world = a_world(JobRow(2, "a", 0.0, 50.0, 8))
    (submission,) = world.submissions
    spec = replace(submission.spec, min_gpus=99, max_gpus=99)
    simulation = Simulation(replace(world, submissions=(replace(submission, spec=spec),)), FIFO)
    last = simulation.run()
    assert [job.state for job in last.jobs.values()] == [JobState.QUEUED]
    assert 7200.0 < last.now_s < 9000.0


class EverConflicting(NoFaults):
    """A rival that always commits first."""

    def wrap_store(self, store: Store) -> Store:
        lossy = LossyStore(store)
        lossy.armed_conflicts = 10**9
        return lossy


def test_a_loop_that_never_gets_on_is_a_bug_and_said_to_be_one() -> None:
    with pytest.raises(LivelockError, match=r"ticks at 0\.0 s"):
        Simulation(a_world(JobRow(2, "a", 0.0, 50.0, 1)), FIFO, faults=EverConflicting()).run()


def test_pending_items_are_taken_in_order_and_then_there_are_none() -> None:
    pending = LookaheadIterator(iter([1.0, 2.0]), lambda item: item)
    assert (pending.next_at_s, pending.take(), pending.next_at_s, pending.take()) == (1.0, 1.0, 2.0, 2.0)
    assert (pending.next_at_s, pending.taken_count) == (float("inf"), 2)
    with pytest.raises(IndexError, match="nothing is left"):
        pending.take()
