"""What an observation says of the nodes that Ebbtide knows, from nodes and pods as the cluster has them. Pure."""

from __future__ import annotations

from scheduler.domain.fleet import PoolKind
from scheduler.domain.loan import LoanState
from scheduler.domain.observation import NodeFacts
from scheduler.domain.snapshot import Snapshot
from scheduler.k8s.cluster_view import ClusterView
from scheduler.k8s.lent_nodes import is_closed_to_inference


def node_facts(desired: Snapshot, view: ClusterView) -> dict[str, NodeFacts]:
    """The facts of every node of `desired`. One that the cluster does not have is down.

    Pods of others on a node of an inference pool are inference, elsewhere they only take GPUs. An offered node counts
    as used until it is closed to inference, because until then inference may still put something there.
    """
    taken: dict[str, int] = {}
    for pod in view.pods:
        if pod.holds_gpus and not pod.is_ours:
            taken[pod.node] = taken.get(pod.node, 0) + pod.gpus
    facts = {}
    for name, node in desired.nodes.items():
        seen, used, loan = view.nodes.get(name), taken.get(name, 0), desired.loans.get(name)
        serves = desired.pools[node.pool].kind is PoolKind.INFERENCE
        if seen is not None and loan is not None and loan.state is LoanState.OFFERED:
            used = used if is_closed_to_inference(loan, seen) else max(used, 1)
        facts[name] = NodeFacts(
            up=seen is not None and seen.is_ready,
            inference_gpus=used if serves else 0,
            other_gpus=0 if serves else used,
        )
    return facts
