"""Orders to standby replicas: which of them sleep now, from the desired loans and the cluster. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scheduler.domain.fleet import LoanState
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.standby import Standby
from scheduler.kubernetes.cluster_cache import ClusterView
from scheduler.kubernetes.node_lending import is_closed_to_inference
from scheduler.kubernetes.pod_view import PodView


@dataclass(frozen=True, slots=True)
class StandbyOrder:
    """An order to the replicas on one node: to sleep, or to be awake.

    Args:
        absence: why the node has no replica that can sleep; empty if it has.
        is_offered: whether the loan of the node only begins, so that a replica that fails to sleep may stay.
        cold_start_s: declared time until a replica that did not wake is replaced.
    """

    node: str
    standby: Standby
    asleep: bool
    replicas: tuple[PodView, ...] = ()
    absence: str = ""
    is_offered: bool = False
    cold_start_s: float = 0.0


def plan_standby_orders(desired: Snapshot, view: ClusterView) -> dict[str, StandbyOrder]:
    """Return the order for each node that is up, of pools with a standby.

    Replicas sleep once a lent node is closed to inference, until no pod of a job holds GPUs of it any more.
    """
    standbys = {name: pool.lending for name, pool in desired.pools.items() if pool.lending.standby is not None}
    if not standbys:
        return {}
    in_use = {pod.node for pod in view.pods if pod.is_ours and pod.holds_gpus}
    candidates = _group_by_node(view.standby_candidates)
    orders = {}
    for name, node in desired.nodes.items():
        rules, seen = standbys.get(node.pool), view.nodes.get(name)
        if rules is None or rules.standby is None or seen is None or not seen.is_ready:
            continue
        loan, standby = desired.loans.get(name), rules.standby
        matching = [pod for pod in candidates.get(name, ()) if standby.matches(pod.namespace, pod.labels)]
        replicas = tuple(pod for pod in matching if not pod.gpus)
        is_lent = loan is not None and loan.state in (LoanState.ACTIVE, LoanState.RECALLED)
        orders[name] = StandbyOrder(
            node=name,
            standby=standby,
            asleep=is_closed_to_inference(loan, seen) or name in in_use,
            replicas=replicas,
            absence="" if is_lent else _describe_absence(standby, matching, replicas),
            is_offered=loan is not None and loan.state is LoanState.OFFERED,
            cold_start_s=rules.cold_start_s,
        )
    return orders


def _group_by_node(pods: Sequence[PodView]) -> Mapping[str, list[PodView]]:
    """Return the pods that run or start, by node."""
    grouped: defaultdict[str, list[PodView]] = defaultdict(list)
    for pod in pods:
        if pod.holds_gpus and not pod.is_deleting:
            grouped[pod.node].append(pod)
    return grouped


def _describe_absence(standby: Standby, matching: Sequence[PodView], replicas: Sequence[PodView]) -> str:
    """Return why no replica on the node can sleep, or an empty string."""
    labels = ",".join(f"{name}={value}" for name, value in sorted(standby.selector.items()))
    if not matching:
        return f"no pod with labels {labels} in namespace {standby.namespace} runs on the node"
    if not replicas:
        pod = matching[0]
        return (
            f"pod {pod.namespace}/{pod.name} requests {pod.gpus} GPUs from Kubernetes, which keeps them while it "
            "sleeps. Let standby replicas request none"
        )
    starting = next((pod for pod in replicas if not pod.address), None)
    return "" if starting is None else f"pod {starting.namespace}/{starting.name} does not run yet"
