"""One tick: all of it or nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.domain.commands import Command, SubmitJob
from scheduler.domain.decisions import LendNode, ReturnNode
from scheduler.domain.events import EventCode
from scheduler.domain.fleet import DemandReading, Forecast, LendingPolicy, LoanState, NodeState
from scheduler.domain.job_state import JobState
from scheduler.domain.observation import NodeFacts, Observation
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.tick_report import Breach, BreachKind, TickReport
from scheduler.executors.executor import RecordingExecutor
from scheduler.runtime.clock import ManualClock
from scheduler.runtime.reconciler import tick
from scheduler.scheduling.policies.policy_set import load_policy_set
from scheduler.store.memory_store import MemoryStore
from scheduler.store.protocol import Commit, ConflictError, FencedError, Page
from tests.builders import a_fleet, a_job, a_loan, a_snapshot, a_spec


class Rig:
    """A store with a fleet of one node, a recording executor, and a clock that stands at 100 s."""

    def __init__(self, snapshot: Snapshot | None = None) -> None:
        self.snapshot = snapshot or a_snapshot(a_fleet(training=1, inference=0), generation=3, full_pass_at_s=90.0)
        self.store = MemoryStore(self.snapshot)
        self.executor = RecordingExecutor(self.snapshot)
        self.clock = ManualClock(100.0)
        lease = self.store.acquire_lease("rig", now_s=0.0, ttl_s=1e9)
        assert lease is not None
        self.epoch = lease.epoch

    def send(self, job_id: str) -> None:
        self.store.send(Command(f"submit-{job_id}", 100.0, SubmitJob(job_id, a_spec(2))))

    def tick(self, *, epoch: int | None = None, at: object = None, standing: tuple[Breach, ...] = ()) -> TickReport:
        hook = at if callable(at) else lambda point: None
        epoch = self.epoch if epoch is None else epoch
        policies = load_policy_set("ebbtide")
        return tick(
            self.store, self.executor, self.clock, policies, epoch=epoch, active_breaches=standing, stage_hook=hook
        )


def test_a_submitted_job_is_started_committed_and_put_into_effect_in_one_tick() -> None:
    rig = Rig()
    rig.send("j")
    report = rig.tick()
    stored = rig.store.load()
    assert (report.committed, report.generation, stored.snapshot.generation) == (True, 4, 4)
    assert stored.snapshot.jobs["j"].state is JobState.STARTING
    assert stored.inbox == ()
    assert rig.executor.converged_snapshots == [stored.snapshot]


def test_a_tick_that_changes_nothing_commits_nothing_and_still_converges() -> None:
    rig = Rig()
    report = rig.tick()
    assert not report.committed
    assert rig.store.load().snapshot is rig.snapshot
    assert rig.executor.converged_snapshots == [rig.snapshot]


def test_on_a_conflict_nothing_is_written_and_nothing_put_into_effect() -> None:
    rig = Rig()
    rig.send("j")

    def overtake(point: str) -> None:
        if point == "before-commit":
            before = rig.store.load().snapshot
            rig.store.commit(Commit(before, replace(before, generation=4), rig.epoch))

    with pytest.raises(ConflictError):
        rig.tick(at=overtake)
    stored = rig.store.load()
    assert (stored.snapshot.generation, dict(stored.snapshot.jobs), len(stored.inbox)) == (4, {}, 1)
    assert rig.executor.converged_snapshots == []
    assert rig.tick().committed


def test_a_leader_whose_epoch_has_ended_writes_and_effects_nothing() -> None:
    rig = Rig()
    rig.send("j")
    with pytest.raises(FencedError):
        rig.tick(epoch=rig.epoch + 1)
    assert rig.store.load().snapshot is rig.snapshot
    assert len(rig.store.load().inbox) == 1
    assert rig.executor.converged_snapshots == []


def test_a_breach_is_told_once_and_reported_as_long_as_it_lasts() -> None:
    rig = Rig()

    class NodeLost(RecordingExecutor):
        def observe(self) -> Observation:
            return replace(super().observe(), nodes={"t0": NodeFacts(up=False)})

    rig.executor = NodeLost(rig.snapshot)
    first = rig.tick()
    second = rig.tick(standing=first.breaches)
    assert [breach.kind for breach in first.breaches] == [BreachKind.NODE_DOWN]
    assert [breach.kind for breach in second.breaches] == [BreachKind.NODE_DOWN]
    assert not second.committed
    told = [stored.event.code for stored in rig.store.list_events(Page())]
    assert told.count(EventCode.BREACH) == 1
    assert rig.store.load().snapshot.nodes["t0"].state is NodeState.DOWN


def test_a_clock_that_was_set_back_does_not_take_the_state_with_it() -> None:
    rig = Rig(a_snapshot(a_fleet(training=1, inference=0), now_s=500.0, full_pass_at_s=490.0))
    rig.send("j")
    assert rig.tick().now_s == 500.0


def test_ended_jobs_leave_the_snapshot_for_history() -> None:
    ended = a_job("done", state=JobState.SUCCEEDED)
    rig = Rig(a_snapshot(a_fleet(training=1, inference=0), [ended]))
    rig.tick()
    assert dict(rig.store.load().snapshot.jobs) == {}
    assert rig.store.get_ended_job("done") == ended


def test_a_node_that_comes_home_and_is_lent_anew_in_one_tick_leaves_its_old_loan_in_history() -> None:
    fleet = a_fleet(training=0, inference=1, lending=LendingPolicy(headroom=0.0))
    home = a_loan("i0", LoanState.RECALLED, return_by_s=150.0)
    forecast = Forecast(100.0, 600.0, (0.999,), (0.0,), "scripted")
    demand = {"inference": DemandReading(100.0, 0.0, 0.0)}
    waits = a_job("waits", 8)
    told = {"demand": demand, "forecasts": {"inference": forecast}}
    rig = Rig(a_snapshot(fleet, [waits], [home], generation=3, now_s=100.0, **told))
    report = rig.tick()
    assert [type(decision) for decision in report.decisions] == [ReturnNode, LendNode]
    assert rig.store.load().snapshot.loans["i0"].state is LoanState.OFFERED
    assert [(loan.id, loan.state) for loan in rig.store.list_ended_loans(limit=9)] == [(home.id, LoanState.RETURNED)]


def test_the_hook_is_called_at_every_named_point_in_order() -> None:
    rig, points = Rig(), list[str]()
    rig.send("j")
    rig.tick(at=points.append)
    assert points == [
        "before-observe", "after-load", "before-commit", "after-commit", "after-converge",
    ]  # fmt: skip


def test_every_stage_is_timed() -> None:
    rig = Rig()
    rig.send("j")
    assert set(rig.tick().stage_s) == {"observe", "load", "absorb", "decide", "apply", "commit", "converge"}
