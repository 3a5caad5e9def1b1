"""Proposed loans: the notice, its end, withdrawals and vetoes."""

from __future__ import annotations

from dataclasses import replace

from scheduler.domain.commands import Command, VetoLoan
from scheduler.domain.decisions import Decision, LendNode, ProposeLoan, ReasonCode, ReturnNode
from scheduler.domain.events import EventCode
from scheduler.domain.fleet import DemandReading, Forecast, Loan, LoanState, NodeState
from scheduler.domain.job import Job
from scheduler.domain.lending_policy import LendingPolicy
from scheduler.domain.observation import Observation
from scheduler.domain.snapshot import Snapshot, Switches
from scheduler.scheduling.policy_sets import load_policy_set
from scheduler.scheduling.scheduler import decide
from scheduler.scheduling.snapshot_update import SnapshotUpdate, update_snapshot
from tests.builders import a_fleet, a_job, a_snapshot

NOW_S, NOTICE_S = 1000.0, 900.0
RULES = LendingPolicy(headroom=0.0, notice_s=NOTICE_S, veto_s=7200.0)


def proposal(node: str, ends_s: float) -> Loan:
    proposed_at_s = ends_s - NOTICE_S
    return Loan(f"{node}-1", node, "inference", LoanState.PROPOSED, ends_s, proposed_at_s, proposed_at_s=proposed_at_s)


def world(*loans: Loan, needs: float = 8.0, jobs: tuple[Job, ...] = (a_job("waits", 16),)) -> Snapshot:
    """Three nodes of 8 GPUs; by default, inference needs one and a job wants two."""
    return a_snapshot(
        a_fleet(training=0, inference=3, lending=RULES),
        jobs,
        loans,
        now_s=NOW_S,
        demand={"inference": DemandReading(NOW_S, needs, needs)},
        forecasts={"inference": Forecast(NOW_S, 600.0, (0.999,), (needs,), "scripted")},
    )


def decisions(snapshot: Snapshot) -> list[tuple[type[Decision], str]]:
    made = decide(snapshot, load_policy_set("ebbtide")).decisions
    return [(type(d), d.node) for d in made if isinstance(d, ProposeLoan | LendNode | ReturnNode)]


def test_pool_with_notice_proposes_and_lends_nothing() -> None:
    result = decide(world(), load_policy_set("ebbtide"))
    assert [(type(d), getattr(d, "offer_at_s", None)) for d in result.decisions] == [
        (ProposeLoan, NOW_S + NOTICE_S)
    ] * 2


def test_proposals_count_toward_the_number_of_loans_and_toward_the_wanted_gpus() -> None:
    assert decisions(world(proposal("i0", NOW_S + 1), proposal("i1", NOW_S + 1), needs=0.0)) == []
    assert decisions(world(proposal("i0", NOW_S + 1))) == [(ProposeLoan, "i1")]


def test_node_is_offered_when_its_notice_ends_also_between_full_passes() -> None:
    due = replace(world(proposal("i0", NOW_S), proposal("i1", NOW_S + 1)), full_pass_at_s=NOW_S - 1)
    assert decisions(due) == [(LendNode, "i0")]
    assert decide(due, load_policy_set("ebbtide")).next_wake_s == NOW_S + 1
    assert decisions(replace(due, full_pass_at_s=float("-inf"))) == [(LendNode, "i0")]


def test_proposal_without_a_job_or_permission_at_its_end_is_withdrawn() -> None:
    assert decisions(world(proposal("i0", NOW_S), jobs=())) == [(ReturnNode, "i0")]
    paused = replace(world(proposal("i0", NOW_S)), switches=Switches(lending_paused=True))
    assert decisions(paused) == [(ReturnNode, "i0")]
    assert decisions(replace(paused, loans={"i0": proposal("i0", NOW_S + 1)})) == []


def test_proposal_that_the_pool_can_no_longer_bear_is_withdrawn_at_once() -> None:
    found = world(proposal("i0", NOW_S + 1), proposal("i1", NOW_S + 2), needs=16.0)
    assert decisions(found) == [(ReturnNode, "i1")]
    assert decisions(replace(found, switches=Switches(loans_recalled=True))) == [(ReturnNode, "i0"), (ReturnNode, "i1")]


def test_proposal_of_a_node_that_is_down_or_cordoned_is_withdrawn() -> None:
    found = replace(world(proposal("i0", NOW_S + 1)), full_pass_at_s=NOW_S - 1)
    for changes in ({"state": NodeState.DOWN}, {"cordoned": True}):
        nodes = {**found.nodes, "i0": replace(found.nodes["i0"], **changes)}
        made = decide(replace(found, nodes=nodes), load_policy_set("ebbtide")).decisions
        assert [(type(d), d.reason.code) for d in made] == [(ReturnNode, ReasonCode.NO_LONGER_LENDABLE)]


def veto(snapshot: Snapshot, loan_id: str, *, webhook_id: str = "") -> SnapshotUpdate:
    body = VetoLoan(loan_id, "a release is rolled out", webhook_id)
    return update_snapshot(snapshot, Observation(NOW_S, -1), [Command("c", NOW_S, body, actor="ada")])


def test_vetoed_node_is_not_proposed_again_for_a_time() -> None:
    done = veto(world(proposal("i0", NOW_S + 1)), "i0-1", webhook_id="wh_a")
    assert done.snapshot.loans["i0"].state is LoanState.VETOED
    assert done.snapshot.nodes["i0"].vetoed_until_s == NOW_S + 7200.0
    [event] = done.events
    assert (event.code, event.subject) == (EventCode.LOAN_VETOED, "i0-1")
    assert all(word in event.message for word in ("ada", "wh_a", "a release is rolled out"))
    assert decisions(done.snapshot) == [(ProposeLoan, "i1"), (ProposeLoan, "i2")]
    later = replace(done.snapshot, now_s=NOW_S + 7200.0, full_pass_at_s=float("-inf"))
    fresh = DemandReading(later.now_s, 8.0, 8.0)
    assert decisions(replace(later, demand={"inference": fresh}))[0] == (ProposeLoan, "i0")


def test_only_a_proposed_loan_can_be_vetoed() -> None:
    offered = replace(proposal("i0", NOW_S), state=LoanState.OFFERED)
    for snapshot in (world(), world(offered)):
        done = veto(snapshot, "i0-1")
        assert done.events[0].code is EventCode.COMMAND_REFUSED
        assert all(loan.state is not LoanState.VETOED for loan in done.snapshot.loans.values())


def test_proposal_is_not_in_effect() -> None:
    loan = proposal("i0", NOW_S + 1)
    assert (loan.is_live, loan.is_in_effect, loan.created_at_s) == (True, False, NOW_S + 1 - NOTICE_S)
    offered = loan.transition_to(LoanState.OFFERED, NOW_S + 5)
    assert (offered.offered_at_s, offered.created_at_s) == (NOW_S + 5, loan.created_at_s)
    snapshot = world(loan)
    assert snapshot.index.inference_capacity["inference"] == 24
    assert not snapshot.is_lent(snapshot.nodes["i0"])
