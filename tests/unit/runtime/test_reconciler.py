"""A tick takes effect completely or not at all."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.domain.commands import Command, SubmitJob
from scheduler.domain.decisions import LendNode, ReturnNode
from scheduler.domain.events import EventCode
from scheduler.domain.fleet import DemandReading, Forecast, LoanState, NodeState
from scheduler.domain.job_state import JobState
from scheduler.domain.lending_policy import LendingPolicy
from scheduler.domain.observation import NodeFacts, Observation
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.tick_report import Breach, BreachKind, TickReport
from scheduler.executors.executor import RecordingExecutor
from scheduler.runtime.clock import ManualClock
from scheduler.runtime.reconciler import StageHook, ignore_stage, tick
from scheduler.scheduling.policy_sets import load_policy_set
from scheduler.store.memory_store import MemoryStore
from scheduler.store.protocol import Commit, ConflictError, FencedError, Page
from tests.builders import a_fleet, a_job, a_loan, a_snapshot, a_spec


class Rig:
    """A store with one node, a recording executor, and a clock at 100 s."""

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

    def tick(
        self,
        *,
        epoch: int | None = None,
        stage_hook: StageHook = ignore_stage,
        active_breaches: tuple[Breach, ...] = (),
    ) -> TickReport:
        epoch = self.epoch if epoch is None else epoch
        policies = load_policy_set("ebbtide")
        return tick(
            self.store,
            self.executor,
            self.clock,
            policies,
            epoch=epoch,
            active_breaches=active_breaches,
            stage_hook=stage_hook,
        )


def test_one_tick_starts_commits_and_converges_a_submitted_job() -> None:
    rig = Rig()
    rig.send("j")
    report = rig.tick()
    stored = rig.store.load()
    assert (report.committed, report.generation, stored.snapshot.generation) == (True, 4, 4)
    assert stored.snapshot.jobs["j"].state is JobState.STARTING
    assert stored.inbox == ()
    assert rig.executor.converged_snapshots == [stored.snapshot]


def test_tick_without_changes_converges_without_a_commit() -> None:
    rig = Rig()
    report = rig.tick()
    assert not report.committed
    assert rig.store.load().snapshot is rig.snapshot
    assert rig.executor.converged_snapshots == [rig.snapshot]


def test_conflict_writes_and_converges_nothing() -> None:
    rig = Rig()
    rig.send("j")

    def overtake(point: str) -> None:
        if point == "before-commit":
            before = rig.store.load().snapshot
            rig.store.commit(Commit(before, replace(before, generation=4), rig.epoch))

    with pytest.raises(ConflictError):
        rig.tick(stage_hook=overtake)
    stored = rig.store.load()
    assert (stored.snapshot.generation, dict(stored.snapshot.jobs), len(stored.inbox)) == (4, {}, 1)
    assert rig.executor.converged_snapshots == []
    assert rig.tick().committed


def test_fenced_leader_writes_and_converges_nothing() -> None:
    rig = Rig()
    rig.send("j")
    with pytest.raises(FencedError):
        rig.tick(epoch=rig.epoch + 1)
    assert rig.store.load().snapshot is rig.snapshot
    assert len(rig.store.load().inbox) == 1
    assert rig.executor.converged_snapshots == []


def test_breach_has_one_event_and_is_reported_while_it_lasts() -> None:
    rig = Rig()

    class NodeLost(RecordingExecutor):
        def observe(self) -> Observation:
            return replace(super().observe(), nodes={"t0": NodeFacts(up=False)})

    rig.executor = NodeLost(rig.snapshot)
    first = rig.tick()
    second = rig.tick(active_breaches=first.breaches)
    assert [breach.kind for breach in first.breaches] == [BreachKind.NODE_DOWN]
    assert [breach.kind for breach in second.breaches] == [BreachKind.NODE_DOWN]
    assert not second.committed
    codes = [stored.event.code for stored in rig.store.list_events(Page())]
    assert codes.count(EventCode.BREACH) == 1
    assert rig.store.load().snapshot.nodes["t0"].state is NodeState.DOWN


def test_time_of_the_snapshot_never_goes_back() -> None:
    rig = Rig(a_snapshot(a_fleet(training=1, inference=0), now_s=500.0, full_pass_at_s=490.0))
    rig.send("j")
    assert rig.tick().now_s == 500.0


def test_ended_jobs_move_to_history() -> None:
    ended = a_job("done", state=JobState.SUCCEEDED)
    rig = Rig(a_snapshot(a_fleet(training=1, inference=0), [ended]))
    rig.tick()
    assert dict(rig.store.load().snapshot.jobs) == {}
    assert rig.store.get_ended_job("done") == ended


def test_old_loan_of_a_node_lent_again_in_the_same_tick_is_in_history() -> None:
    fleet = a_fleet(training=0, inference=1, lending=LendingPolicy(headroom=0.0))
    home = a_loan("i0", LoanState.RECALLED, return_by_s=150.0)
    forecast = Forecast(100.0, 600.0, (0.999,), (0.0,), "scripted")
    demand = {"inference": DemandReading(100.0, 0.0, 0.0)}
    waits = a_job("waits", 8)
    inputs = {"demand": demand, "forecasts": {"inference": forecast}}
    rig = Rig(a_snapshot(fleet, [waits], [home], generation=3, now_s=100.0, **inputs))
    report = rig.tick()
    assert [type(decision) for decision in report.decisions] == [ReturnNode, LendNode]
    assert rig.store.load().snapshot.loans["i0"].state is LoanState.OFFERED
    assert [(loan.id, loan.state) for loan in rig.store.list_ended_loans(limit=9)] == [(home.id, LoanState.RETURNED)]


def test_stage_hook_is_called_at_every_point_in_order() -> None:
    rig, points = Rig(), list[str]()
    rig.send("j")
    rig.tick(stage_hook=points.append)
    assert points == [
        "before-observe", "after-load", "before-commit", "after-commit", "after-converge",
    ]  # fmt: skip


def test_every_stage_is_timed() -> None:
    rig = Rig()
    rig.send("j")
    assert set(rig.tick().stage_s) == {"observe", "load", "absorb", "decide", "apply", "commit", "converge"}
