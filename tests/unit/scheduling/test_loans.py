"""Loans: offers, recalls and returns of nodes."""

from __future__ import annotations

from dataclasses import replace

from scheduler.domain.decisions import CancelRecall, Decision, LendNode, ReasonCode, RecallNode, ReturnNode
from scheduler.domain.fleet import DemandReading, Forecast, Loan, LoanState
from scheduler.domain.job import Job
from scheduler.domain.job_state import JobState
from scheduler.domain.lending_policy import LendingPolicy
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling.policy_sets import load_policy_set
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


def recalled_world(since_s: float) -> Loan:
    return replace(a_loan("i0", LoanState.RECALLED, return_by_s=NOW_S + 100.0), state_since_s=since_s)


LEAVING = a_job("leaving", 8, state=JobState.PREEMPTED, releasing={"i0": EIGHT})


def test_newer_forecast_cancels_a_recall() -> None:
    assert [type(d) for d in node_decisions(world(16.0, [recalled_world(NOW_S - 50)], [LEAVING]))] == [CancelRecall]


def test_recall_stands_until_a_newer_forecast() -> None:
    assert node_decisions(world(16.0, [recalled_world(NOW_S - 50)], [LEAVING], made_at_s=NOW_S - 60)) == []


def test_recalled_node_counts_as_lent() -> None:
    before = world(16.0, [recalled_world(NOW_S)], [LEAVING, a_job("waits", 8)])
    assert [type(d) for d in node_decisions(before)] == []
    after = replace(before, loans={})
    assert [type(d) for d in node_decisions(after)] == [LendNode]


def test_vacated_recalled_node_is_returned() -> None:
    decisions = node_decisions(world(24.0, [recalled_world(NOW_S)], []))
    assert [(type(d), d.reason.code) for d in decisions] == [(ReturnNode, ReasonCode.TRAINING_LEFT)]


def test_drained_lent_node_is_returned_and_not_lent_again() -> None:
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


def withheld(snapshot: Snapshot, *names: str) -> Snapshot:
    """Return the state after the owner has excluded nodes from lending."""
    nodes = {name: replace(node, lendable=name not in names) for name, node in snapshot.nodes.items()}
    return replace(snapshot, nodes=nodes)


def test_node_that_is_not_lendable_is_never_lent_and_counts_in_the_capacity() -> None:
    waits = a_job("waits", 24)
    lent = {d.node for d in node_decisions(world(0.0, [], [waits])) if isinstance(d, LendNode)}
    assert lent == {"i0", "i1", "i2"}
    lent = {d.node for d in node_decisions(withheld(world(0.0, [], [waits]), "i0")) if isinstance(d, LendNode)}
    assert lent == {"i1", "i2"}
    lent = {d.node for d in node_decisions(withheld(world(8.0, [], [waits]), "i0")) if isinstance(d, LendNode)}
    assert lent == {"i1", "i2"}, "its 8 GPUs cover the demand"


def test_lent_node_that_is_no_longer_lendable_is_recalled_by_its_deadline() -> None:
    snapshot = withheld(world(0.0, [a_loan("i0"), a_loan("i1", LoanState.OFFERED), a_loan("i2")], []), "i0", "i1")
    recalled, withdrawn = node_decisions(snapshot)
    assert isinstance(recalled, RecallNode)
    assert (recalled.node, recalled.return_by_s) == ("i0", NOW_S + 300.0)
    assert isinstance(withdrawn, ReturnNode)
    assert {recalled.reason.code, withdrawn.reason.code} == {ReasonCode.OPERATOR_ASKED}


def test_recall_of_a_node_that_is_not_lendable_is_not_cancelled() -> None:
    snapshot = world(0.0, [recalled_world(NOW_S - 50)], [LEAVING])
    assert [type(d) for d in node_decisions(snapshot)] == [CancelRecall]
    assert node_decisions(withheld(snapshot, "i0")) == []


def test_recall_of_a_cordoned_node_is_counted_at_once() -> None:
    snapshot = world(8.0, [a_loan("i0"), a_loan("i1"), a_loan("i2")], [])
    cordoned = replace(snapshot.nodes["i0"], cordoned=True)
    decisions = node_decisions(replace(snapshot, nodes={**snapshot.nodes, "i0": cordoned}))
    assert [d.node for d in decisions if isinstance(d, RecallNode)] == ["i0", "i1"]


def test_recall_of_a_drained_node_does_not_cancel_another_recall() -> None:
    running = a_job("running", 8, state=JobState.RUNNING, on={"i1": EIGHT})
    loans = [a_loan("i1"), recalled_world(NOW_S - 50)]
    snapshot = world(16.0, loans, [LEAVING, running])
    drained = replace(snapshot.nodes["i1"], cordoned=True, draining=True)
    decisions = node_decisions(replace(snapshot, nodes={**snapshot.nodes, "i1": drained}))
    assert [d.node for d in decisions if isinstance(d, RecallNode)] == ["i1"]
    assert [d for d in decisions if isinstance(d, CancelRecall)] == []


def an_offer(offered_at_s: float) -> Loan:
    return replace(a_loan("i0", LoanState.OFFERED), offered_at_s=offered_at_s, state_since_s=offered_at_s)


def offered_world(offered_at_s: float, *, full_pass_at_s: float = NOW_S) -> Snapshot:
    """Return a state in which node i0 is offered while inference holds 4 of its GPUs, and a job is pending."""
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


def test_offer_expires_after_the_return_deadline() -> None:
    assert node_decisions(offered_world(NOW_S - 299.0)) == []
    (withdrawn,) = node_decisions(offered_world(NOW_S - 300.0))
    assert isinstance(withdrawn, ReturnNode)
    assert withdrawn.reason.code is ReasonCode.OFFER_EXPIRED
    assert withdrawn.reason.numbers == {"inference_gpus": 4.0, "waited_s": 300.0}


def test_tick_wakes_when_an_offer_expires() -> None:
    assert decide(offered_world(NOW_S - 299.0), load_policy_set("ebbtide")).next_wake_s == NOW_S + 1.0


def test_expired_offer_is_repeated_in_the_next_full_pass() -> None:
    at_a_full_pass = offered_world(NOW_S - 300.0, full_pass_at_s=NOW_S - 400.0)
    assert [type(d) for d in node_decisions(at_a_full_pass)] == [ReturnNode]
    withdrawn = replace(at_a_full_pass, loans={})
    assert node_decisions(replace(withdrawn, full_pass_at_s=NOW_S)) == []
    assert [type(d) for d in node_decisions(withdrawn)] == [LendNode]


def test_all_loans_are_recalled_without_a_demand_reading() -> None:
    snapshot = replace(world(0.0, [a_loan("i0"), a_loan("i1")], []), demand={})
    assert [type(d) for d in node_decisions(snapshot)] == [RecallNode, RecallNode]


def test_missing_forecast_keeps_loans_and_adds_none() -> None:
    snapshot = replace(world(0.0, [a_loan("i0")], []), forecasts={})
    assert node_decisions(snapshot) == []


def test_demand_within_the_minimum_loan_time_prevents_a_loan() -> None:
    waits = a_job("waits", 8)
    snapshot = world(0.0, [a_loan("i0")], [waits, a_job("too", 8)], inference=2)
    assert [type(d) for d in node_decisions(snapshot)] == [LendNode]
    soon = snapshot.forecasts["inference"]
    later = {"inference": soon.with_min_loan_forecast(replace(soon, gpus=(16.0,)))}
    assert node_decisions(replace(snapshot, forecasts=later)) == []
