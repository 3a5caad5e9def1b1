"""Pods of inference that found no node, on partly lent nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from scheduler.domain.fleet import Loan, LoanState
from scheduler.domain.snapshot import Snapshot
from scheduler.kubernetes.cluster_cache import ClusterView
from scheduler.kubernetes.cluster_observation import observe_nodes
from scheduler.kubernetes.node_view import NodeView
from scheduler.kubernetes.pod_view import PodView, parse_pod_view
from scheduler.kubernetes.unplaced_replicas import assign_unplaced_replicas
from tests.builders import a_fleet, a_loan

POOLS, NODES = a_fleet(training=1, inference=3)
SERVING = {"role": "chat"}
VIEWS = {
    name: NodeView(name, "7", True, False, 8, labels=SERVING if node.pool == "inference" else {})
    for name, node in NODES.items()
}


def partial_loan(node: str, state: LoanState = LoanState.ACTIVE) -> Loan:
    return replace(a_loan(node, state), gpus=4, indices=(4, 5, 6, 7))


def world(*loans: Loan, lendable: str = "i0 i1") -> Snapshot:
    nodes = {
        name: replace(node, lendable_gpus=(4, 5, 6, 7)) if name in lendable.split() else node
        for name, node in NODES.items()
    }
    return Snapshot(pools=POOLS, nodes=nodes, loans={loan.node: loan for loan in loans})


def pod(name: str, gpus: int, *, node: str = "", job: str = "") -> PodView:
    return PodView("chat", name, name, node, gpus, "Running", False, job_id=job, target_node=node if job else "")


def unplaced(name: str, gpus: int, **spec: Any) -> PodView:
    """Return a pod as the Kubernetes scheduler leaves it without room."""
    container = {"name": "llm", "resources": {"limits": {"nvidia.com/gpu": str(gpus)}}}
    conditions = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]
    full_spec = {"nodeSelector": SERVING, "containers": [container], **spec}
    return parse_pod_view(
        {
            "metadata": {"name": name, "namespace": "chat", "uid": name},
            "spec": full_spec,
            "status": {"phase": "Pending", "conditions": conditions},
        }
    )


FULL = (pod("a", 4, node="i0"), pod("b", 4, node="i1"), pod("c", 8, node="i2"))
TRAINS = (pod("x", 4, node="i0", job="x"), pod("y", 3, node="i1", job="y"))


def assigned(snapshot: Snapshot, *pods: PodView, nodes: dict[str, NodeView] | None = None) -> dict[str, int]:
    return assign_unplaced_replicas(snapshot, ClusterView(pods=pods, nodes=nodes or VIEWS))


LENT = world(partial_loan("i0"), partial_loan("i1"))


def test_pod_counts_where_training_holds_the_fewest_gpus() -> None:
    assert assigned(LENT, *FULL, *TRAINS, unplaced("p", 4)) == {"i1": 4}
    assert assigned(LENT, *FULL, *TRAINS, unplaced("p", 4), unplaced("q", 3)) == {"i1": 4, "i0": 3}
    assert assigned(LENT, *FULL, *TRAINS, unplaced("p", 5)) == {}, "it would not fit without training either"


def test_recalled_node_comes_before_other_loans() -> None:
    recalled = world(partial_loan("i0", LoanState.RECALLED), partial_loan("i1"))
    assert assigned(recalled, *FULL, *TRAINS, unplaced("p", 4)) == {"i0": 4}
    whole = world(partial_loan("i0"), partial_loan("i1"), a_loan("i2", LoanState.RECALLED))
    pods = (*FULL[:2], *TRAINS, pod("z", 8, node="i2", job="z"))
    assert assigned(whole, *pods, unplaced("p", 4)) == {}, "it waits for i2, which comes back anyway"


def test_pod_counts_on_the_free_gpus_of_a_node_that_would_be_lent_in_part() -> None:
    assert assigned(world(), *FULL, unplaced("p", 4)) == {"i0": 4}
    assert assigned(world(lendable=""), *FULL, unplaced("p", 4)) == {}


@pytest.mark.parametrize(
    "spec",
    [
        {"nodeSelector": {"role": "batch"}},
        {"nodeName": "i2"},
        {"schedulerName": "ebbtide"},
        {
            "affinity": {
                "nodeAffinity": {
                    "requiredDuringSchedulingIgnoredDuringExecution": {
                        "nodeSelectorTerms": [{"matchExpressions": [{"key": "zone", "operator": "Exists"}]}]
                    }
                }
            }
        },
    ],
    ids=["other labels", "bound", "not inference", "affinity"],
)
def test_pod_that_training_does_not_keep_away_is_ignored(spec: dict[str, Any]) -> None:
    assert assigned(LENT, *FULL, *TRAINS, unplaced("p", 4, **spec)) == {}


def test_taints_keep_a_pod_away_unless_it_tolerates_them() -> None:
    taint = {"key": "maintenance", "effect": "NoSchedule"}
    nodes = {name: replace(view, taints=(taint,)) for name, view in VIEWS.items()}
    assert assigned(LENT, *FULL, *TRAINS, unplaced("p", 4), nodes=nodes) == {}
    tolerant = unplaced("p", 4, tolerations=[{"key": "maintenance", "operator": "Exists"}])
    assert assigned(LENT, *FULL, *TRAINS, tolerant, nodes=nodes) == {"i1": 4}


def test_observation_counts_pods_that_are_expected() -> None:
    view = ClusterView(pods=(*FULL, *TRAINS, unplaced("p", 4)), nodes=VIEWS)
    facts = observe_nodes(LENT, view)
    assert {name: facts[name].inference_gpus for name in ("i0", "i1", "i2")} == {"i0": 4, "i1": 8, "i2": 8}
    offered = world(partial_loan("i0", LoanState.OFFERED))
    assert observe_nodes(offered, ClusterView(pods=FULL[:1], nodes=VIEWS))["i0"].inference_gpus == 4
