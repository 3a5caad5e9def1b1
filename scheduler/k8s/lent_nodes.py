"""Lending and returning nodes: what is missing between the loans that were decided and the nodes as they are. Pure.

A lent node bears a taint, which keeps inference off it, and a label with its loan. Inference pods leave it by eviction,
so that their disruption budgets count. A node without our label, or without our taint and our epoch, is not lent by us
and is never touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from scheduler.domain.loan import Loan, LoanState
from scheduler.domain.snapshot import Snapshot
from scheduler.k8s.kinds import LOANED_TAINT
from scheduler.k8s.node_view import NodeView
from scheduler.k8s.pod_facts import PodFacts
from scheduler.k8s.taints import repelling


@dataclass(frozen=True, slots=True)
class TaintNode:
    node: NodeView
    loan: Loan


@dataclass(frozen=True, slots=True)
class UntaintNode:
    node: NodeView


@dataclass(frozen=True, slots=True)
class EvictPod:
    pod: PodFacts


@dataclass(frozen=True, slots=True)
class Unplaceable:
    """An offered node whose inference pods fit nowhere else: it stays as it is."""

    node: str
    gpus: int


LendingStep = TaintNode | UntaintNode | EvictPod | Unplaceable


def lending_steps(
    desired: Snapshot, nodes: Mapping[str, NodeView], pods: Iterable[PodFacts]
) -> tuple[LendingStep, ...]:
    """The next step of each loan and of each node that is on its way home."""
    on_node: dict[str, list[PodFacts]] = {}
    for pod in pods:
        if pod.holds_gpus:
            on_node.setdefault(pod.node, []).append(pod)
    steps: list[LendingStep] = []
    room = {pool: _room(pool, desired, nodes, on_node) for pool in {loan.pool for loan in desired.loans.values()}}
    _keep_promises(desired, nodes, on_node, room)
    for name, loan in sorted(desired.loans.items()):
        if loan.is_live and name in nodes:
            steps.extend(_lend(loan, nodes[name], on_node.get(name, []), room[loan.pool], nodes))
    for name, node in sorted(nodes.items()):
        known = desired.loans.get(name)
        is_on_loan = known is not None and known.is_live
        if _was_lent_by_us(node) and not is_on_loan and not _ours(on_node.get(name, [])):
            steps.append(UntaintNode(node))
    return tuple(steps)


def is_closed_to_inference(loan: Loan | None, node: NodeView) -> bool:
    """Whether inference can put nothing more on a node that is on loan."""
    return loan is not None and loan.is_live and node.is_tainted and node.loan == loan.id


def _lend(
    loan: Loan, node: NodeView, pods: Sequence[PodFacts], room: dict[str, int], nodes: Mapping[str, NodeView]
) -> Iterable[LendingStep]:
    staying = [pod for pod in _of_others(pods) if not pod.is_deleting]
    closed = is_closed_to_inference(loan, node)
    if loan.state is LoanState.OFFERED and not closed and not _place(staying, node, room, nodes):
        return [Unplaceable(node.name, sum(pod.gpus for pod in staying))]
    if not closed:
        return [TaintNode(node, loan)]
    if loan.state is LoanState.OFFERED:
        return [EvictPod(pod) for pod in staying]
    return []


def _keep_promises(
    desired: Snapshot,
    nodes: Mapping[str, NodeView],
    on_node: Mapping[str, Sequence[PodFacts]],
    room: Mapping[str, dict[str, int]],
) -> None:
    """Take the room of pods that have to leave their nodes already. A pod that is being deleted counts too: what takes
    its place may not be bound yet. Where they do not all fit, nobody else's pods are sent after the same room."""
    for name, loan in sorted(desired.loans.items()):
        is_leaving = loan.state is LoanState.OFFERED and name in nodes and is_closed_to_inference(loan, nodes[name])
        if is_leaving and not _place(_of_others(on_node.get(name, ())), nodes[name], room[loan.pool], nodes):
            room[loan.pool].clear()


def _of_others(pods: Iterable[PodFacts]) -> list[PodFacts]:
    return [pod for pod in pods if not pod.is_ours and pod.gpus]


def _room(
    pool: str, desired: Snapshot, nodes: Mapping[str, NodeView], on_node: Mapping[str, Sequence[PodFacts]]
) -> dict[str, int]:
    """GPUs that are free for inference on each node of the pool that is neither lent nor cordoned."""
    room = {}
    for name, node in desired.nodes.items():
        view, loan = nodes.get(name), desired.loans.get(name)
        on_loan = loan is not None and loan.is_live
        if node.pool == pool and view is not None and view.is_ready and not (view.is_cordoned or view.loan or on_loan):
            room[name] = view.gpus - sum(pod.gpus for pod in on_node.get(name, ()))
    return room


def _place(pods: Iterable[PodFacts], home: NodeView, room: dict[str, int], nodes: Mapping[str, NodeView]) -> bool:
    """Whether all these pods of `home` find room elsewhere, the largest first, each where least would be left; takes
    the room. What they tolerate is known of the taints of `home` alone."""
    borne = repelling(home.taints) - repelling([LOANED_TAINT])
    left = {name: gpus for name, gpus in room.items() if repelling(nodes[name].taints) <= borne}
    for pod in sorted(pods, key=lambda pod: (-pod.gpus, pod.namespace, pod.name)):
        fitting = [(gpus, name) for name, gpus in left.items() if gpus >= pod.gpus]
        if not fitting:
            return False
        left[min(fitting)[1]] -= pod.gpus
    room.update(left)
    return True


def _was_lent_by_us(node: NodeView) -> bool:
    """By our label, or by our taint where somebody has taken the label away."""
    return bool(node.loan) or (node.is_tainted and node.epoch > 0)


def _ours(pods: Iterable[PodFacts]) -> bool:
    return any(pod.is_ours for pod in pods)
