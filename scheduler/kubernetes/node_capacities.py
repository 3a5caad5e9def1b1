"""What the nodes of the cluster offer to jobs besides GPUs, and what they have left for pods to bind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from scheduler.domain.host_ports import find_amount, format_host_port
from scheduler.domain.node_selection import Toleration
from scheduler.domain.placement_record import PodRefusal
from scheduler.domain.pod_requirements import NodeCapacity
from scheduler.domain.quantities import Resources, format_resource, freeze_resources, sum_resources
from scheduler.domain.snapshot import Snapshot
from scheduler.kubernetes.cluster_cache import ClusterView
from scheduler.kubernetes.node_view import NodeView, find_untolerated_taints
from scheduler.kubernetes.pod_view import PodView

_Parts = tuple[NodeView, Resources, tuple[Toleration, ...]]


class NodeCapacities:
    """Capacities of nodes. An unchanged node keeps its object, so that comparisons are cheap."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[_Parts, NodeCapacity]] = {}

    def find(self, desired: Snapshot, view: ClusterView) -> Mapping[str, NodeCapacity]:
        """Return the capacity of each node of `desired` that the cluster has and that reports what it can allocate."""
        foreign = sum_foreign_requests(desired, view)
        found: dict[str, tuple[_Parts, NodeCapacity]] = {}
        for name, node in desired.nodes.items():
            seen = view.nodes.get(name)
            if seen is None or seen.allocatable is None:
                continue
            parts = (seen, foreign.get(name, ()), view.tolerations.get(node.pool, ()))
            known = self._known.get(name)
            if known is None or not _are_same(known[0], parts):
                capacity = _build_capacity(*parts)
                known = (parts, node.capacity if node.capacity == capacity else capacity)
            found[name] = known
        self._known = found
        return {name: capacity for name, (_, capacity) in found.items()}


def sum_foreign_requests(desired: Snapshot, view: ClusterView) -> Mapping[str, Resources]:
    """Return the requests, by node, of pods that belong to no job, and the memory that standby replicas keep."""
    foreign = (pod for pod in view.pods if pod.job_id not in desired.jobs)
    requests = _add_requests(view.other_requests, foreign)
    kept = _sum_kept_memory(desired, view)
    added = {node: sum_resources([requests.get(node, ()), (("memory", memory),)]) for node, memory in kept.items()}
    return {**requests, **{node: freeze_resources(resources) for node, resources in added.items()}}


def _sum_kept_memory(desired: Snapshot, view: ClusterView) -> Mapping[str, int]:
    """Return the memory that standby replicas keep beyond their requests, by node."""
    requested: dict[str, int] = {}
    declared: dict[str, int] = {}
    standbys = {name: pool.lending.standby for name, pool in desired.pools.items()}
    for pod in view.standby_candidates if any(standbys.values()) else ():
        node = desired.nodes.get(pod.node)
        standby = None if node is None else standbys[node.pool]
        if standby is not None and not pod.has_ended and standby.matches(pod.namespace, pod.labels):
            requested[pod.node] = requested.get(pod.node, 0) + dict(pod.requests).get("memory", 0)
            declared[pod.node] = standby.host_memory_bytes
    return {node: memory - requested[node] for node, memory in declared.items() if memory > requested[node]}


def sum_all_requests(view: ClusterView) -> Mapping[str, Resources]:
    """Return the requests of all pods by node."""
    return _add_requests(view.other_requests, view.pods)


def find_shortages(desired: Snapshot, view: ClusterView) -> Mapping[str, PodRefusal]:
    """Return nodes where foreign pods and the decided jobs request more than there is, with the reason.

    An unbound pod there can never be bound. Pods may request more than their template, if a webhook adds to them.
    """
    unbound = {pod.target_node for pod in view.pods if pod.is_ours and not pod.node and not pod.has_ended}
    if not unbound:
        return {}
    own = {(pod.job_id, pod.target_node): pod.requests for pod in view.pods if pod.is_ours and not pod.is_deleting}
    foreign = sum_foreign_requests(desired, view)
    needed = {node: [foreign.get(node, ())] for node in unbound}
    for job in desired.jobs.values():
        for node, indices in job.allocation.target.items():
            if node in needed:
                expected = tuple(job.pod_requirements.compute_requests(len(indices)).items())
                needed[node].append(own.get((job.id, node), expected))
    shortages = ((node, _find_shortage(view.nodes.get(node), sum_resources(parts))) for node, parts in needed.items())
    return {node: shortage for node, shortage in shortages if shortage is not None}


def _find_shortage(node: NodeView | None, needed: Mapping[str, int]) -> PodRefusal | None:
    if node is None or node.allocatable is None:
        return None
    allocatable = dict(node.allocatable)
    for name, amount in needed.items():
        if amount > find_amount(allocatable, name):
            if port := format_host_port(name):
                return PodRefusal(node.name, "NodePorts", f"more than one pod there needs {port}")
            have = format_resource(name, allocatable.get(name, 0))
            message = f"pods that are there or decided need {format_resource(name, amount)}; it has {have}"
            return PodRefusal(node.name, f"OutOf{name}", message)
    return None


def _add_requests(base: Mapping[str, Resources], pods: Iterable[PodView]) -> Mapping[str, Resources]:
    parts: dict[str, list[Resources]] = {}
    for pod in pods:
        if pod.node and not pod.has_ended:
            parts.setdefault(pod.node, [base.get(pod.node, ())]).append(pod.requests)
    return {**base, **{node: freeze_resources(sum_resources(requests)) for node, requests in parts.items()}}


def _are_same(known: _Parts, parts: _Parts) -> bool:
    return known[0] is parts[0] and known[1] == parts[1] and known[2] == parts[2]


def _build_capacity(seen: NodeView, requested: Resources, tolerations: tuple[Toleration, ...]) -> NodeCapacity:
    return NodeCapacity(
        allocatable=seen.allocatable or (),
        requested=requested,
        labels=tuple(sorted(seen.labels.items())),
        taints=find_untolerated_taints(seen.taints, tolerations),
    )
