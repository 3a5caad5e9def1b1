"""A cluster in memory under the real executor, with strict kubelets and a manual clock."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from scheduler.domain.commands import AddNode, Command, CommandBody, CreatePool
from scheduler.domain.decisions import Reason
from scheduler.domain.fleet import Node, Pool, PoolKind
from scheduler.domain.pod_requirements import UNKNOWN_CAPACITY
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.tick_report import Violation
from scheduler.kubernetes.agent_injection import AgentImage
from scheduler.kubernetes.api_actions import ActionPool
from scheduler.kubernetes.api_objects import NODE, PERSISTENT_VOLUME, POD, VOLUME_CLAIM, Object
from scheduler.kubernetes.executor import KubernetesExecutor
from scheduler.kubernetes.job_objects import JobDefaults, JobObjectActions
from scheduler.kubernetes.node_lending import NodeLending
from scheduler.kubernetes.prefetching import Prefetches
from scheduler.runtime.clock import ManualClock
from scheduler.runtime.reconciler import tick
from scheduler.scheduling.policies.settings import PolicySettings
from scheduler.scheduling.policy_sets import load_policy_set
from scheduler.store.memory_store import MemoryStore
from tests.kubernetes.fake_agents import FakeAgents
from tests.kubernetes.pod_admission import Rejection
from tests.memory_cluster import MemoryCluster
from tests.memory_run_log import MemoryRunLog
from tests.random_pods import RandomNode, build_volume_affinity, find_access_mode

NAMESPACE, GPU, GPU_BYTES = "jobs", "h100-80g", 80 * 2**30
STEP_S = 5.0


@dataclass
class World:
    """A cluster in memory under the real executor, with a tick every STEP_S of a manual clock."""

    policy: str = "ebbtide"
    available_requests: Callable[[], float] = lambda: math.inf
    cluster: MemoryCluster = field(default_factory=MemoryCluster)
    run_log: MemoryRunLog = field(default_factory=MemoryRunLog)
    store: MemoryStore = field(default_factory=MemoryStore)
    clock: ManualClock = field(default_factory=lambda: ManualClock(1000.0))
    violations: list[Violation] = field(default_factory=list)
    waiting: dict[str, Reason] = field(default_factory=dict)
    sent: int = 0
    namespace: str = NAMESPACE

    def __post_init__(self) -> None:
        lease = self.store.acquire_lease("world", now_s=self.clock.now_s(), ttl_s=1e12)
        assert lease is not None
        self.epoch = lease.epoch
        self.run_log.set_epoch(self.epoch)
        self.actions = ActionPool(2, available_requests=self.available_requests)
        cluster = cast(Any, self.cluster)
        objects = JobObjectActions(
            cluster,
            cluster,
            JobDefaults(NAMESPACE, "http://127.0.0.1:1", "none", AgentImage("none")),
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
            prefetches=Prefetches(cluster, cluster, list_job_images=objects.list_images),
        )
        self.agents = FakeAgents(cast(Any, self.cluster), self.run_log, steps=3)
        self.policies = load_policy_set(self.policy, PolicySettings(leave_grace_s=20.0, full_pass_period_s=30.0))
        self.send(CreatePool(Pool("training", PoolKind.TRAINING)))

    def send(self, body: CommandBody) -> None:
        self.sent += 1
        assert self.store.send(Command(f"command-{self.sent}", self.clock.now_s(), body))

    def add_random_node(self, node: RandomNode) -> None:
        name, labels = node.name, node.labels
        self.cluster.add_node(name, gpus=node.gpus, capacity=node.capacity, labels=labels, taints=node.taints)
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

    @property
    def rejections(self) -> list[tuple[Object, Rejection]]:
        return self.cluster.rejections

    @property
    def admitted_count(self) -> int:
        return self.cluster.admitted_count

    def add_claim(self, name: str, zones: Sequence[str] = ()) -> None:
        meta = {"name": name, "namespace": NAMESPACE}
        spec = {"accessModes": [find_access_mode(name)], "volumeName": name}
        self.cluster.create(PERSISTENT_VOLUME, {"metadata": {"name": name}, "spec": build_volume_affinity(zones)})
        self.cluster.create(VOLUME_CLAIM, {"metadata": meta, "spec": spec, "status": {"phase": "Bound"}})

    def list_nodes(self) -> list[Object]:
        return [item for (kind, _, _), item in self.cluster.objects.items() if kind == NODE.name]

    def list_pods(self) -> list[Object]:
        return self.cluster.list_pods()

    def create_pod(self, pod: Object) -> None:
        self.cluster.create(POD, pod)

    def delete_pod(self, name: str) -> None:
        self.cluster.delete(POD, name, NAMESPACE)
