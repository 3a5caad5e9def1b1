"""The simulation engine: when it ticks and when it ends."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.documents.simulation import ClusterQueueDocument
from scheduler.documents.trace_files import DemandRow, JobRow
from scheduler.domain.job_queue import JobQueue
from scheduler.domain.job_state import JobState
from scheduler.scheduling.policy_sets import load_policy_set
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
    """Records the times of ticks."""

    def __init__(self) -> None:
        self.at_s: list[float] = []

    def on_tick(self, tick: TickRecord) -> None:
        self.at_s.append(tick.report.now_s)

    def on_demand_change(self, change: DemandChange) -> None:
        """Ignore demand."""


def make_scenario(*jobs: JobRow) -> Scenario:
    demand = [DemandRow(2, 0.0, "inference", 8.0, is_load=False)]
    return build_scenario(jobs, demand, small_cluster(training=1, inference=1), FIFO, seed=0, curves=CurveCache())


def test_events_at_one_instant_share_a_tick() -> None:
    times = Times()
    jobs = [JobRow(at, f"job-{at}", 1000.0, 50.0, 1) for at in range(5)]
    Simulation(make_scenario(*jobs), FIFO, observers=[times]).run()
    assert times.at_s.count(1000.0) <= 2
    assert times.at_s.count(1050.0) <= 3, "ended, and seen free"
    assert set(times.at_s) == {1000.0, 1050.0}, "and nothing happens in between"


def test_queues_are_created_before_the_first_job() -> None:
    cluster = small_cluster(training=1, inference=1).model_copy(
        update={"queues": [ClusterQueueDocument(name="q", limit_gpus=4)]}
    )
    demand = [DemandRow(2, 0.0, "inference", 8.0, is_load=False)]
    job = JobRow(2, "a", 0.0, 50.0, 1, queue="q")
    scenario = build_scenario([job], demand, cluster, FIFO, seed=0, curves=CurveCache())
    assert Simulation(scenario, FIFO).run().queues == {"q": JobQueue("q", limit_gpus=4)}


def test_simulation_starts_at_the_first_submission_with_its_demand() -> None:
    times = Times()
    simulation = Simulation(make_scenario(JobRow(2, "a", 90_000.0, 50.0, 1)), FIFO, observers=[times])
    last = simulation.run()
    assert times.at_s[0] == 90_000.0
    assert last.demand["inference"].gpus > 0.0


def test_simulation_ends_although_a_job_can_never_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "STALL_LIMIT_S", 7200.0)
    scenario = make_scenario(JobRow(2, "a", 0.0, 50.0, 8))
    (submission,) = scenario.submissions
    spec = replace(submission.spec, min_gpus=99, max_gpus=99)
    simulation = Simulation(replace(scenario, submissions=(replace(submission, spec=spec),)), FIFO)
    last = simulation.run()
    assert [job.state for job in last.jobs.values()] == [JobState.QUEUED]
    assert 7200.0 < last.now_s < 9000.0


class AlwaysConflicting(NoFaults):
    """Another controller always commits first."""

    def wrap_store(self, store: Store) -> Store:
        lossy = LossyStore(store)
        lossy.armed_conflicts = 10**9
        return lossy


def test_endless_ticks_at_one_instant_raise_an_error() -> None:
    with pytest.raises(LivelockError, match=r"ticks at 0\.0 s"):
        Simulation(make_scenario(JobRow(2, "a", 0.0, 50.0, 1)), FIFO, faults=AlwaysConflicting()).run()


def test_lookahead_iterator_returns_items_in_order() -> None:
    items = LookaheadIterator(iter([1.0, 2.0]), lambda item: item)
    assert (items.next_at_s, items.take(), items.next_at_s, items.take()) == (1.0, 1.0, 2.0, 2.0)
    assert (items.next_at_s, items.taken_count) == (float("inf"), 2)
    with pytest.raises(IndexError, match="no items are left"):
        items.take()
