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
from scheduler.kubernetes.api_objects import GPU_RESOURCE, Object
from scheduler.kubernetes.manifests import ManifestContext, build_agent_pod
from scheduler.kubernetes.pod_changes import PodToCreate
from scheduler.scheduling.explanation import explain
from tests.kubernetes.pod_admission import Rejection, find_rejection, find_scheduling_misfit
from tests.random_pods import RandomNode, make_foreign_pod, make_job, make_node

FOREIGN_SCHEDULER = "nobody"
DRAIN_STEPS = 600
REJECTED_SHARE_MAX = 0.01
HOPELESS_MAX = 60
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

    def add_claim(self, name: str) -> None: ...

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


def play(world: PodWorld, rng: Random, *, nodes: int, jobs: int, foreign: int) -> None:
    """Submit jobs and create foreign pods in random order, then wait until only hopeless jobs are left."""
    for number in range(nodes):
        world.add_random_node(make_node(rng, f"{world.namespace}-n{number}"))
    world.add_claim("data")
    events = ["job"] * jobs + ["foreign"] * foreign
    rng.shuffle(events)
    while events:
        for _ in range(rng.randrange(2 + nodes // 2)):
            if not events:
                break
            if events.pop() == "job":
                spec = make_job(rng, world.sent, namespace=world.namespace, claims=("data", "lost"))
                world.send(SubmitJob(f"job-{world.sent}", spec))
            else:
                add_foreign_pod(world, rng, len(events))
                if rng.random() < 0.7:
                    remove_foreign_pod(world, rng)
        world.step()
        cancel_hopeless(world)
    for _ in range(DRAIN_STEPS):
        remove_foreign_pod(world, rng)
        world.step()
        if all(job.id in world.waiting and world.waiting[job.id].code in HOPELESS for job in live_jobs(world)):
            break


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
    if "lost" in job.spec.pod_requirements.claims:
        return True
    context = ManifestContext(world.namespace, 1, "", "none", AgentImage("none"))
    pods, total = [pod for pod in world.list_pods() if is_live(pod)], 0
    for node in world.list_nodes():
        name = node["metadata"]["name"]
        others = [pod for pod in pods if pod["spec"].get("nodeName") == name]
        for gpus in range(int(node["status"]["allocatable"][GPU_RESOURCE]), 0, -1):
            pod = build_agent_pod(job, PodToCreate(job.id, "pod", name, gpus), context)
            if find_rejection(pod, node, others) is None and not find_scheduling_misfit(pod, node):
                total += gpus
                break
    return total < job.spec.min_gpus
