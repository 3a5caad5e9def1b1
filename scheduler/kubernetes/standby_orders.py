"""Orders to standby replicas in pods: which of them are idle now, from the desired loans and the cluster. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from ipaddress import IPv6Address, ip_address

from scheduler.domain.fleet import LoanState, Node
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.standby import Standby, StandbyMode
from scheduler.executors.standby_replicas import StandbyOrder, StandbyReplica
from scheduler.kubernetes.api_objects import SERVING_LABEL
from scheduler.kubernetes.cluster_cache import ClusterView
from scheduler.kubernetes.node_lending import is_closed_to_inference
from scheduler.kubernetes.pod_view import PodView


def plan_standby_orders(desired: Snapshot, view: ClusterView) -> dict[str, StandbyOrder]:
    """Return the order for each node that is up, of pools with a standby.

    Replicas are idle once a lent node is closed to inference, until no pod of a job holds GPUs of it any more.
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
        usable = [pod for pod in matching if not pod.gpus]
        is_lent = loan is not None and loan.state in (LoanState.ACTIVE, LoanState.RECALLED)
        orders[name] = StandbyOrder(
            node=name,
            standby=standby,
            asleep=is_closed_to_inference(loan, seen) or name in in_use,
            replicas=tuple(_to_replica(pod, standby) for pod in usable),
            absence="" if is_lent else _find_obstacle(standby, node, matching, usable),
            is_offered=loan is not None and loan.state is LoanState.OFFERED,
            cold_start_s=rules.cold_start_s,
        )
    return orders


def _to_replica(pod: PodView, standby: Standby) -> StandbyReplica:
    return StandbyReplica(
        uid=pod.uid,
        node=pod.node,
        title=f"pod {pod.namespace}/{pod.name}",
        url=_build_url(pod.address, standby.port),
        is_running=bool(pod.address),
        is_ready=pod.is_ready,
        namespace=pod.namespace,
        name=pod.name,
    )


def _build_url(address: str, port: int) -> str:
    """Return the base URL of the engine in a pod, or an empty string if its address is no IP address."""
    try:
        parsed = ip_address(address)
    except ValueError:
        return ""
    return f"http://[{parsed}]:{port}" if isinstance(parsed, IPv6Address) else f"http://{parsed}:{port}"


def _group_by_node(pods: Sequence[PodView]) -> Mapping[str, list[PodView]]:
    """Return the pods that run or start, by node."""
    grouped: defaultdict[str, list[PodView]] = defaultdict(list)
    for pod in pods:
        if pod.holds_gpus and not pod.is_deleting:
            grouped[pod.node].append(pod)
    return grouped


def _find_obstacle(standby: Standby, node: Node, matching: Sequence[PodView], usable: Sequence[PodView]) -> str:
    """Return why the node cannot be lent with its replicas, or an empty string."""
    if standby.url:
        return "lending.standby.url is for machines. Set lending.standby.namespace and selector"
    return standby.find_node_obstacle(node.gpus, node.gpu_memory_bytes) or _describe_absence(standby, matching, usable)


def _describe_absence(standby: Standby, matching: Sequence[PodView], usable: Sequence[PodView]) -> str:
    """Return why no replica on the node can be idle, or an empty string."""
    labels = ",".join(f"{name}={value}" for name, value in sorted(standby.selector.items()))
    if not matching:
        return f"no pod with labels {labels} in namespace {standby.namespace} runs on the node"
    if not usable:
        pod = matching[0]
        return (
            f"pod {pod.namespace}/{pod.name} requests {pod.gpus} GPUs from Kubernetes, which keeps them while it "
            "is idle. Let standby replicas request none"
        )
    starting = next((pod for pod in usable if not pod.address), None)
    if starting is not None:
        return f"pod {starting.namespace}/{starting.name} does not run yet"
    unlabelled = next((pod for pod in usable if SERVING_LABEL not in pod.labels), None)
    if standby.mode is StandbyMode.WARM and unlabelled is not None:
        return (
            f"pod {unlabelled.namespace}/{unlabelled.name} has no label {SERVING_LABEL}. Add it to its template and to "
            "the selectors of its Services, with the value true"
        )
    return ""
