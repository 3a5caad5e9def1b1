"""A random matrix of jobs and pods of others, for any cluster whose kubelets are strict."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any, Protocol

from scheduler.domain.commands import CancelJob, CommandBody, SubmitJob
from scheduler.domain.decisions import Reason, ReasonCode
from scheduler.domain.job import Job
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.tick_report import Violation
from scheduler.kubernetes.agent_injection import AgentImage
from scheduler.kubernetes.api_objects import (
    GENERATION_LABEL,
    GPU_RESOURCE,
    JOB_LABEL,
    NODE_LABEL,
    Object,
    annotations_of,
    labels_of,
)
from scheduler.kubernetes.manifests import ManifestContext, build_agent_pod
from scheduler.kubernetes.pod_changes import PodToCreate
from scheduler.kubernetes.resources.elastic_job_status import build_job_status
from scheduler.kubernetes.resources.meta import NODES_ADMIT_PODS
from scheduler.scheduling.explanation import explain
from tests.kubernetes.pod_admission import Rejection, find_rejection, find_scheduling_misfit
from tests.random_pods import CLAIMS, LOST_CLAIM, ONCE_CLAIM, RandomNode, make_foreign_pod, make_job, make_node

FOREIGN_SCHEDULER = "nobody"
DRAIN_STEPS = 600
REJECTED_SHARE_MAX = 0.01
HOPELESS_MAX = 60
CONDITION_STEPS_MAX = 20
"""Steps in which a rejection must have become a condition. A real kubelet and its watch take more than one."""
HOPELESS = (ReasonCode.NO_FEASIBLE_NODE, ReasonCode.VOLUME_NOT_READY)


class PodWorld(Protocol):
    """A cluster under a controller. `sent` counts the commands, `waiting` are the reasons of the last tick."""

    namespace: str
    sent: int
    waiting: dict[str, Reason]
    violations: list[Violation]

    @property
    def snapshot(self) -> Snapshot: ...

    @property
    def rejections(self) -> Sequence[tuple[Object, Rejection]]: ...

    @property
    def admitted_count(self) -> int: ...

    def add_random_node(self, node: RandomNode) -> None: ...

    def add_claim(self, name: str, zones: Sequence[str] = ()) -> None: ...

    def send(self, body: CommandBody) -> None: ...

    def list_nodes(self) -> list[Object]: ...

    def list_pods(self) -> list[Object]: ...

    def create_pod(self, pod: Object) -> None: ...

    def delete_pod(self, name: str) -> None: ...

    def step(self) -> Any: ...


def live_jobs(world: PodWorld) -> list[Job]:
    return [job for job in world.snapshot.jobs.values() if not job.is_ended]


def is_live(pod: Object) -> bool:
    return pod["status"].get("phase") not in ("Succeeded", "Failed")


def add_foreign_pod(world: PodWorld, rng: Random, number: int) -> None:
    """Bind a pod of others where the Kubernetes scheduler would."""
    pod, node = make_foreign_pod(rng, number, namespace=world.namespace), rng.choice(world.list_nodes())
    name = node["metadata"]["name"]
    held = [each for each in world.list_pods() if each["spec"].get("nodeName") == name and is_live(each)]
    if find_rejection(pod, node, held) is None and not find_scheduling_misfit(pod, node):
        pod["spec"]["nodeName"] = name
        world.create_pod(pod)


def remove_foreign_pod(world: PodWorld, rng: Random) -> None:
    others = [pod for pod in world.list_pods() if pod["spec"].get("schedulerName") == FOREIGN_SCHEDULER]
    if others:
        world.delete_pod(rng.choice(others)["metadata"]["name"])


def cancel_hopeless(world: PodWorld) -> None:
    """Cancel jobs that wait without hope, once they are many, as their owners would."""
    hopeless = [job for job in live_jobs(world) if job.id in world.waiting and world.waiting[job.id].code in HOPELESS]
    assert not [job.id for job in hopeless if job.allocation.held_gpus]
    for job in hopeless if len(hopeless) > HOPELESS_MAX else ():
        assert world.waiting[job.id].detail
        world.send(CancelJob(job.id))


class RejectedPods:
    """Rejected pods of jobs, until each is part of its job's conditions."""

    def __init__(self, world: PodWorld) -> None:
        self._world = world
        self._seen = 0
        self._open: dict[tuple[str, str, str], int] = {}
        self.reported: set[tuple[str, str, str]] = set()

    def check(self) -> None:
        """Follow new rejections. Call it after each step."""
        rejections, snapshot = list(self._world.rejections), self._world.snapshot
        for pod, (reason, _) in rejections[self._seen :]:
            if job_id := labels_of(pod).get(JOB_LABEL):
                self._open[job_id, annotations_of(pod)[NODE_LABEL], reason] = 0
        self._seen = len(rejections)
        for key in list(self._open):
            job = snapshot.jobs.get(key[0])
            if job is None or job.is_ended:
                del self._open[key]
            elif self._is_reported(job, *key[1:]):
                del self._open[key]
                self.reported.add(key)
            else:
                self._open[key] += 1
                assert self._open[key] <= CONDITION_STEPS_MAX, f"{key} is no condition of {job.placement}"

    def _is_reported(self, job: Job, node: str, reason: str) -> bool:
        placement = job.placement
        if all(each.node != node for each in placement.avoided):
            return False
        waiting, snapshot = self._world.waiting.get(job.id), self._world.snapshot
        conditions = build_job_status(job, waiting, snapshot, before={}, accepted=())["conditions"]
        (condition,) = [each for each in conditions if each.type == NODES_ADMIT_PODS]
        if placement.last is None or placement.last.node != node:
            return True  # the job has started elsewhere, or another node has refused it since
        assert not condition.holds
        assert condition.reason == reason
        assert node in condition.message
        return True


def play(world: PodWorld, rng: Random, *, nodes: int, jobs: int, foreign: int) -> RejectedPods:
    """Submit jobs and create foreign pods in random order, then wait until only hopeless jobs are left."""
    rejected = RejectedPods(world)
    for number in range(nodes):
        world.add_random_node(make_node(rng, f"{world.namespace}-n{number}"))
    for claim, zones in CLAIMS.items():
        world.add_claim(claim, zones)
    events = ["job"] * jobs + ["foreign"] * foreign
    rng.shuffle(events)
    while events:
        for _ in range(rng.randrange(2 + nodes // 2)):
            if not events:
                break
            if events.pop() == "job":
                world.send(SubmitJob(f"job-{world.sent}", make_job(rng, world.sent, namespace=world.namespace)))
            else:
                add_foreign_pod(world, rng, len(events))
                if rng.random() < 0.7:
                    remove_foreign_pod(world, rng)
        world.step()
        rejected.check()
        check_volumes(world)
        cancel_hopeless(world)
    for _ in range(DRAIN_STEPS):
        remove_foreign_pod(world, rng)
        world.step()
        rejected.check()
        if all(job.id in world.waiting and world.waiting[job.id].code in HOPELESS for job in live_jobs(world)):
            break
    return rejected


def check_volumes(world: PodWorld) -> None:
    """Check that each bound pod is in a zone of its volumes, and that one node at a time mounts some of them."""
    zone_of = {node["metadata"]["name"]: labels_of(node)["zone"] for node in world.list_nodes()}
    nodes_of: dict[tuple[str, str], set[str]] = {}
    for pod in world.list_pods():
        if ONCE_CLAIM in list_claims(pod) and pod["spec"].get("nodeName"):
            key = labels_of(pod)[JOB_LABEL], labels_of(pod)[GENERATION_LABEL]
            nodes_of.setdefault(key, set()).add(pod["spec"]["nodeName"])
        for zones in (CLAIMS.get(name, ()) for name in list_claims(pod) if pod["spec"].get("nodeName")):
            assert not zones or zone_of[pod["spec"]["nodeName"]] in zones
    assert all(len(nodes) == 1 for nodes in nodes_of.values()), nodes_of


def list_claims(pod: Object) -> list[str]:
    volumes = (volume.get("persistentVolumeClaim") or {} for volume in pod["spec"].get("volumes") or ())
    return [claim["claimName"] for claim in volumes if claim]


def check(world: PodWorld) -> None:
    rejected, admitted = len(world.rejections), world.admitted_count
    assert rejected <= REJECTED_SHARE_MAX * (rejected + admitted), [reason for _, reason in world.rejections[:5]]
    assert not world.violations
    snapshot = world.snapshot
    for job in live_jobs(world):
        reason = world.waiting.get(job.id)
        assert reason is not None, f"{job.id} is {job.state} without a reason"
        assert reason.code in HOPELESS, f"{job.id} {job.state}: {reason}"
        assert not job.allocation.held_gpus
        assert is_hopeless(world, job), f"{job.id} could run: {reason}"
        assert explain(snapshot, world.waiting, job.id).summary


def is_hopeless(world: PodWorld, job: Job) -> bool:
    """Return whether the job cannot run even alone, by kubelet's own arithmetic on its manifests."""
    claims = job.spec.pod_requirements.claims
    if LOST_CLAIM in claims:
        return True
    zones = [set(CLAIMS[name]) for name in claims if CLAIMS[name]]
    context = ManifestContext(world.namespace, 1, "", "none", AgentImage("none"))
    pods, usable = [pod for pod in world.list_pods() if is_live(pod)], [0]
    for node in world.list_nodes():
        name = node["metadata"]["name"]
        if any(labels_of(node)["zone"] not in each for each in zones):
            continue
        others = [pod for pod in pods if pod["spec"].get("nodeName") == name]
        for gpus in range(int(node["status"]["allocatable"][GPU_RESOURCE]), 0, -1):
            pod = build_agent_pod(job, PodToCreate(job.id, "pod", name, gpus), context)
            if find_rejection(pod, node, others) is None and not find_scheduling_misfit(pod, node):
                usable.append(gpus)
                break
    node_gpus = max(int(node["status"]["allocatable"][GPU_RESOURCE]) for node in world.list_nodes())
    if ONCE_CLAIM in claims:
        return job.spec.max_gpus > node_gpus or max(usable) < job.spec.min_gpus
    return sum(usable) < job.spec.min_gpus
