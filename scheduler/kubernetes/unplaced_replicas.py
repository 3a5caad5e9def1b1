"""Inference pods that found no node, as use of the partially lent nodes where they would fit. Pure.

A partially lent node has no taint, so the Kubernetes scheduler alone decides where a pod of inference goes. One that
finds no GPUs counts as inference on the node where GPUs are free, or would be without training. A loan that leaves too
few GPUs for it is then recalled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from scheduler.domain.fleet import LoanState, PoolKind
from scheduler.domain.quantities import Resources
from scheduler.domain.snapshot import Snapshot
from scheduler.kubernetes.cluster_cache import ClusterView
from scheduler.kubernetes.node_capacities import sum_all_requests
from scheduler.kubernetes.node_view import NodeView
from scheduler.kubernetes.pod_changes import find_lacking_resource
from scheduler.kubernetes.pod_view import PodView


@dataclass(frozen=True, slots=True)
class _NodeUse:
    """A node that may take an inference pod, with the GPUs that pods of inference and of jobs hold."""

    node: NodeView
    inference_gpus: int
    training_gpus: int
    is_recalled: bool

    @property
    def free_gpus(self) -> int:
        return self.node.gpus - self.inference_gpus - self.training_gpus

    @property
    def gpus_without_training(self) -> int:
        return self.node.gpus - self.inference_gpus


def assign_unplaced_replicas(desired: Snapshot, view: ClusterView) -> dict[str, int]:
    """Return, by node, the GPUs of inference pods that found no node and are expected there.

    Only nodes with partial loans are named, and those that could have one. A pod that fits on GPUs which are free, or
    coming back, waits for those. Any other pod counts on the partially lent node where training holds the fewest GPUs.
    """
    partial = _find_partial_nodes(desired)
    pods = [pod for pod in view.pods if pod.unschedulable is not None and not pod.is_ours] if partial else []
    if not pods:
        return {}
    uses = {use.node.name: use for use in _list_uses(desired, view)}
    requests, taken, assigned = sum_all_requests(view), Counter[str](), Counter[str]()
    for pod in sorted(pods, key=lambda pod: (-pod.gpus, pod.namespace, pod.name)):
        found = [use for use in uses.values() if _accepts(use.node, pod, requests)]
        name = _choose_node(found, pod.gpus, taken, partial)
        if name is not None:
            taken[name] += pod.gpus
            assigned[name] += pod.gpus if name in partial else 0
    return dict(+assigned)


def _find_partial_nodes(desired: Snapshot) -> frozenset[str]:
    """Return the nodes of inference pools with a partial loan in effect, or that would be lent in part."""
    lenders = {name for name, pool in desired.pools.items() if pool.kind is PoolKind.INFERENCE}
    lendable = {name for name, node in desired.nodes.items() if node.lendable_gpus and node.pool in lenders}
    return frozenset(lendable | {name for name, loan in desired.loans.items() if loan.is_partial and loan.is_in_effect})


def _list_uses(desired: Snapshot, view: ClusterView) -> Iterator[_NodeUse]:
    inference, training = Counter[str](), Counter[str]()
    for pod in view.pods:
        if pod.holds_gpus:
            (training if pod.is_ours else inference)[pod.node] += pod.gpus
    for name, node in view.nodes.items():
        if node.is_ready and not node.is_cordoned:
            loan = desired.loans.get(name)
            is_recalled = loan is not None and loan.state is LoanState.RECALLED
            yield _NodeUse(node, inference[name], training[name], is_recalled)


def _accepts(node: NodeView, pod: PodView, requests: Mapping[str, Resources]) -> bool:
    """Return whether only GPUs can keep the pod off the node."""
    assert pod.unschedulable is not None, "the caller selects pods that found no node"
    return pod.unschedulable.matches(node) and not find_lacking_resource(node, dict(requests.get(node.name, ())), pod)


def _choose_node(uses: Iterable[_NodeUse], gpus: int, taken: Mapping[str, int], partial: Collection[str]) -> str | None:
    """Return the node for a pod: one with free GPUs, else a recalled one, else a partly lent one, or None."""
    ranked = list[tuple[int, bool, int, str]]()
    for use in uses:
        name, reserved = use.node.name, taken.get(use.node.name, 0)
        if use.free_gpus - reserved >= gpus:
            ranked.append((0, name not in partial, 0, name))
        elif use.gpus_without_training - reserved >= gpus and (use.is_recalled or name in partial):
            ranked.append((1, not use.is_recalled, use.training_gpus, name))
    return min(ranked)[-1] if ranked else None
