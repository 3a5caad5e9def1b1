"""Lending by taint and eviction: the next step from where the nodes stand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from scheduler.domain.fleet import LoanState
from scheduler.domain.snapshot import Snapshot
from scheduler.kubernetes.api_objects import LOANED_TAINT
from scheduler.kubernetes.node_lending import EvictPod, TaintNode, UnplaceableNode, UntaintNode, plan_lending_steps
from scheduler.kubernetes.node_view import NodeView
from scheduler.kubernetes.pod_view import PodView
from tests.builders import a_fleet, a_loan

POOLS, NODES = a_fleet(training=1, inference=3)
PLAIN = {name: NodeView(name, "7", True, False, 8) for name in NODES}


def world(*loans: tuple[str, LoanState]) -> Snapshot:
    return Snapshot(pools=POOLS, nodes=NODES, loans={node: a_loan(node, state) for node, state in loans})


def lent(node: str, loan: str = "i0-1") -> NodeView:
    return replace(PLAIN[node], loan=loan, is_tainted=True, taints=(LOANED_TAINT,))


def pod(name: str, node: str, gpus: int, *, job: str = "", deleting: bool = False) -> PodView:
    return PodView("default", name, name, node, gpus, "Running", deleting, job_id=job, target_node=node if job else "")


def test_an_offered_node_is_tainted_once_its_pods_fit_elsewhere() -> None:
    (step,) = plan_lending_steps(world(("i0", LoanState.OFFERED)), PLAIN, [pod("llm", "i0", 6), pod("asr", "i1", 4)])
    assert step == TaintNode(PLAIN["i0"], a_loan("i0", LoanState.OFFERED))


def test_an_offered_node_whose_pods_fit_nowhere_is_left_alone() -> None:
    pods = [pod("llm", "i0", 6), pod("asr", "i1", 4), pod("tts", "i2", 3)]
    assert plan_lending_steps(world(("i0", LoanState.OFFERED)), PLAIN, pods) == (UnplaceableNode("i0", 6),)


@pytest.mark.parametrize(
    ("taint", "fits"),
    [
        ({"key": "maintenance", "effect": "NoSchedule"}, False),
        ({"key": "node.kubernetes.io/disk-pressure", "effect": "NoExecute"}, False),
        ({"key": "spot", "effect": "PreferNoSchedule"}, True),
        ({"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}, True),
    ],
    ids=["maintenance", "NoExecute", "a wish", "as where they are"],
)
def test_a_node_whose_taint_keeps_its_pods_off_has_no_room_for_them(taint: Mapping[str, Any], fits: bool) -> None:
    gpu = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}
    nodes = {**PLAIN, "i0": replace(PLAIN["i0"], taints=(gpu,)), "i1": replace(PLAIN["i1"], taints=(taint,))}
    pods = [pod("llm", "i0", 6), pod("asr", "i2", 8)]
    (step,) = plan_lending_steps(world(("i0", LoanState.OFFERED)), nodes, pods)
    assert isinstance(step, TaintNode) is fits


def test_two_offered_nodes_are_not_promised_the_same_room() -> None:
    offered = world(("i0", LoanState.OFFERED), ("i1", LoanState.OFFERED))
    steps = plan_lending_steps(offered, PLAIN, [pod("llm", "i0", 6), pod("asr", "i1", 6)])
    assert [type(step) for step in steps] == [TaintNode, UnplaceableNode]


@pytest.mark.parametrize("deleting", [False, True], ids=["still there", "on their way"])
def test_room_that_is_promised_stays_promised_while_pods_are_leaving_for_it(deleting: bool) -> None:
    offered = world(("i0", LoanState.OFFERED), ("i1", LoanState.OFFERED))
    for first, second in (("i0", "i1"), ("i1", "i0")):
        nodes = {**PLAIN, first: lent(first, f"{first}-1")}
        leaving, other = pod("llm", first, 6, deleting=deleting), pod("asr", second, 6)
        steps = plan_lending_steps(offered, nodes, [leaving, other])
        assert UnplaceableNode(second, 6) in steps
        assert [step for step in steps if isinstance(step, TaintNode)] == []


def test_pods_that_must_leave_and_no_longer_fit_keep_all_room_from_others() -> None:
    offered = world(("i0", LoanState.OFFERED), ("i1", LoanState.OFFERED))
    pods = [pod("llm", "i0", 6), pod("asr", "i1", 4), pod("tts", "i2", 4)]
    steps = plan_lending_steps(offered, {**PLAIN, "i0": lent("i0")}, pods)
    assert steps == (EvictPod(pods[0]), UnplaceableNode("i1", 4))


def test_its_pods_are_evicted_after_the_taint_and_each_once() -> None:
    nodes = {**PLAIN, "i0": lent("i0")}
    pods = [pod("llm", "i0", 6), pod("asr", "i0", 2, deleting=True), pod("logs", "i0", 0)]
    assert plan_lending_steps(world(("i0", LoanState.OFFERED)), nodes, pods) == (EvictPod(pods[0]),)


def test_a_node_that_serves_training_needs_nothing_more() -> None:
    nodes = {**PLAIN, "i0": lent("i0")}
    assert plan_lending_steps(world(("i0", LoanState.ACTIVE)), nodes, [pod("a-g1-0", "i0", 8, job="a")]) == ()


@pytest.mark.parametrize("state", [LoanState.ACTIVE, LoanState.RECALLED])
def test_a_taint_that_somebody_took_away_comes_back(state: LoanState) -> None:
    (step,) = plan_lending_steps(world(("i0", state)), PLAIN, [])
    assert isinstance(step, TaintNode)


def test_a_returned_node_keeps_its_taint_until_our_pods_have_left() -> None:
    nodes = {**PLAIN, "i0": lent("i0")}
    assert plan_lending_steps(world(), nodes, [pod("a-g1-0", "i0", 8, job="a", deleting=True)]) == ()
    assert plan_lending_steps(world(), nodes, []) == (UntaintNode(nodes["i0"]),)


def test_a_loan_that_was_lost_is_cleared_when_the_node_is_back() -> None:
    nodes = {**PLAIN, "i0": lent("i0")}
    assert plan_lending_steps(world(("i0", LoanState.LOST)), nodes, []) == (UntaintNode(nodes["i0"]),)


def test_a_node_with_the_label_of_another_loan_is_labelled_anew() -> None:
    nodes = {**PLAIN, "i0": lent("i0", "i0-older")}
    (step,) = plan_lending_steps(world(("i0", LoanState.ACTIVE)), nodes, [])
    assert isinstance(step, TaintNode)


def test_a_node_that_we_did_not_lend_is_never_touched() -> None:
    foreign = {**PLAIN, "i1": replace(PLAIN["i1"], is_tainted=True, taints=(LOANED_TAINT,))}
    assert plan_lending_steps(world(), foreign, [pod("llm", "i1", 8)]) == ()


def test_a_node_whose_label_somebody_took_comes_home_by_the_epoch_that_we_wrote() -> None:
    torn = replace(lent("i0", loan=""), epoch=3)
    assert plan_lending_steps(world(), {**PLAIN, "i0": torn}, []) == (UntaintNode(torn),)
    assert plan_lending_steps(world(), {**PLAIN, "i0": replace(torn, epoch=0)}, []) == (), (
        "that taint is somebody else's"
    )
