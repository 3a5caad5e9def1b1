"""Lending steps by taint and eviction."""

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


def test_offered_node_is_tainted_once_its_pods_fit_elsewhere() -> None:
    (step,) = plan_lending_steps(world(("i0", LoanState.OFFERED)), PLAIN, [pod("llm", "i0", 6), pod("asr", "i1", 4)])
    assert step == TaintNode(PLAIN["i0"], a_loan("i0", LoanState.OFFERED))


def test_offered_node_is_untouched_if_its_pods_do_not_fit() -> None:
    pods = [pod("llm", "i0", 6), pod("asr", "i1", 4), pod("tts", "i2", 3)]
    assert plan_lending_steps(world(("i0", LoanState.OFFERED)), PLAIN, pods) == (UnplaceableNode("i0", 6),)


def test_proposed_node_is_untouched_and_offers_its_room() -> None:
    assert plan_lending_steps(world(("i0", LoanState.PROPOSED)), PLAIN, [pod("llm", "i0", 6)]) == ()
    both = world(("i0", LoanState.PROPOSED), ("i1", LoanState.OFFERED))
    pods = [pod("llm", "i1", 6), pod("asr", "i2", 8)]
    assert [type(step) for step in plan_lending_steps(both, PLAIN, pods)] == [TaintNode]


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
def test_tainted_node_offers_no_room(taint: Mapping[str, Any], fits: bool) -> None:
    gpu = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}
    nodes = {**PLAIN, "i0": replace(PLAIN["i0"], taints=(gpu,)), "i1": replace(PLAIN["i1"], taints=(taint,))}
    pods = [pod("llm", "i0", 6), pod("asr", "i2", 8)]
    (step,) = plan_lending_steps(world(("i0", LoanState.OFFERED)), nodes, pods)
    assert isinstance(step, TaintNode) is fits


def test_room_is_not_reserved_twice() -> None:
    offered = world(("i0", LoanState.OFFERED), ("i1", LoanState.OFFERED))
    steps = plan_lending_steps(offered, PLAIN, [pod("llm", "i0", 6), pod("asr", "i1", 6)])
    assert [type(step) for step in steps] == [TaintNode, UnplaceableNode]


@pytest.mark.parametrize("deleting", [False, True], ids=["still there", "on their way"])
def test_room_stays_reserved_while_pods_terminate(deleting: bool) -> None:
    offered = world(("i0", LoanState.OFFERED), ("i1", LoanState.OFFERED))
    for first, second in (("i0", "i1"), ("i1", "i0")):
        nodes = {**PLAIN, first: lent(first, f"{first}-1")}
        leaving, other = pod("llm", first, 6, deleting=deleting), pod("asr", second, 6)
        steps = plan_lending_steps(offered, nodes, [leaving, other])
        assert UnplaceableNode(second, 6) in steps
        assert [step for step in steps if isinstance(step, TaintNode)] == []


def test_evicted_pods_without_room_block_other_loans() -> None:
    offered = world(("i0", LoanState.OFFERED), ("i1", LoanState.OFFERED))
    pods = [pod("llm", "i0", 6), pod("asr", "i1", 4), pod("tts", "i2", 4)]
    steps = plan_lending_steps(offered, {**PLAIN, "i0": lent("i0")}, pods)
    assert steps == (EvictPod(pods[0]), UnplaceableNode("i1", 4))


def test_pods_are_evicted_once_after_the_taint() -> None:
    nodes = {**PLAIN, "i0": lent("i0")}
    pods = [pod("llm", "i0", 6), pod("asr", "i0", 2, deleting=True), pod("logs", "i0", 0)]
    assert plan_lending_steps(world(("i0", LoanState.OFFERED)), nodes, pods) == (EvictPod(pods[0]),)


def test_active_loan_needs_no_steps() -> None:
    nodes = {**PLAIN, "i0": lent("i0")}
    assert plan_lending_steps(world(("i0", LoanState.ACTIVE)), nodes, [pod("a-g1-0", "i0", 8, job="a")]) == ()


@pytest.mark.parametrize("state", [LoanState.ACTIVE, LoanState.RECALLED])
def test_removed_taint_is_restored(state: LoanState) -> None:
    (step,) = plan_lending_steps(world(("i0", state)), PLAIN, [])
    assert isinstance(step, TaintNode)


def test_returned_node_keeps_its_taint_until_our_pods_are_gone() -> None:
    nodes = {**PLAIN, "i0": lent("i0")}
    assert plan_lending_steps(world(), nodes, [pod("a-g1-0", "i0", 8, job="a", deleting=True)]) == ()
    assert plan_lending_steps(world(), nodes, []) == (UntaintNode(nodes["i0"]),)


def test_lost_loan_is_cleared_when_the_node_recovers() -> None:
    nodes = {**PLAIN, "i0": lent("i0")}
    assert plan_lending_steps(world(("i0", LoanState.LOST)), nodes, []) == (UntaintNode(nodes["i0"]),)


def test_label_of_another_loan_is_replaced() -> None:
    nodes = {**PLAIN, "i0": lent("i0", "i0-older")}
    (step,) = plan_lending_steps(world(("i0", LoanState.ACTIVE)), nodes, [])
    assert isinstance(step, TaintNode)


def partly(node: str, state: LoanState = LoanState.OFFERED) -> Snapshot:
    loan = replace(a_loan(node, state), gpus=4, indices=(4, 5, 6, 7))
    return replace(world(), loans={node: loan})


@pytest.mark.parametrize("state", [LoanState.OFFERED, LoanState.ACTIVE, LoanState.RECALLED])
def test_partly_lent_node_is_neither_tainted_nor_emptied(state: LoanState) -> None:
    assert plan_lending_steps(partly("i0", state), PLAIN, [pod("llm", "i0", 4), pod("a", "i0", 4, job="a")]) == ()


def test_taint_of_an_earlier_loan_leaves_a_partly_lent_node() -> None:
    nodes = {**PLAIN, "i0": lent("i0", "i0-0")}
    assert plan_lending_steps(partly("i0"), nodes, [pod("a", "i0", 4, job="a")]) == (UntaintNode(nodes["i0"]),)


@pytest.mark.parametrize(("gpus", "fits"), [(2, True), (3, False)])
def test_pods_of_another_node_fit_on_the_rest_of_a_partly_lent_one(gpus: int, fits: bool) -> None:
    both = partly("i0", LoanState.ACTIVE)
    both = replace(both, loans={**both.loans, "i1": a_loan("i1", LoanState.OFFERED)})
    pods = [pod("llm", "i0", 2), pod("asr", "i1", gpus), pod("tts", "i2", 8)]
    (step,) = plan_lending_steps(both, PLAIN, pods)
    assert isinstance(step, TaintNode) is fits


def test_foreign_taints_and_labels_are_untouched() -> None:
    foreign = {**PLAIN, "i1": replace(PLAIN["i1"], is_tainted=True, taints=(LOANED_TAINT,))}
    assert plan_lending_steps(world(), foreign, [pod("llm", "i1", 8)]) == ()


def test_node_without_label_is_returned_by_its_epoch() -> None:
    torn = replace(lent("i0", loan=""), epoch=3)
    assert plan_lending_steps(world(), {**PLAIN, "i0": torn}, []) == (UntaintNode(torn),)
    assert plan_lending_steps(world(), {**PLAIN, "i0": replace(torn, epoch=0)}, []) == (), (
        "that taint is somebody else's"
    )
