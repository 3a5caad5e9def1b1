"""Which agent pods a job should have, and what is missing to get there. Pure.

A pod belongs to a job and a node and has that node's part of the job's GPUs. It outlives generations: a resize makes
and deletes only pods of nodes that change, so that the others' agents stay warm.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from scheduler.domain.job import Job
from scheduler.k8s.objects import LABEL_CHARACTERS, within
from scheduler.k8s.pod_facts import PodFacts

GRACE_S_MIN = 1.0
"""Deleted with less, a pod's processes would be killed at once; an agent needs a moment to say its last word."""
_GOODBYE_S = 10.0


@dataclass(frozen=True, slots=True)
class NewPod:
    """An agent pod to make: for `node`, with `gpus`; `name` follows from the job, so that it is made once."""

    job_id: str
    name: str
    node: str
    gpus: int


@dataclass(frozen=True, slots=True)
class OldPod:
    """A pod to delete. Its processes have `grace_s` to save and leave."""

    pod: PodFacts
    grace_s: float


@dataclass(frozen=True, slots=True)
class PodChanges:
    """`gang` are the pods of the job's target that there are, one a node; whole once each node has one, and no other
    pod of the job is still on the node of one that is to be bound: an agent is known by its job and its node, and two
    of them would be taken for one."""

    make: tuple[NewPod, ...] = ()
    delete: tuple[OldPod, ...] = ()
    gang: Mapping[str, PodFacts] | None = None
    is_gang_whole: bool = False


def wanted_gpus(job: Job) -> dict[str, int]:
    """How many GPUs the job's pod on each node is to have."""
    return {} if job.is_ended else {node: len(indices) for node, indices in sorted(job.allocation.target.items())}


def pod_changes(job: Job, pods: Iterable[PodFacts], now_s: float) -> PodChanges:
    """What to make and what to delete for this job, whose pods these are."""
    wanted, pods = wanted_gpus(job), tuple(pods)
    gang: dict[str, PodFacts] = {}
    delete = []
    for pod in sorted(pods, key=_oldest_first):
        if _fits(pod, job, wanted) and pod.wanted_node not in gang:
            gang[pod.wanted_node] = pod
        elif not pod.is_deleting:
            delete.append(OldPod(pod, _grace_s(job, pod, now_s)))
    leaving = {pod.name for pod in pods if pod.is_deleting}
    make = tuple(
        NewPod(job.id, _pod_name(job, number, leaving), node, gpus)
        for number, (node, gpus) in enumerate(wanted.items())
        if node not in gang
    )
    is_whole = bool(wanted) and not make and not _is_in_the_way(pods, gang)
    staying = {pod.name for pod in pods} - leaving
    make = tuple(new for new in make if new.name not in staying)
    return PodChanges(make, tuple(delete), gang if wanted else None, is_whole)


def orphans(pods: Iterable[PodFacts], jobs: Mapping[str, Job]) -> tuple[OldPod, ...]:
    """Pods of ours whose job is gone, ended long ago or never known here."""
    left = (pod for pod in pods if pod.is_ours and pod.job_id not in jobs and not pod.is_deleting)
    return tuple(OldPod(pod, GRACE_S_MIN) for pod in left)


def stranded(pods: Iterable[PodFacts], nodes: Container[str]) -> tuple[OldPod, ...]:
    """Pods of ours on nodes that are no more: nobody is left there to end them, so that they go without grace. A node
    that is only silent may still run them."""
    return tuple(OldPod(pod, 0.0) for pod in pods if pod.is_ours and pod.node and pod.node not in nodes)


def by_job(pods: Iterable[PodFacts]) -> dict[str, list[PodFacts]]:
    """Our own pods by job."""
    found: dict[str, list[PodFacts]] = {}
    for pod in pods:
        if pod.is_ours:
            found.setdefault(pod.job_id, []).append(pod)
    return found


def _pod_name(job: Job, number: int, leaving: Container[str]) -> str:
    """It is the pod's host name too, which has to be a DNS label. A pod that is being deleted has its name for as long
    as it pleases somebody's finalizer."""
    first = f"-g{job.allocation.generation}-{number}"
    ends = (f"{first}-{again}" if again else first for again in count())
    names = (within(job.id, LABEL_CHARACTERS - len(end)) + end for end in ends)
    return next(name for name in names if name not in leaving)


def _is_in_the_way(pods: Iterable[PodFacts], gang: Mapping[str, PodFacts]) -> bool:
    """Whether a pod of the job is still where another one of it is to be bound."""
    to_bind = {node for node, pod in gang.items() if not pod.node}
    return any(pod.holds_gpus and pod.node in to_bind for pod in pods)


def _fits(pod: PodFacts, job: Job, wanted: Mapping[str, int]) -> bool:
    """It can go on as one of the target's pods. One that ended can where it is this generation's own: it then shows how
    that generation ended, and stands until a decision has moved on."""
    if pod.is_deleting or wanted.get(pod.wanted_node) != pod.gpus:
        return False
    if pod.node not in ("", pod.wanted_node):
        return False
    return not pod.has_ended or pod.generation == job.allocation.generation


def _oldest_first(pod: PodFacts) -> tuple[bool, int, str]:
    """A bound pod before one that is not, then the older one: what runs stays."""
    return not pod.node, pod.generation, pod.name


def _grace_s(job: Job, pod: PodFacts, now_s: float) -> float:
    """Until the job has to have left, where its ranks may be at work."""
    if not pod.holds_gpus:
        return GRACE_S_MIN
    if job.is_ended:
        return _GOODBYE_S
    leave_by_s = job.allocation.leave_by_s
    return _GOODBYE_S if leave_by_s is None else max(GRACE_S_MIN, leave_by_s - now_s)


def gpus_held(pods: Sequence[PodFacts]) -> dict[str, int]:
    """GPUs by node that pods keep from others."""
    held: dict[str, int] = {}
    for pod in pods:
        if pod.holds_gpus and pod.gpus:
            held[pod.node] = held.get(pod.node, 0) + pod.gpus
    return held
