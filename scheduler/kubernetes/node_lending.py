"""Lending and returning nodes: the missing steps towards the decided loans, and their API calls.

A node that is lent as a whole has a taint, which keeps inference pods off, and a label with its loan. Inference pods
leave by eviction, within their disruption budgets. A partially lent node has neither: its inference pods stay, and
the device plugin gives each pod GPUs of its own. A node without our label, or without our taint and epoch, is never
touched.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from scheduler.domain.fleet import Loan, LoanState
from scheduler.domain.snapshot import Snapshot
from scheduler.executors.standby_replicas import StandbyReplica
from scheduler.kubernetes.api_actions import ApiAction
from scheduler.kubernetes.api_objects import EPOCH_ANNOTATION, LOAN_LABEL, LOANED_TAINT, LOANED_TAINT_KEY, NODE, POD
from scheduler.kubernetes.client import EvictionResult, KubernetesClient
from scheduler.kubernetes.cluster_cache import ClusterCache
from scheduler.kubernetes.node_view import NodeView, find_repelling_taints
from scheduler.kubernetes.pod_view import PodView
from scheduler.store.protocol import FencedError


@dataclass(frozen=True, slots=True)
class TaintNode:
    node: NodeView
    loan: Loan


@dataclass(frozen=True, slots=True)
class UntaintNode:
    node: NodeView


@dataclass(frozen=True, slots=True)
class EvictPod:
    pod: PodView


@dataclass(frozen=True, slots=True)
class UnplaceableNode:
    """An offered node whose inference pods fit on no other node. It stays unchanged."""

    node: str
    gpus: int


LendingStep = TaintNode | UntaintNode | EvictPod | UnplaceableNode


def plan_lending_steps(
    desired: Snapshot, nodes: Mapping[str, NodeView], pods: Iterable[PodView]
) -> tuple[LendingStep, ...]:
    """Return the next steps of each loan, and of each node that is being returned."""
    on_node: dict[str, list[PodView]] = {}
    for pod in pods:
        if pod.holds_gpus:
            on_node.setdefault(pod.node, []).append(pod)
    steps: list[LendingStep] = []
    free_gpus = {
        pool: _count_free_gpus(pool, desired, nodes, on_node) for pool in {loan.pool for loan in desired.loans.values()}
    }
    _reserve_for_evicted_pods(desired, nodes, on_node, free_gpus)
    for name, loan in sorted(desired.loans.items()):
        if loan.is_in_effect and not loan.is_partial and name in nodes:
            steps.extend(_steps_for_loan(loan, nodes[name], on_node.get(name, []), free_gpus[loan.pool], nodes))
    for name, node in sorted(nodes.items()):
        if _is_lent(node) and _may_untaint(desired.loans.get(name), on_node.get(name, [])):
            steps.append(UntaintNode(node))
    return tuple(steps)


def is_closed_to_inference(loan: Loan | None, node: NodeView) -> bool:
    """Return whether no more inference pods can be scheduled on the lent node. Never for a partial loan."""
    is_whole = loan is not None and loan.is_in_effect and not loan.is_partial
    return is_whole and node.is_tainted and loan is not None and node.loan == loan.id


def _may_untaint(loan: Loan | None, pods: Iterable[PodView]) -> bool:
    """Return whether a node with our taint need not have it: it is not lent and no job is on it, or lent in part."""
    if loan is None or not loan.is_in_effect:
        return not _has_own_pods(pods)
    return loan.is_partial


def _steps_for_loan(
    loan: Loan, node: NodeView, pods: Sequence[PodView], free_gpus: dict[str, int], nodes: Mapping[str, NodeView]
) -> Iterable[LendingStep]:
    staying = [pod for pod in _select_foreign_pods(pods) if not pod.is_deleting]
    closed = is_closed_to_inference(loan, node)
    if loan.state is LoanState.OFFERED and not closed and not _fit_elsewhere(staying, node, free_gpus, nodes):
        return [UnplaceableNode(node.name, sum(pod.gpus for pod in staying))]
    if not closed:
        return [TaintNode(node, loan)]
    if loan.state is LoanState.OFFERED:
        return [EvictPod(pod) for pod in staying]
    return []


def _reserve_for_evicted_pods(
    desired: Snapshot,
    nodes: Mapping[str, NodeView],
    on_node: Mapping[str, Sequence[PodView]],
    free_gpus: Mapping[str, dict[str, int]],
) -> None:
    """Reserve room for pods that are already being evicted.

    Terminating pods count, because their replacements may not be bound yet. If the room is too small, nothing is left
    for other nodes' pods.
    """
    for name, loan in sorted(desired.loans.items()):
        is_leaving = loan.state is LoanState.OFFERED and name in nodes and is_closed_to_inference(loan, nodes[name])
        if is_leaving and not _fit_elsewhere(
            _select_foreign_pods(on_node.get(name, ())), nodes[name], free_gpus[loan.pool], nodes
        ):
            free_gpus[loan.pool].clear()


def _select_foreign_pods(pods: Iterable[PodView]) -> list[PodView]:
    return [pod for pod in pods if not pod.is_ours and pod.gpus]


def _count_free_gpus(
    pool: str, desired: Snapshot, nodes: Mapping[str, NodeView], on_node: Mapping[str, Sequence[PodView]]
) -> dict[str, int]:
    """Return the GPUs that are free for inference, on nodes of the pool that are neither wholly lent nor cordoned."""
    free_gpus = {}
    for name, node in desired.nodes.items():
        view, loan, pods = nodes.get(name), desired.loans.get(name), on_node.get(name, ())
        if node.pool != pool or view is None or not view.is_ready or view.is_cordoned or view.loan:
            continue
        if loan is None or not loan.is_in_effect:
            free_gpus[name] = view.gpus - sum(pod.gpus for pod in pods)
        elif loan.is_partial:
            free_gpus[name] = loan.count_kept_gpus(node) - sum(pod.gpus for pod in pods if not pod.is_ours)
    return free_gpus


def _fit_elsewhere(
    pods: Iterable[PodView], home: NodeView, free_gpus: dict[str, int], nodes: Mapping[str, NodeView]
) -> bool:
    """Return whether all pods of `home` fit on other nodes, and reserve the room. Best fit, largest pod first.

    Pods are assumed to tolerate the taints of `home` and no others.
    """
    tolerated = find_repelling_taints(home.taints) - find_repelling_taints([LOANED_TAINT])
    remaining = {
        name: gpus for name, gpus in free_gpus.items() if find_repelling_taints(nodes[name].taints) <= tolerated
    }
    for pod in sorted(pods, key=lambda pod: (-pod.gpus, pod.namespace, pod.name)):
        candidates = [(gpus, name) for name, gpus in remaining.items() if gpus >= pod.gpus]
        if not candidates:
            return False
        remaining[min(candidates)[1]] -= pod.gpus
    free_gpus.update(remaining)
    return True


def _is_lent(node: NodeView) -> bool:
    """Return whether we lent the node, by its label, or by its taint if someone removed the label."""
    return bool(node.loan) or (node.is_tainted and node.epoch > 0)


def _has_own_pods(pods: Iterable[PodView]) -> bool:
    return any(pod.is_ours for pod in pods)


logger = logging.getLogger(__name__)


class NodeLending:
    """Builder of API actions for lending steps. `cache` receives the responses ahead of the watch."""

    def __init__(self, cluster: KubernetesClient, cache: ClusterCache, *, epoch: Callable[[], int]) -> None:
        self._cluster = cluster
        self._cache = cache
        self._epoch = epoch

    def build_actions(self, steps: Iterable[LendingStep]) -> Iterator[ApiAction]:
        for step in steps:
            match step:
                case TaintNode(node=node, loan=loan):
                    yield ApiAction(f"lend node {node.name}", partial(self._taint, node, loan))
                case UntaintNode(node=node):
                    yield ApiAction(f"return node {node.name}", partial(self._untaint, node))
                case EvictPod(pod=pod):
                    yield ApiAction(f"evict pod {pod.namespace}/{pod.name}", partial(self._evict, pod))
                case UnplaceableNode(node=node, gpus=gpus):
                    logger.info(
                        "node %s is not lent yet: its inference pods (%d GPUs) do not fit on other nodes", node, gpus
                    )

    def delete_replica(self, replica: StandbyReplica) -> ApiAction:
        """Return the action that deletes a replica of inference, so that its owner starts another one."""
        return ApiAction(f"replace {replica.title}", partial(self._delete, replica))

    def _delete(self, replica: StandbyReplica) -> None:
        leftovers = self._cluster.delete(POD, replica.name, replica.namespace, uid=replica.uid)
        if leftovers is None:
            self._cache.assume_deleted(replica)
        else:
            self._cache.assume(POD, leftovers)
        logger.warning("deleted %s on node %s, so that it starts again", replica.title, replica.node)

    def _taint(self, node: NodeView, loan: Loan) -> None:
        foreign_taints = [dict(taint) for taint in node.taints if taint.get("key") != LOANED_TAINT_KEY]
        self._patch_node(node, [*foreign_taints, LOANED_TAINT], loan=loan.id)

    def _untaint(self, node: NodeView) -> None:
        self._patch_node(node, [dict(taint) for taint in node.taints if taint.get("key") != LOANED_TAINT_KEY])

    def _patch_node(self, node: NodeView, taints: list[Any], *, loan: str | None = None) -> None:
        """Patch taints, label and epoch.

        Taints are replaced as a list, so the resourceVersion protects changes by others.
        """
        if node.epoch > self._epoch():
            raise FencedError(
                f"node {node.name} was written in epoch {node.epoch}; this leader has epoch {self._epoch()}"
            )
        metadata = {"labels": {LOAN_LABEL: loan}, "annotations": {EPOCH_ANNOTATION: str(self._epoch())}}
        change = {"metadata": metadata, "spec": {"taints": taints or None}}
        changed = self._cluster.patch(NODE, node.name, change=change, resource_version=node.resource_version)
        self._cache.assume(NODE, changed)
        logger.info("node %s %s", node.name, f"is lent (loan {loan})" if loan else "is returned")

    def _evict(self, pod: PodView) -> None:
        if self._cluster.evict(pod.to_object_reference()) is EvictionResult.BLOCKED:
            logger.info("eviction of pod %s/%s is blocked by a PodDisruptionBudget; retrying", pod.namespace, pod.name)
