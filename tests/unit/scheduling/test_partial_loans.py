"""Loans of a part of a node: offer, use, recall and accounts, with inference on the other GPUs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from scheduler.domain.commands import ChangeNode, Command
from scheduler.domain.decisions import (
    CancelRecall,
    Decision,
    LendNode,
    NodeDecision,
    ProposeLoan,
    ReasonCode,
    RecallNode,
    ReturnNode,
    StartJob,
)
from scheduler.domain.events import EventCode
from scheduler.domain.fleet import DemandReading, Forecast, Loan, LoanState, Node, PoolKind
from scheduler.domain.job import Job
from scheduler.domain.job_state import JobState
from scheduler.domain.lending_policy import LendingMode, LendingPolicy
from scheduler.domain.observation import NodeFacts, Observation, Run, RunPhase
from scheduler.domain.shadow_lending import ShadowLending
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.standby import StandbyPhase, StandbyState
from scheduler.domain.tick_report import BreachKind
from scheduler.scheduling.capacity_use import classify_capacity
from scheduler.scheduling.desired_state import apply_decisions
from scheduler.scheduling.legality import find_breaches
from scheduler.scheduling.policy_sets import load_policy_set
from scheduler.scheduling.scheduler import decide
from scheduler.scheduling.snapshot_update import update_snapshot
from tests.builders import GPU, a_fleet, a_job, a_loan, a_node, a_snapshot

NOW_S = 1000.0
UPPER = (4, 5, 6, 7)
WAITS = a_job("waits", 1, 64)


def partial_loan(node: str, state: LoanState = LoanState.ACTIVE, *, return_by_s: float | None = None) -> Loan:
    return replace(a_loan(node, state, return_by_s=return_by_s), gpus=4, indices=UPPER)


def world(
    needs: float, loans: tuple[Loan, ...] = (), jobs: tuple[Job, ...] = (WAITS,), *, partial: str = "i0", **lending: Any
) -> Snapshot:
    """Return three inference nodes of 8 GPUs, of which those in `partial` lend GPUs 4 to 7."""
    pools, nodes = a_fleet(training=1, inference=3, lending=LendingPolicy(**{"headroom": 0.0, **lending}))
    nodes = {
        name: replace(node, lendable_gpus=UPPER) if name in partial.split() else node for name, node in nodes.items()
    }
    return a_snapshot(
        (pools, nodes),
        jobs,
        loans,
        now_s=NOW_S,
        demand={"inference": DemandReading(NOW_S, needs, needs)},
        forecasts={"inference": Forecast(NOW_S, 600.0, (0.999,), (needs,), "scripted")},
    )


def using(snapshot: Snapshot, **inference_gpus: int) -> Snapshot:
    changed = {name: replace(snapshot.nodes[name], inference_gpus=gpus) for name, gpus in inference_gpus.items()}
    return replace(snapshot, nodes={**snapshot.nodes, **changed})


def decisions_of(snapshot: Snapshot) -> list[NodeDecision]:
    decided = decide(snapshot, load_policy_set("ebbtide")).decisions
    return [decision for decision in decided if isinstance(decision, NodeDecision)]


def summarize(decisions: list[Decision] | list[NodeDecision]) -> list[tuple[type, str]]:
    return [(type(decision), decision.node) for decision in decisions if isinstance(decision, NodeDecision)]


def lent(snapshot: Snapshot) -> set[str]:
    return {decision.node for decision in decisions_of(snapshot) if isinstance(decision, LendNode)}


@pytest.mark.parametrize("indices", [(8,), (-1,), (1, 1), (1, 0), tuple(range(8))])
def test_lendable_gpus_are_some_different_ones_of_the_node(indices: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="lendable_gpus must be 1 to 7 different GPU indices of 0 to 7"):
        a_node("i0", "inference", lendable_gpus=indices)
    with pytest.raises(ValueError, match="lendable_gpus must be empty"):
        a_node("i0", "inference", gpus=1, lendable_gpus=(0,))


def test_part_of_a_node_is_lent_used_and_given_back_while_inference_stays() -> None:
    snapshot = using(world(20.0, jobs=(a_job("waits", 9, 12),)), i0=3)
    offered = apply_decisions(snapshot, decide(snapshot, load_policy_set("ebbtide")).decisions)
    assert (offered.loans["i0"].state, offered.loans["i0"].gpus, offered.loans["i0"].indices) == ("offered", 4, UPPER)
    seen = Observation(NOW_S, 0, nodes={name: NodeFacts(inference_gpus=3 * (name == "i0")) for name in offered.nodes})
    active = update_snapshot(offered, seen, ()).snapshot
    assert active.loans["i0"].state is LoanState.ACTIVE
    assert (active.index.lent_gpus, active.index.inference_capacity["inference"]) == ({"inference": 4}, 20)
    assert active.index.training_gpus == {(GPU, False): 8, (GPU, True): 4}
    started = decide(active, load_policy_set("ebbtide")).decisions
    (start,) = [decision for decision in started if isinstance(decision, StartJob)]
    assert start.gpus == {"t0": tuple(range(8)), "i0": UPPER}
    busy = using(apply_decisions(active, started), i0=3)
    assert busy.index.free_gpu_total == 0
    recalled = decisions_of(replace(busy, demand={"inference": DemandReading(NOW_S, 21.0, 21.0)}))
    assert summarize(recalled) == [(RecallNode, "i0")]


def test_pods_of_inference_are_never_moved_for_a_part_of_a_node() -> None:
    assert lent(using(world(20.0), i0=4, i1=8, i2=8)) == {"i0"}
    assert lent(using(world(20.0), i0=5, i1=7, i2=8)) == set()


def test_parts_fill_what_whole_nodes_leave() -> None:
    assert lent(world(11.0)) == {"i0", "i1"}, "13 GPUs are spare: one whole node and 4 GPUs of another"
    assert lent(world(4.0)) == {"i0", "i1", "i2"}
    assert lent(world(17.0)) == {"i0"}
    assert lent(world(11.0, lent_nodes_max=1)) == {"i1"}, "whole nodes first"
    assert lent(using(world(11.0), i1=1, i2=1)) == {"i0", "i1"}, "no pod leaves i0, and one leaves i1"


def test_recall_takes_the_loans_that_cover_the_need_with_fewest_gpus() -> None:
    loans = (partial_loan("i0"), a_loan("i1"))
    assert summarize(decisions_of(world(12.0, loans, ()))) == []
    assert summarize(decisions_of(world(13.0, loans, ()))) == [(RecallNode, "i0")]
    assert summarize(decisions_of(world(17.0, loans, ()))) == [(RecallNode, "i1")]
    assert summarize(decisions_of(world(21.0, loans, ()))) == [(RecallNode, "i0"), (RecallNode, "i1")]
    offered = tuple(replace(loan, state=LoanState.OFFERED, offered_at_s=NOW_S) for loan in loans)
    assert summarize(decisions_of(world(13.0, offered, ()))) == [(ReturnNode, "i0")]


def test_recall_is_cancelled_only_for_loans_that_fit() -> None:
    jobs = (
        a_job("part", 4, state=JobState.PREEMPTED, releasing={"i0": UPPER}),
        a_job("whole", 8, state=JobState.PREEMPTED, releasing={"i1": tuple(range(8))}),
    )
    loans = [
        replace(partial_loan("i0", LoanState.RECALLED, return_by_s=NOW_S + 100.0), state_since_s=NOW_S - 50.0),
        replace(a_loan("i1", LoanState.RECALLED, return_by_s=NOW_S + 100.0), state_since_s=NOW_S - 50.0),
    ]
    assert summarize(decisions_of(world(18.0, tuple(loans), jobs))) == [(CancelRecall, "i0")]
    assert summarize(decisions_of(using(world(18.0, tuple(loans), jobs), i0=5))) == []


@pytest.mark.parametrize("state", [LoanState.OFFERED, LoanState.ACTIVE])
def test_loan_ends_once_inference_needs_more_of_its_node(state: LoanState) -> None:
    snapshot = using(world(0.0, (partial_loan("i0", state),), ()), i0=5)
    (decision,) = decisions_of(snapshot)
    assert type(decision) is (ReturnNode if state is LoanState.OFFERED else RecallNode)
    assert decision.reason.code is ReasonCode.INFERENCE_NEEDS_NODE
    assert decision.reason.numbers == {"inference_gpus": 5.0, "kept_gpus": 4.0}
    free = snapshot.index.free_by_node.get("i0")
    assert (free.indices if free else None) == (None if state is LoanState.OFFERED else (4, 5, 6))


def test_offer_waits_for_inference_and_then_counts() -> None:
    offered = world(0.0, (partial_loan("i0", LoanState.OFFERED),))
    for gpus, state in ((5, LoanState.OFFERED), (4, LoanState.ACTIVE)):
        seen = Observation(NOW_S, 0, nodes={"i0": NodeFacts(inference_gpus=gpus)})
        assert update_snapshot(offered, seen, ()).snapshot.loans["i0"].state is state


def test_other_lendable_gpus_recall_the_loan() -> None:
    snapshot = world(0.0, (partial_loan("i0"),), ())
    command = Command("c0", NOW_S, ChangeNode("i0", lendable_gpus=(6, 7)))
    changed = update_snapshot(snapshot, Observation(NOW_S, -1), [command])
    assert changed.snapshot.nodes["i0"].lendable_gpus == (6, 7)
    assert [event.code for event in changed.events] == [EventCode.NODE_CHANGED]
    (recall,) = decisions_of(changed.snapshot)
    assert (type(recall), recall.reason.code) == (RecallNode, ReasonCode.OPERATOR_ASKED)
    wrong = Command("c1", NOW_S, ChangeNode("i0", lendable_gpus=(9,)))
    refused = update_snapshot(snapshot, Observation(NOW_S, -1), [wrong])
    assert [event.code for event in refused.events] == [EventCode.COMMAND_REFUSED]
    assert refused.snapshot.nodes == snapshot.nodes


def test_proposal_keeps_its_gpus_until_the_offer() -> None:
    snapshot = using(world(16.0, notice_s=60.0), i0=4)
    (proposed,) = decisions_of(snapshot)
    assert (type(proposed), proposed.node) == (ProposeLoan, "i1")
    parts = using(world(20.0, notice_s=60.0), i0=4)
    after = replace(apply_decisions(parts, decisions_of(parts)), now_s=NOW_S + 60.0)
    assert after.loans["i0"].indices == UPPER
    assert summarize(decisions_of(after)) == [(LendNode, "i0")]
    changed = {**after.nodes, "i0": replace(after.nodes["i0"], lendable_gpus=(7,))}
    assert summarize(decisions_of(replace(after, nodes=changed)))[0] == (ReturnNode, "i0")


def test_pool_with_standby_replicas_lends_whole_nodes_only() -> None:
    asleep = StandbyState(StandbyPhase.AWAKE, 0.0)
    snapshot = world(0.0, partial="i0 i1")
    nodes = {name: replace(node, standby=asleep) for name, node in snapshot.nodes.items() if node.pool == "inference"}
    assert lent(replace(snapshot, nodes={**snapshot.nodes, **nodes})) == {"i2"}


def test_shadow_counts_the_gpus_of_parts() -> None:
    snapshot = replace(world(4.0, mode=LendingMode.SHADOW), shadows={"inference": ShadowLending(0.0)})
    shadow = decide(snapshot, load_policy_set("ebbtide")).shadows["inference"]
    assert (set(shadow.nodes), shadow.gpus) == ({"i0", "i1", "i2"}, 20.0)


def test_used_and_idle_gpus_of_a_part_add_up() -> None:
    job = a_job("runs", 3, state=JobState.RUNNING, on={"i0": (4, 5, 6)})
    use = classify_capacity(using(world(0.0, (partial_loan("i0"), a_loan("i1")), (job,)), i0=2))["inference"]
    assert (use.lent_used, use.lent_idle, use.inference, use.free) == (3, 1 + 8, 2, 2 + 8)
    assert use.lent_used + use.lent_idle == 12, "the GPUs on loan"


def test_run_on_gpus_of_inference_is_a_breach() -> None:
    snapshot = world(0.0, (partial_loan("i0"),), ())
    for indices, kinds in (((3, 4), [BreachKind.ON_UNLENT_NODE]), ((4, 5), [])):
        run = Run("stray", 1, RunPhase.RUNNING, {"i0": indices})
        found = find_breaches(snapshot, Observation(NOW_S, 0, (run,)))
        assert [breach.kind for breach in found] == kinds


def test_cordoned_part_is_not_counted_twice() -> None:
    snapshot = using(world(16.0, (partial_loan("i0"),), ()), i0=1)
    cordoned = {**snapshot.nodes, "i0": replace(snapshot.nodes["i0"], cordoned=True)}
    closed = replace(snapshot, nodes=cordoned)
    assert closed.index.inference_capacity["inference"] == 1 + 16
    assert summarize(decisions_of(closed)) == []
    assert closed.pools["inference"].kind is PoolKind.INFERENCE
    assert isinstance(closed.nodes["i0"], Node)
