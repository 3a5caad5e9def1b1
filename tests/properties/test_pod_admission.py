"""Random jobs and foreign pods on a cluster whose kubelets are strict: few rejections, each explained, no livelock."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any, cast

import pytest

from scheduler.domain.commands import AddNode, Command, CommandBody, CreatePool, SubmitJob
from scheduler.domain.decisions import Reason, ReasonCode
from scheduler.domain.fleet import Node, Pool, PoolKind
from scheduler.domain.job import Job
from scheduler.domain.pod_requirements import UNKNOWN_CAPACITY
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.tick_report import Violation
from scheduler.kubernetes.api_objects import NODE, POD, VOLUME_CLAIM
from scheduler.kubernetes.executor import KubernetesExecutor
from scheduler.kubernetes.job_objects import JobDefaults, JobObjectActions
from scheduler.kubernetes.manifests import ManifestContext, build_agent_pod
from scheduler.kubernetes.node_lending import NodeLending
from scheduler.kubernetes.pod_changes import PodToCreate
from scheduler.kubernetes.resource_writer import ActionPool
from scheduler.runtime.clock import ManualClock
from scheduler.runtime.reconciler import tick
from scheduler.scheduling.explanation import explain
from scheduler.scheduling.policies.settings import PolicySettings
from scheduler.scheduling.policy_sets import list_policy_sets, load_policy_set
from scheduler.store.memory_store import MemoryStore
from tests.kubernetes.fake_agents import FakeAgents
from tests.kubernetes.pod_admission import find_rejection, find_scheduling_misfit
from tests.memory_cluster import MemoryCluster
from tests.memory_run_log import MemoryRunLog
from tests.random_pods import make_foreign_pod, make_job, make_node

NAMESPACE, GPU, GPU_BYTES = "jobs", "h100-80g", 80 * 2**30
STEP_S, DRAIN_STEPS = 5.0, 400
HOPELESS = (ReasonCode.NO_FEASIBLE_NODE, ReasonCode.VOLUME_NOT_READY)


@dataclass
class World:
    """A cluster in memory under the real executor, with a tick every STEP_S of a manual clock."""

    policy: str = "ebbtide"
    cluster: MemoryCluster = field(default_factory=MemoryCluster)
    run_log: MemoryRunLog = field(default_factory=MemoryRunLog)
    store: MemoryStore = field(default_factory=MemoryStore)
    clock: ManualClock = field(default_factory=lambda: ManualClock(1000.0))
    violations: list[Violation] = field(default_factory=list)
    waiting: dict[str, Reason] = field(default_factory=dict)
    sent: int = 0

    def __post_init__(self) -> None:
        lease = self.store.acquire_lease("world", now_s=self.clock.now_s(), ttl_s=1e12)
        assert lease is not None
        self.epoch = lease.epoch
        self.run_log.set_epoch(self.epoch)
        self.actions = ActionPool(2)
        cluster = cast(Any, self.cluster)
        objects = JobObjectActions(
            cluster,
            cluster,
            JobDefaults(NAMESPACE, "http://127.0.0.1:1", "none"),
            epoch=lambda: self.epoch,
            agent_token=lambda job_id: job_id,
            monotonic_s=self.clock.now_s,
        )
        self.executor = KubernetesExecutor(
            objects,
            NodeLending(cluster, cluster, epoch=lambda: self.epoch),
            view=self.cluster.get_view,
            run_log=self.run_log,
            now=self.clock.now_s,
            epoch=lambda: self.epoch,
            actions=self.actions,
        )
        self.agents = FakeAgents(cast(Any, self.cluster), self.run_log, steps=3)
        self.policies = load_policy_set(self.policy, PolicySettings(leave_grace_s=20.0, full_pass_period_s=30.0))
        self.send(CreatePool(Pool("training", PoolKind.TRAINING)))

    def send(self, body: CommandBody) -> None:
        self.sent += 1
        assert self.store.send(Command(f"command-{self.sent}", self.clock.now_s(), body))

    def add_node(self, rng: Random, name: str) -> None:
        node = make_node(rng, name)
        self.cluster.add_node(name, gpus=node.gpus, capacity=node.capacity, labels=node.labels, taints=node.taints)
        self.send(AddNode(Node(name, "training", GPU, node.gpus, GPU_BYTES, capacity=UNKNOWN_CAPACITY)))

    def step(self) -> Snapshot:
        self.clock.move_to(self.clock.now_s() + STEP_S)
        report = tick(self.store, self.executor, self.clock, self.policies, epoch=self.epoch)
        self.violations += report.violations
        self.waiting = dict(report.waiting)
        self.cluster.run_kubelets()
        snapshot = self.snapshot
        self.agents.step(snapshot, self.clock.now_s())
        return snapshot

    @property
    def snapshot(self) -> Snapshot:
        return self.store.load().snapshot

    def live_jobs(self) -> list[Job]:
        return [job for job in self.snapshot.jobs.values() if not job.is_ended]

    def add_foreign_pod(self, rng: Random, number: int) -> None:
        """Bind a pod of others where the Kubernetes scheduler would."""
        pod = make_foreign_pod(rng, number, namespace=NAMESPACE)
        nodes = [item for (kind, _, _), item in self.cluster.objects.items() if kind == NODE.name]
        node = rng.choice(nodes)
        held = [each for each in self.cluster.list_pods() if each["spec"].get("nodeName") == node["metadata"]["name"]]
        held = [each for each in held if each["status"].get("phase") != "Failed"]
        if find_rejection(pod, node, held) is None and not find_scheduling_misfit(pod, node):
            pod["spec"]["nodeName"] = node["metadata"]["name"]
            self.cluster.create(POD, pod)

    def remove_foreign_pod(self, rng: Random) -> None:
        others = [pod for pod in self.cluster.list_pods() if pod["spec"]["schedulerName"] == "nobody"]
        if others:
            name = rng.choice(others)["metadata"]["name"]
            self.cluster.delete(POD, name, NAMESPACE)


@pytest.fixture
def worlds() -> Iterator[list[World]]:
    opened: list[World] = []
    yield opened
    for world in opened:
        world.actions.close()


def play(world: World, rng: Random, *, nodes: int, jobs: int, foreign: int) -> None:
    """Submit jobs and create foreign pods in random order, then wait until only hopeless jobs are left."""
    for number in range(nodes):
        world.add_node(rng, f"n{number}")
    bound = {"accessModes": ["ReadWriteMany"]}
    world.cluster.create(
        VOLUME_CLAIM,
        {"metadata": {"name": "data", "namespace": NAMESPACE}, "spec": bound, "status": {"phase": "Bound"}},
    )
    events = ["job"] * jobs + ["foreign"] * foreign
    rng.shuffle(events)
    while events:
        for _ in range(rng.randrange(2 + nodes // 2)):
            if events and events.pop() == "job":
                spec = make_job(rng, world.sent, namespace=NAMESPACE, claims=("data", "lost"))
                world.send(SubmitJob(f"job-{world.sent}", spec))
            else:
                world.add_foreign_pod(rng, len(events))
                if rng.random() < 0.7:
                    world.remove_foreign_pod(rng)
        world.step()
    for _ in range(DRAIN_STEPS):
        world.remove_foreign_pod(rng)
        world.step()
        if all(job.id in world.waiting and world.waiting[job.id].code in HOPELESS for job in world.live_jobs()):
            break


def check(world: World) -> None:
    rejected, admitted = len(world.cluster.rejections), world.cluster.admitted_count
    assert rejected <= 0.01 * (rejected + admitted), world.cluster.rejections[:3]
    assert not world.cluster.tolerated_misfits
    assert not world.violations
    snapshot = world.snapshot
    for job in world.live_jobs():
        reason = world.waiting.get(job.id)
        assert reason is not None, f"{job.id} is {job.state} without a reason"
        assert reason.code in HOPELESS, f"{job.id} {job.state}: {reason}"
        assert not job.allocation.held_gpus
        assert is_hopeless(world, job), f"{job.id} could run: {reason}"
        assert explain(snapshot, world.waiting, job.id).summary


def is_hopeless(world: World, job: Job) -> bool:
    """Return whether the job cannot run even alone, by kubelet's own arithmetic on its manifests."""
    if "lost" in job.spec.pod_requirements.claims:
        return True
    context = ManifestContext(NAMESPACE, 1, "", "none")
    pods = world.cluster.list_pods()
    total = 0
    for (kind, _, name), node in world.cluster.objects.items():
        if kind == NODE.name:
            others = [pod for pod in pods if pod["spec"].get("nodeName") == name]
            for gpus in range(int(node["status"]["allocatable"]["nvidia.com/gpu"]), 0, -1):
                pod = build_agent_pod(job, PodToCreate(job.id, "pod", name, gpus), context)
                if find_rejection(pod, node, others) is None and not find_scheduling_misfit(pod, node):
                    total += gpus
                    break
    return total < job.spec.min_gpus


@pytest.mark.parametrize("policy", ["ebbtide", "fifo", "las"])
def test_random_jobs_and_pods_are_admitted(worlds: list[World], policy: str) -> None:
    worlds.append(world := World(policy))
    play(world, Random(1), nodes=6, jobs=30, foreign=30)
    check(world)


@pytest.mark.full
@pytest.mark.parametrize("policy", sorted(list_policy_sets()))
@pytest.mark.parametrize("seed", [2, 3, 4, 5])
def test_random_jobs_and_pods_are_admitted_under_each_policy(worlds: list[World], policy: str, seed: int) -> None:
    worlds.append(world := World(policy))
    play(world, Random(seed), nodes=8, jobs=60, foreign=60)
    check(world)


@pytest.mark.full
def test_ten_thousand_jobs_and_pods_are_admitted(worlds: list[World]) -> None:
    worlds.append(world := World())
    play(world, Random(1), nodes=40, jobs=5000, foreign=5000)
    check(world)
