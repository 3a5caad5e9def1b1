"""A small cluster on a real API server: manual ticks, fake kubelet and agents, and a check for double allocations."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from scheduler.domain.commands import AddNode, Command, CommandBody, CreatePool
from scheduler.domain.decisions import Reason
from scheduler.domain.fleet import Node, Pool, PoolKind
from scheduler.domain.job import Job
from scheduler.domain.lending_policy import DAY_S, LendingPolicy
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.tick_report import Violation
from scheduler.forecast.forecaster import PoolForecaster
from scheduler.kubernetes.agent_injection import AgentImage
from scheduler.kubernetes.api_actions import ActionPool
from scheduler.kubernetes.api_objects import JOB_LABEL, POD, Object
from scheduler.kubernetes.client import KubernetesClient
from scheduler.kubernetes.cluster_cache import ClusterCache
from scheduler.kubernetes.executor import KubernetesExecutor
from scheduler.kubernetes.job_objects import JobDefaults, JobObjectActions
from scheduler.kubernetes.node_lending import NodeLending
from scheduler.kubernetes.pod_view import count_requested_gpus
from scheduler.kubernetes.prefetching import Prefetches
from scheduler.runtime.clock import RealClock
from scheduler.runtime.demand_forecasts import DemandForecaster
from scheduler.runtime.reconciler import tick
from scheduler.scheduling.policies.settings import PolicySettings
from scheduler.scheduling.policy_sets import load_policy_set
from scheduler.store.schema_migration import migrate
from scheduler.store.sql_store import SqlStore
from tests.kubernetes.fake_agents import FakeAgents
from tests.kubernetes.fake_kubelet import FakeKubelet
from tests.kubernetes.waiting import PATIENCE_S, PAUSE_S

GPU, GPU_BYTES = "h100-80g", 80 * 2**30


class Site:
    """Pools `training` and `inference` with nodes of 8 GPUs. Everything happens in `step`."""

    def __init__(self, cluster: KubernetesClient, kubelet: FakeKubelet, namespace: str, folder: Path) -> None:
        url = f"sqlite:///{folder}/site.sqlite"
        migrate(url)
        self.cluster, self.kubelet, self.namespace = cluster, kubelet, namespace
        self.store = SqlStore(url)
        self.clock = RealClock()
        lease = self.store.acquire_lease("site", now_s=self.clock.now_s(), ttl_s=3600.0)
        assert lease is not None
        self.epoch = lease.epoch
        self.mirrors = ClusterCache(cluster)
        self.mirrors.start()
        assert self.mirrors.wait_for_sync(PATIENCE_S)
        self.executor = self.new_executor()
        self.agents = FakeAgents(kubelet, self.store.run_log)
        self.policies = load_policy_set("ebbtide", PolicySettings(leave_grace_s=20.0, full_pass_period_s=1.0))
        self.most_held: Counter[str] = Counter()
        self.violations: list[Violation] = []
        self.waiting: dict[str, Reason] = {}
        self._demand = DemandForecaster(self.store, PoolForecaster, history_s=DAY_S, fits=ThreadPoolExecutor(1))
        self.sent = 0

    def new_executor(self) -> KubernetesExecutor:
        """Return an executor without history, as a new leader has."""
        rules = JobDefaults(
            self.namespace, "http://127.0.0.1:1", "ebbtide/worker:test", AgentImage("ebbtide/agent:test")
        )
        objects = JobObjectActions(
            self.cluster,
            self.mirrors,
            rules,
            epoch=lambda: self.epoch,
            agent_token=lambda job_id: f"token-{job_id}",
        )
        return KubernetesExecutor(
            objects,
            NodeLending(self.cluster, self.mirrors, epoch=lambda: self.epoch),
            view=self.mirrors.get_view,
            run_log=self.store.run_log,
            now=self.clock.now_s,
            epoch=lambda: self.epoch,
            actions=ActionPool(available_requests=self.cluster.count_available_requests),
            prefetches=Prefetches(self.cluster, self.mirrors, list_job_images=objects.list_images),
        )

    def close(self) -> None:
        self.executor.close()
        self.mirrors.stop()
        self.store.close()

    def add_pools(self, *, training: int, inference: int, lending: LendingPolicy | None = None) -> None:
        self.send(CreatePool(Pool("training", PoolKind.TRAINING)))
        self.send(CreatePool(Pool("inference", PoolKind.INFERENCE, lending or LendingPolicy())))
        for pool, count in (("training", training), ("inference", inference)):
            for number in range(count):
                self.add_node(f"{self.namespace}-{pool[0]}{number}", pool)

    def add_node(self, name: str, pool: str, *, gpu: str = GPU) -> None:
        self.kubelet.add_node(name, gpus=8)
        self.send(AddNode(Node(name, pool, gpu, 8, GPU_BYTES)))

    def send(self, body: CommandBody) -> None:
        self.sent += 1
        assert self.store.send(Command(f"command-{self.sent}", self.clock.now_s(), body))

    @property
    def snapshot(self) -> Snapshot:
        return self.store.load().snapshot

    def job(self, job_id: str) -> Job:
        job = self.snapshot.jobs.get(job_id) or self.store.get_ended_job(job_id)
        assert job is not None, f"no job {job_id}"
        return job

    def pods(self, job_id: str = "") -> list[Object]:
        """Return our pods, read directly from the API server."""
        labels = f"{JOB_LABEL}={job_id}" if job_id else JOB_LABEL
        return list(self.cluster.list(POD, namespace=self.namespace, label_selector=labels).items)

    def step(self) -> None:
        """Run one tick, advance all agents by one step, and check the GPUs of each node."""
        learned = self._demand.make_forecasts(self.snapshot, self.clock.now_s())
        report = tick(self.store, self.executor, self.clock, self.policies, epoch=self.epoch, planning_inputs=learned)
        self.violations += report.violations
        self.waiting = dict(report.waiting)
        self.agents.step(self.snapshot, self.clock.now_s())
        self._look()

    def until(self, reached: Callable[[], object], *, what: str, timeout_s: float = PATIENCE_S) -> None:
        limit_s = time.monotonic() + timeout_s
        while not reached():
            assert time.monotonic() < limit_s, f"not within {timeout_s:.0f} s: {what}"
            self.step()
            time.sleep(PAUSE_S)

    def _look(self) -> None:
        """Check the GPUs that pods hold on each node, read directly from the API server."""
        held: Counter[str] = Counter()
        for pod in self.cluster.list(POD, field_selector="spec.nodeName!=").items:
            if pod["status"].get("phase") not in ("Succeeded", "Failed"):
                held[pod["spec"]["nodeName"]] += count_requested_gpus(pod["spec"])
        for node, gpus in held.items():
            self.most_held[node] = max(self.most_held[node], gpus)
