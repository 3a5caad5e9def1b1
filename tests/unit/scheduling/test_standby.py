"""Standby replicas in decisions: failures, the time until the next attempt, memory, and measured wakes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.domain.decisions import Decision, LendNode, Reason, ReasonCode, ReturnNode, StartJob
from scheduler.domain.events import EventCode
from scheduler.domain.fleet import DemandReading, Forecast, LoanState
from scheduler.domain.hardware import collect_fleet_hardware
from scheduler.domain.lending_policy import LendingPolicy
from scheduler.domain.observation import NodeFacts, Observation, ReplicaStart, StandbyFacts
from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.domain.return_times import ReturnTimes
from scheduler.domain.scaling_curve import build_data_parallel_plan
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.standby import RETRY_S, Standby, StandbyPhase, StandbyState, advance_standby
from scheduler.domain.tick_report import BreachKind, Invariant
from scheduler.scheduling.legality import find_breaches, find_violation
from scheduler.scheduling.mutable_snapshot import MutableSnapshot
from scheduler.scheduling.policies.way_back import measure_way_back
from scheduler.scheduling.policy_sets import load_policy_set
from scheduler.scheduling.scheduler import decide
from scheduler.scheduling.snapshot_update import SnapshotUpdate, update_snapshot
from tests.builders import GPU, a_fleet, a_job, a_loan, a_snapshot

NOW_S = 1000.0
WHY = Reason(ReasonCode.FIRST_IN_ORDER, "first")
STANDBY = Standby("serving", {"app": "llm"}, gpu_memory_bytes=4 * 2**30, wake_s=12.0)
RULES = LendingPolicy(headroom=0.0, return_deadline_s=60.0, cold_start_s=300.0, standby=STANDBY)


def world(*loans: Any, standby: StandbyState | None = None, **changes: Any) -> Snapshot:
    """One node that inference does not need and that a job wants."""
    snapshot = a_snapshot(
        a_fleet(training=0, inference=1, lending=RULES),
        (a_job("waits", 8),),
        loans,
        now_s=NOW_S,
        demand={"inference": DemandReading(NOW_S, 0.0, 0.0)},
        forecasts={"inference": Forecast(NOW_S, 72.0, (0.999,), (0.0,), "scripted")},
        **changes,
    )
    return replace(snapshot, nodes={"i0": replace(snapshot.nodes["i0"], standby=standby)})


def observe(snapshot: Snapshot, phase: StandbyPhase | None, detail: str = "", **facts: Any) -> SnapshotUpdate:
    node = NodeFacts(standby=StandbyFacts(phase, detail, **facts), inference_gpus=1)
    return update_snapshot(snapshot, Observation(snapshot.now_s, 0, (), {"i0": node}), ())


def node_decisions(snapshot: Snapshot) -> list[Decision]:
    return [each for each in decide(snapshot, load_policy_set("ebbtide")).decisions if hasattr(each, "node")]


def test_node_is_lent_while_its_replicas_are_awake() -> None:
    assert [type(each) for each in node_decisions(world())] == [LendNode]
    awake = StandbyState(StandbyPhase.AWAKE, 0.0)
    assert [type(each) for each in node_decisions(world(standby=awake))] == [LendNode]


@pytest.mark.parametrize("phase", [StandbyPhase.ABSENT, StandbyPhase.SLEEP_FAILED])
def test_offer_is_withdrawn_when_no_replica_sleeps_and_repeated_after_a_pause(phase: StandbyPhase) -> None:
    found = observe(world(a_loan("i0", LoanState.OFFERED)), phase, "it is still awake")
    (withdrawn,) = node_decisions(found.snapshot)
    assert isinstance(withdrawn, ReturnNode)
    assert withdrawn.reason.code is ReasonCode.STANDBY_FAILED
    assert "it is still awake" in withdrawn.reason.detail
    returned = observe(replace(found.snapshot, loans={}, now_s=NOW_S + 1), StandbyPhase.AWAKE).snapshot
    fresh = replace(returned.demand["inference"], at_s=NOW_S + RETRY_S)
    again = replace(returned, demand={"inference": fresh})
    assert bool(node_decisions(again)) is (phase is StandbyPhase.ABSENT)
    assert [type(each) for each in node_decisions(replace(again, now_s=NOW_S + RETRY_S))] == [LendNode]


def test_changes_are_events_and_unknown_states_keep_the_known_one() -> None:
    asleep = world(a_loan("i0"), standby=StandbyState(StandbyPhase.ASLEEP, 0.0))
    unchanged = observe(asleep, None)
    assert (unchanged.snapshot.nodes["i0"].standby, unchanged.events) == (asleep.nodes["i0"].standby, ())
    failed = observe(asleep, StandbyPhase.WAKE_FAILED, "it does not answer")
    (event,) = [each for each in failed.events if each.code is EventCode.STANDBY_CHANGED]
    assert (event.subject, event.cause) == ("i0", "wake_failed")
    assert "it does not answer" in event.message
    gone = update_snapshot(failed.snapshot, Observation(NOW_S, 0, (), {"i0": NodeFacts(inference_gpus=1)}), ())
    assert gone.snapshot.nodes["i0"].standby is None


def test_replica_that_does_not_wake_is_a_breach_until_it_does() -> None:
    failed = observe(world(), StandbyPhase.WAKE_FAILED, "it does not answer").snapshot
    assert not node_decisions(failed)
    (breach,) = find_breaches(failed, Observation(NOW_S, 0))
    assert (breach.kind, breach.subject) == (BreachKind.REPLICA_NOT_AWAKE, "i0")
    assert find_breaches(observe(failed, StandbyPhase.AWAKE).snapshot, Observation(NOW_S, 0)) == ()


def test_wakes_are_measured_once_each_and_decide_the_way_back() -> None:
    snapshot = world()
    way = measure_way_back(snapshot, snapshot.pools["inference"])
    assert (way.start_s, way.horizon_s) == (12.0, 72.0)
    for at in range(30):
        wake = ReplicaStart(NOW_S + at // 2, 7.0 + at // 2)
        snapshot = observe(replace(snapshot, now_s=NOW_S + at), StandbyPhase.AWAKE, wake=wake).snapshot
    assert snapshot.return_times["inference"].wake_times_s == tuple(7.0 + at for at in range(15))
    cold = ReturnTimes(start_times_s=(400.0,) * 30, wake_times_s=(5.0,) * 30)
    measured = replace(snapshot, return_times={"inference": cold})
    assert measure_way_back(measured, snapshot.pools["inference"]).start_s == 5.0
    plain = replace(snapshot.pools["inference"], lending=replace(RULES, standby=None))
    assert measure_way_back(measured, plain).start_s == 400.0


def test_plans_on_lent_nodes_leave_the_kept_memory() -> None:
    snapshot = world(a_loan("i0"), standby=StandbyState(StandbyPhase.ASLEEP, 0.0))
    for peak_bytes, law in ((76 * 2**30, None), (76 * 2**30 + 1, Invariant.PEAK_MEMORY_EXCEEDED)):
        plan = replace(build_data_parallel_plan(GPU, 8), peak_bytes_per_gpu=peak_bytes)
        violation = find_violation(MutableSnapshot(snapshot), StartJob("waits", {"i0": tuple(range(8))}, plan, WHY))
        assert (violation.invariant if violation else None) is law
        assert find_kept_memory_law(snapshot, plan, (0, 3)) is law
        assert find_kept_memory_law(snapshot, plan, (0,)) is None, "the job does not use this GPU"
    hardware = collect_fleet_hardware({}, snapshot.pools, snapshot.nodes.values())
    assert hardware.kept_bytes == {GPU: 4 * 2**30}
    plain = replace(snapshot.pools["inference"], lending=replace(RULES, standby=None))
    without = collect_fleet_hardware({}, {"inference": plain}, snapshot.nodes.values())
    assert (without.kept_bytes, without.digests) == ({}, {})
    assert hardware.digests.keys() == {GPU}


def find_kept_memory_law(snapshot: Snapshot, plan: ParallelPlan, gpus: tuple[int, ...]) -> Invariant | None:
    """Return the memory rule that the plan breaks on GPUs 2 to 7 of the node, if its replica uses only `gpus`."""
    standby = Standby(url="http://{node}:8000", gpu_memory_bytes=STANDBY.gpu_memory_bytes, gpus=gpus)
    pools = {"inference": replace(snapshot.pools["inference"], lending=replace(RULES, standby=standby))}
    job = a_job("waits", 6)
    snapshot = replace(snapshot, pools=pools, jobs={job.id: job})
    plan = replace(build_data_parallel_plan(GPU, 6), peak_bytes_per_gpu=plan.peak_bytes_per_gpu)
    violation = find_violation(MutableSnapshot(snapshot), StartJob("waits", {"i0": tuple(range(2, 8))}, plan, WHY))
    return violation.invariant if violation else None


def test_pool_that_states_more_than_a_gpu_has_limits_no_plan() -> None:
    snapshot = world()
    greedy = replace(STANDBY, gpu_memory_bytes=snapshot.nodes["i0"].gpu_memory_bytes)
    pools = {"inference": replace(snapshot.pools["inference"], lending=replace(RULES, standby=greedy))}
    assert collect_fleet_hardware({}, pools, snapshot.nodes.values()).kept_bytes == {}


_OBSERVED = st.lists(
    st.tuples(st.sampled_from(StandbyPhase), st.sampled_from(["", "no answer"]), st.floats(0.0, 2 * RETRY_S)),
    max_size=20,
)


@given(_OBSERVED)
def test_failed_sleep_delays_the_next_loan_until_a_replica_sleeps(
    observed: list[tuple[StandbyPhase, str, float]],
) -> None:
    state, now_s, failed_at_s = StandbyState(StandbyPhase.AWAKE, 0.0), 0.0, -RETRY_S
    for phase, detail, pause_s in observed:
        now_s += pause_s
        before, state = state, advance_standby(state, phase, detail or phase.value, now_s)
        if phase is StandbyPhase.SLEEP_FAILED and before.phase is not phase:
            failed_at_s = now_s
        if phase is StandbyPhase.ASLEEP:
            failed_at_s = -RETRY_S
        is_blocked = phase in (StandbyPhase.ABSENT, StandbyPhase.WAKE_FAILED) or now_s < failed_at_s + RETRY_S
        assert bool(state.find_loan_obstacle(now_s)) is is_blocked
        assert state.phase is phase
        assert state.since_s <= now_s
