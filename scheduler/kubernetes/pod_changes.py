"""Which agent pods a job should have, and what is missing to get there. Pure.

A pod belongs to a job and a node and has that node's part of the job's GPUs. It outlives generations: a resize makes
and deletes only pods of nodes that change, so that the others' agents stay warm.

Binding a gang: all pods of a job's target are bound, or none is. Pure.

Kubernetes has no call that binds several pods at once, so a gang is bound only when every node has room for its pod,
and what was bound of it is let go again where one call fails (see executor).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from scheduler.domain.job import Job
from scheduler.kubernetes.api_objects import LABEL_MAX_LENGTH, truncate_name
from scheduler.kubernetes.node_view import NodeView
from scheduler.kubernetes.pod_view import PodView

MIN_GRACE_PERIOD_S = 1.0
"""Deleted with less, a pod's processes would be killed at once; an agent needs a moment to say its last word."""
_EXIT_GRACE_PERIOD_S = 10.0


@dataclass(frozen=True, slots=True)
class PodToCreate:
    """An agent pod to make: for `node`, with `gpus`; `name` follows from the job, so that it is made once."""

    job_id: str
    name: str
    node: str
    gpus: int


@dataclass(frozen=True, slots=True)
class PodToDelete:
    """A pod to delete. Its processes have `grace_s` to save and leave."""

    pod: PodView
    grace_period_s: float


@dataclass(frozen=True, slots=True)
class PodChanges:
    """`gang` are the pods of the job's target that there are, one a node; whole once each node has one, and no other
    pod of the job is still on the node of one that is to be bound: an agent is known by its job and its node, and two
    of them would be taken for one."""

    create: tuple[PodToCreate, ...] = ()
    delete: tuple[PodToDelete, ...] = ()
    gang: Mapping[str, PodView] | None = None
    is_gang_complete: bool = False


def compute_wanted_gpus(job: Job) -> dict[str, int]:
    """How many GPUs the job's pod on each node is to have."""
    return {} if job.is_ended else {node: len(indices) for node, indices in sorted(job.allocation.target.items())}


def plan_pod_changes(job: Job, pods: Iterable[PodView], now_s: float) -> PodChanges:
    """What to make and what to delete for this job, whose pods these are."""
    wanted, pods = compute_wanted_gpus(job), tuple(pods)
    gang: dict[str, PodView] = {}
    delete = []
    for pod in sorted(pods, key=_retention_key):
        if _matches_target(pod, job, wanted) and pod.target_node not in gang:
            gang[pod.target_node] = pod
        elif not pod.is_deleting:
            delete.append(PodToDelete(pod, _compute_grace_period_s(job, pod, now_s)))
    leaving = {pod.name for pod in pods if pod.is_deleting}
    make = tuple(
        PodToCreate(job.id, _choose_pod_name(job, number, leaving), node, gpus)
        for number, (node, gpus) in enumerate(wanted.items())
        if node not in gang
    )
    is_whole = bool(wanted) and not make and not _blocks_binding(pods, gang)
    staying = {pod.name for pod in pods} - leaving
    make = tuple(new for new in make if new.name not in staying)
    return PodChanges(make, tuple(delete), gang if wanted else None, is_whole)


def find_orphans(pods: Iterable[PodView], jobs: Mapping[str, Job]) -> tuple[PodToDelete, ...]:
    """Pods of ours whose job is gone, ended long ago or never known here."""
    left = (pod for pod in pods if pod.is_ours and pod.job_id not in jobs and not pod.is_deleting)
    return tuple(PodToDelete(pod, MIN_GRACE_PERIOD_S) for pod in left)


def find_stranded_pods(pods: Iterable[PodView], nodes: Container[str]) -> tuple[PodToDelete, ...]:
    """Pods of ours on nodes that are no more: nobody is left there to end them, so that they go without grace. A node
    that is only silent may still run them."""
    return tuple(PodToDelete(pod, 0.0) for pod in pods if pod.is_ours and pod.node and pod.node not in nodes)


def group_by_job(pods: Iterable[PodView]) -> dict[str, list[PodView]]:
    """Our own pods by job."""
    found: dict[str, list[PodView]] = {}
    for pod in pods:
        if pod.is_ours:
            found.setdefault(pod.job_id, []).append(pod)
    return found


def _choose_pod_name(job: Job, number: int, leaving: Container[str]) -> str:
    """It is the pod's host name too, which has to be a DNS label. A pod that is being deleted has its name for as long
    as it pleases somebody's finalizer."""
    first = f"-g{job.allocation.generation}-{number}"
    ends = (f"{first}-{again}" if again else first for again in count())
    names = (truncate_name(job.id, LABEL_MAX_LENGTH - len(end)) + end for end in ends)
    return next(name for name in names if name not in leaving)


def _blocks_binding(pods: Iterable[PodView], gang: Mapping[str, PodView]) -> bool:
    """Whether a pod of the job is still where another one of it is to be bound."""
    to_bind = {node for node, pod in gang.items() if not pod.node}
    return any(pod.holds_gpus and pod.node in to_bind for pod in pods)


def _matches_target(pod: PodView, job: Job, wanted: Mapping[str, int]) -> bool:
    """It can go on as one of the target's pods. One that ended can where it is this generation's own: it then shows how
    that generation ended, and stands until a decision has moved on."""
    if pod.is_deleting or wanted.get(pod.target_node) != pod.gpus:
        return False
    if pod.node not in ("", pod.target_node):
        return False
    return not pod.has_ended or pod.generation == job.allocation.generation


def _retention_key(pod: PodView) -> tuple[bool, int, str]:
    """A bound pod before one that is not, then the older one: what runs stays."""
    return not pod.node, pod.generation, pod.name


def _compute_grace_period_s(job: Job, pod: PodView, now_s: float) -> float:
    """Until the job has to have left, where its ranks may be at work."""
    if not pod.holds_gpus:
        return MIN_GRACE_PERIOD_S
    if job.is_ended:
        return _EXIT_GRACE_PERIOD_S
    leave_by_s = job.allocation.leave_by_s
    return _EXIT_GRACE_PERIOD_S if leave_by_s is None else max(MIN_GRACE_PERIOD_S, leave_by_s - now_s)


def count_held_gpus(pods: Sequence[PodView]) -> dict[str, int]:
    """GPUs by node that pods keep from others."""
    held: dict[str, int] = {}
    for pod in pods:
        if pod.holds_gpus and pod.gpus:
            held[pod.node] = held.get(pod.node, 0) + pod.gpus
    return held


@dataclass(frozen=True, slots=True)
class Gang:
    """Pods of one job that are to be bound together, each to the node that the decision names."""

    job_id: str
    pods: tuple[PodView, ...]


class FreeGpus:
    """GPUs that are left on each node while gangs are dealt out: mutable on purpose, for one round of it."""

    def __init__(self, nodes: Mapping[str, NodeView], held: Mapping[str, int]) -> None:
        self._left = {name: node.gpus - held.get(name, 0) for name, node in nodes.items() if node.is_ready}

    def reserve(self, pods: tuple[PodView, ...]) -> bool:
        """Take the room of all these pods, or of none where one node lacks it."""
        if any(self._left.get(pod.target_node, -1) < pod.gpus for pod in pods):
            return False
        for pod in pods:
            self._left[pod.target_node] -= pod.gpus
        return True


def select_gang_to_bind(job_id: str, changes: PodChanges, free_gpus: FreeGpus) -> Gang | None:
    """The job's pods that still have to be bound, if all of its pods are there and every node has room."""
    if not changes.is_gang_complete or changes.gang is None:
        return None
    unbound = tuple(pod for pod in changes.gang.values() if not pod.node)
    return Gang(job_id, unbound) if unbound and free_gpus.reserve(unbound) else None
