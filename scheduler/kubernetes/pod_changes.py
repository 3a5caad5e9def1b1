"""Agent pods of a job: which to create, delete and bind. Pure.

A pod belongs to one job and one node and has that node's GPUs of the job. It survives generations: a resize replaces
only pods of changed nodes, so that other agents stay warm. A gang is bound as a whole. Kubernetes has no call that
binds several pods, so each node must have room first, and partial bindings are undone (see job_objects).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from scheduler.domain.host_ports import find_amount
from scheduler.domain.job import Job
from scheduler.domain.quantities import Resources
from scheduler.kubernetes.api_objects import LABEL_MAX_LENGTH, truncate_name
from scheduler.kubernetes.node_view import NodeView
from scheduler.kubernetes.pod_view import PodView

MIN_GRACE_PERIOD_S = 1.0
"""With less, kubelet kills the processes at once. An agent needs a moment to send its last report."""
_EXIT_GRACE_PERIOD_S = 10.0


@dataclass(frozen=True, slots=True)
class PodToCreate:
    """An agent pod to create. The name is derived from the job, so that a repeated creation fails."""

    job_id: str
    name: str
    node: str
    gpus: int


@dataclass(frozen=True, slots=True)
class PodToDelete:
    """A pod to delete. Its processes have `grace_period_s` to save and exit."""

    pod: PodView
    grace_period_s: float


@dataclass(frozen=True, slots=True)
class PodChanges:
    """Changes to the pods of one job.

    `gang` are existing pods of the target, by node. The gang is complete once each node has a pod and no other pod of
    the job occupies a node that is still to be bound. Agents are identified by job and node, so there must not be two.
    """

    create: tuple[PodToCreate, ...] = ()
    delete: tuple[PodToDelete, ...] = ()
    gang: Mapping[str, PodView] | None = None
    is_gang_complete: bool = False


def compute_wanted_gpus(job: Job) -> dict[str, int]:
    """Return the GPUs that the job's pod on each node should have."""
    return {} if job.is_ended else {node: len(indices) for node, indices in sorted(job.allocation.target.items())}


def plan_pod_changes(job: Job, pods: Iterable[PodView], now_s: float) -> PodChanges:
    """Return the pods of this job to create and to delete. `pods` are its current pods."""
    wanted_gpus, pods = compute_wanted_gpus(job), tuple(pods)
    gang: dict[str, PodView] = {}
    delete = []
    for pod in sorted(pods, key=_retention_key):
        if _matches_target(pod, job, wanted_gpus) and pod.target_node not in gang:
            gang[pod.target_node] = pod
        elif not pod.is_deleting:
            delete.append(PodToDelete(pod, _compute_grace_period_s(job, pod, now_s)))
    leaving = {pod.name for pod in pods if pod.is_deleting}
    create = tuple(
        PodToCreate(job.id, _choose_pod_name(job, number, leaving), node, gpus)
        for number, (node, gpus) in enumerate(wanted_gpus.items())
        if node not in gang
    )
    is_complete = bool(wanted_gpus) and not create and not _blocks_binding(pods, gang)
    staying = {pod.name for pod in pods} - leaving
    create = tuple(new for new in create if new.name not in staying)
    return PodChanges(create, tuple(delete), gang if wanted_gpus else None, is_complete)


def find_orphans(pods: Iterable[PodView], jobs: Mapping[str, Job]) -> tuple[PodToDelete, ...]:
    """Return pods of unknown jobs."""
    orphans = (pod for pod in pods if pod.is_ours and pod.job_id not in jobs and not pod.is_deleting)
    return tuple(PodToDelete(pod, MIN_GRACE_PERIOD_S) for pod in orphans)


def find_stranded_pods(pods: Iterable[PodView], nodes: Container[str]) -> tuple[PodToDelete, ...]:
    """Return pods on nodes that no longer exist, to delete without grace period.

    Pods on unreachable nodes may still run.
    """
    return tuple(PodToDelete(pod, 0.0) for pod in pods if pod.is_ours and pod.node and pod.node not in nodes)


def group_by_job(pods: Iterable[PodView]) -> dict[str, list[PodView]]:
    """Return Ebbtide's pods by job."""
    found: dict[str, list[PodView]] = {}
    for pod in pods:
        if pod.is_ours:
            found.setdefault(pod.job_id, []).append(pod)
    return found


def _choose_pod_name(job: Job, number: int, leaving: Container[str]) -> str:
    """Return a free pod name. It is also the host name, so it must be a DNS label.

    A terminating pod keeps its name for as long as it has finalizers.
    """
    first = f"-g{job.allocation.generation}-{number}"
    suffixes = (f"{first}-{retry}" if retry else first for retry in count())
    names = (truncate_name(job.id, LABEL_MAX_LENGTH - len(suffix)) + suffix for suffix in suffixes)
    return next(name for name in names if name not in leaving)


def _blocks_binding(pods: Iterable[PodView], gang: Mapping[str, PodView]) -> bool:
    """Return whether a pod of the job still occupies a node where another one is to be bound."""
    to_bind = {node for node, pod in gang.items() if not pod.node}
    return any(pod.holds_gpus and pod.node in to_bind for pod in pods)


def _matches_target(pod: PodView, job: Job, wanted_gpus: Mapping[str, int]) -> bool:
    """Return whether the pod can serve the target.

    An ended pod of the current generation can, because it shows how the generation ended until the next decision.
    """
    if pod.is_deleting or wanted_gpus.get(pod.target_node) != pod.gpus:
        return False
    if pod.node not in ("", pod.target_node):
        return False
    return not pod.has_ended or pod.generation == job.allocation.generation


def _retention_key(pod: PodView) -> tuple[bool, int, str]:
    """Sort key: bound pods first, then older ones, so that running pods are retained."""
    return not pod.node, pod.generation, pod.name


def _compute_grace_period_s(job: Job, pod: PodView, now_s: float) -> float:
    """Return the time until the job must have left, if its ranks may be running."""
    if not pod.holds_gpus:
        return MIN_GRACE_PERIOD_S
    if job.is_ended:
        return _EXIT_GRACE_PERIOD_S
    leave_by_s = job.allocation.leave_by_s
    return _EXIT_GRACE_PERIOD_S if leave_by_s is None else max(MIN_GRACE_PERIOD_S, leave_by_s - now_s)


def count_held_gpus(pods: Sequence[PodView]) -> dict[str, int]:
    """Return the GPUs that pods hold, by node."""
    held: dict[str, int] = {}
    for pod in pods:
        if pod.holds_gpus and pod.gpus:
            held[pod.node] = held.get(pod.node, 0) + pod.gpus
    return held


@dataclass(frozen=True, slots=True)
class Gang:
    """Pods of one job to bind together, each to its target node."""

    job_id: str
    pods: tuple[PodView, ...]


class FreeGpus:
    """Free GPUs and other resources by node, for one round of bindings. `requests` are those of all bound pods."""

    def __init__(
        self, nodes: Mapping[str, NodeView], held: Mapping[str, int], requests: Mapping[str, Resources] | None = None
    ) -> None:
        self._free_gpus = {name: node.gpus - held.get(name, 0) for name, node in nodes.items() if node.is_ready}
        self._nodes = nodes
        self._requests = {name: dict(amounts) for name, amounts in (requests or {}).items()}

    def reserve(self, pods: tuple[PodView, ...]) -> bool:
        """Reserve room for all pods, or for none if a node lacks it."""
        if any(self._free_gpus.get(pod.target_node, -1) < pod.gpus or not self._has_room(pod) for pod in pods):
            return False
        for pod in pods:
            self._free_gpus[pod.target_node] -= pod.gpus
            requested = self._requests.setdefault(pod.target_node, {})
            for name, amount in pod.requests:
                requested[name] = requested.get(name, 0) + amount
        return True

    def _has_room(self, pod: PodView) -> bool:
        return find_lacking_resource(self._nodes[pod.target_node], self._requests.get(pod.target_node, {}), pod) == ""


def find_lacking_resource(node: NodeView, requested: Mapping[str, int], pod: PodView) -> str:
    """Return a resource of which the node has too little left for the pod, or an empty string."""
    if node.allocatable is None:
        return ""
    allocatable = dict(node.allocatable)
    return next(
        (name for name, amount in pod.requests if amount > find_amount(allocatable, name) - requested.get(name, 0)), ""
    )


def select_gang_to_bind(job_id: str, changes: PodChanges, free_gpus: FreeGpus) -> Gang | None:
    """Return the job's unbound pods, if all its pods exist and every node has room."""
    if not changes.is_gang_complete or changes.gang is None:
        return None
    unbound = tuple(pod for pod in changes.gang.values() if not pod.node)
    return Gang(job_id, unbound) if unbound and free_gpus.reserve(unbound) else None
