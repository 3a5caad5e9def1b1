"""Nodes that go out and come home."""

from __future__ import annotations

from dataclasses import replace

from scheduler.domain.decisions import CancelRecall, Decision, LendNode, ReasonCode, RecallNode, ReturnNode
from scheduler.domain.fleet import DemandReading, Forecast, LendingPolicy, Loan, LoanState
from scheduler.domain.job import Job
from scheduler.domain.job_state import JobState
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling.policies.policy_set import load_policy_set
from scheduler.scheduling.scheduler import decide
from tests.builders import a_fleet, a_job, a_loan, a_snapshot

EIGHT = (0, 1, 2, 3, 4, 5, 6, 7)
NOW_S = 1000.0


def world(
    needs: float, loans: list[Loan], jobs: list[Job], *, made_at_s: float = NOW_S, inference: int = 3
) -> Snapshot:
    fleet = a_fleet(training=1, inference=inference, lending=LendingPolicy(headroom=0.0))
    return a_snapshot(
        fleet,
        jobs,
        loans,
        now_s=NOW_S,
        demand={"inference": DemandReading(NOW_S, needs, needs)},
        forecasts={"inference": Forecast(made_at_s, 600.0, (0.999,), (needs,), "scripted")},
    )


def node_decisions(snapshot: Snapshot) -> list[Decision]:
    kinds = (LendNode, RecallNode, CancelRecall, ReturnNode)
    return [d for d in decide(snapshot, load_policy_set("ebbtide")).decisions if isinstance(d, kinds)]


def on_its_way(since_s: float) -> Loan:
    return replace(a_loan("i0", LoanState.RECALLED, return_by_s=NOW_S + 100.0), state_since_s=since_s)


LEAVING = a_job("leaving", 8, state=JobState.PREEMPTED, releasing={"i0": EIGHT})


def test_a_recall_is_cancelled_by_a_newer_forecast_while_training_is_still_there() -> None:
    assert [type(d) for d in node_decisions(world(16.0, [on_its_way(NOW_S - 50)], [LEAVING]))] == [CancelRecall]


def test_a_recall_outlives_a_demand_that_swings_back_before_there_is_a_new_forecast() -> None:
    assert node_decisions(world(16.0, [on_its_way(NOW_S - 50)], [LEAVING], made_at_s=NOW_S - 60)) == []


def test_a_node_on_its_way_home_counts_as_lent_until_it_is_there() -> None:
    before = world(16.0, [on_its_way(NOW_S)], [LEAVING, a_job("waits", 8)])
    assert [type(d) for d in node_decisions(before)] == []
    after = replace(before, loans={})
    assert [type(d) for d in node_decisions(after)] == [LendNode]


def test_a_recalled_node_that_training_has_left_is_home_at_once() -> None:
    decisions = node_decisions(world(24.0, [on_its_way(NOW_S)], []))
    assert [(type(d), d.reason.code) for d in decisions] == [(ReturnNode, ReasonCode.TRAINING_LEFT)]


def test_a_lent_node_that_is_drained_goes_home_and_is_not_lent_again() -> None:
    snapshot = world(0.0, [a_loan("i0"), a_loan("i1", LoanState.OFFERED)], [], inference=2)
    drained = {
        name: replace(node, cordoned=True, draining=True) if name in ("i0", "i1") else node
        for name, node in snapshot.nodes.items()
    }
    decisions = node_decisions(replace(snapshot, nodes=drained))
    assert [(type(d), d.reason.code) for d in decisions] == [
        (RecallNode, ReasonCode.NODE_DRAINED),
        (ReturnNode, ReasonCode.NODE_DRAINED),
    ]
    recalled = a_loan("i0", LoanState.RECALLED, return_by_s=NOW_S + 300)
    held = a_job("held", 8, state=JobState.PREEMPTED, releasing={"i0": EIGHT})
    assert node_decisions(replace(snapshot, nodes=drained, loans={"i0": recalled}, jobs={"held": held})) == []


def an_offer(offered_at_s: float) -> Loan:
    return replace(a_loan("i0", LoanState.OFFERED), offered_at_s=offered_at_s, state_since_s=offered_at_s)


def stuck(offered_at_s: float, *, full_pass_at_s: float = NOW_S) -> Snapshot:
    """Node i0 is on offer, and inference holds 4 GPUs of it; a job waits for any node."""
    snapshot = world(4.0, [an_offer(offered_at_s)], [a_job("waits", 8, state=JobState.QUEUED)], inference=1)
    node = replace(snapshot.nodes["i0"], inference_gpus=4)
    training = replace(snapshot.nodes["t0"], cordoned=True)
    demand = {"inference": DemandReading(NOW_S, 0.0, 0.0)}
    forecasts = {"inference": Forecast(NOW_S, 600.0, (0.999,), (0.0,), "scripted")}
    return replace(
        snapshot,
        nodes={"i0": node, "t0": training},
        demand=demand,
        forecasts=forecasts,
        full_pass_at_s=full_pass_at_s,
    )


def test_an_offer_that_inference_cannot_leave_within_the_return_deadline_is_given_up() -> None:
    assert node_decisions(stuck(NOW_S - 299.0)) == []
    (given_up,) = node_decisions(stuck(NOW_S - 300.0))
    assert isinstance(given_up, ReturnNode)
    assert given_up.reason.code is ReasonCode.OFFER_EXPIRED
    assert given_up.reason.detail == "inference still holds 4 GPUs of i0, 300 s after it was offered to training"


def test_the_end_of_an_offer_is_waited_for() -> None:
    assert decide(stuck(NOW_S - 299.0), load_policy_set("ebbtide")).next_wake_s == NOW_S + 1.0


def test_a_node_whose_offer_was_given_up_is_offered_again_at_the_next_full_pass_and_no_sooner() -> None:
    at_a_full_pass = stuck(NOW_S - 300.0, full_pass_at_s=NOW_S - 400.0)
    assert [type(d) for d in node_decisions(at_a_full_pass)] == [ReturnNode]
    given_up = replace(at_a_full_pass, loans={})
    assert node_decisions(replace(given_up, full_pass_at_s=NOW_S)) == []
    assert [type(d) for d in node_decisions(given_up)] == [LendNode]


def test_without_a_demand_reading_every_loan_goes_home() -> None:
    snapshot = replace(world(0.0, [a_loan("i0"), a_loan("i1")], []), demand={})
    assert [type(d) for d in node_decisions(snapshot)] == [RecallNode, RecallNode]


def test_a_missing_forecast_lends_nothing_new_and_keeps_what_is_out() -> None:
    snapshot = replace(world(0.0, [a_loan("i0")], []), forecasts={})
    assert node_decisions(snapshot) == []


def test_demand_that_comes_within_the_shortest_loan_worth_making_keeps_a_node_home_and_recalls_none() -> None:
    waits = a_job("waits", 8)
    snapshot = world(0.0, [a_loan("i0")], [waits, a_job("too", 8)], inference=2)
    assert [type(d) for d in node_decisions(snapshot)] == [LendNode]
    soon = snapshot.forecasts["inference"]
    later = {"inference": soon.with_min_loan_forecast(replace(soon, gpus=(16.0,)))}
    assert node_decisions(replace(snapshot, forecasts=later)) == []
