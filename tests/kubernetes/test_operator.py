"""The operator as a process on a real API server: what people write with kubectl becomes pods, loans and statuses."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scheduler.k8s.client import Cluster
from scheduler.k8s.kinds import ELASTIC_JOB, EVENT, JOB_LABEL, LEASE, NODE, POD, POOL
from scheduler.k8s.objects import Object, labels_of, name_of, uid_of
from scheduler.store.migrate import migrate
from scheduler.store.sql import SqlStore
from tests.kubernetes import custom_resources
from tests.kubernetes.control_plane import ControlPlane
from tests.kubernetes.fake_agents import FakeAgents
from tests.kubernetes.fake_kubelet import FakeKubelet
from tests.kubernetes.waiting import eventually

POOL_LABELS = {"ebbtide.dev/test-pool": "training"}


class Operated:
    """Operators as processes on one database, and fake agents that follow the run log."""

    def __init__(
        self, plane: ControlPlane, cluster: Cluster, kubelet: FakeKubelet, namespace: str, folder: Path
    ) -> None:
        self.cluster, self.kubelet, self.namespace, self.folder = cluster, kubelet, namespace, folder
        self.url = f"sqlite:///{folder}/operator.sqlite"
        migrate(self.url)
        self.store = SqlStore(self.url)
        self.agents = FakeAgents(kubelet, self.store.run_log)
        self.operators: list[subprocess.Popen[bytes]] = []
        self._kubeconfig = plane.admin_kubeconfig
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._act, daemon=True)
        self._thread.start()

    def start_operator(self) -> subprocess.Popen[bytes]:
        number = len(self.operators)
        own = {
            "EBBTIDE_DATABASE_URL": self.url,
            "EBBTIDE_KUBECONFIG": str(self._kubeconfig),
            "EBBTIDE_JOB_NAMESPACE": self.namespace,
            "EBBTIDE_LEASE_NAMESPACE": self.namespace,
            "EBBTIDE_RUN_DIR": str(self.folder / "run"),
            "EBBTIDE_FULL_PASS_PERIOD_S": "2",
        }
        command = [sys.executable, "-m", "scheduler.cli", "operator"]
        with (self.folder / f"operator-{number}.log").open("wb") as log:
            process = subprocess.Popen(command, env={**os.environ, **own}, stdout=log, stderr=log)
        self.operators.append(process)
        return process

    def close(self) -> None:
        for process in self.operators:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self.operators:
            process.wait(timeout=60)
        self._stop.set()
        self._thread.join()
        self.store.close()

    def add_nodes(self, count: int) -> None:
        for number in range(count):
            self.kubelet.add_node(f"{self.namespace}-t{number}", gpus=8, labels=POOL_LABELS)
        spec = {"kind": "training", "nodeSelector": POOL_LABELS, "gpu": "h100-80g"}
        self.cluster.apply(POOL, {"metadata": {"name": "training"}, "spec": spec})

    def submit(self, name: str, least: int, most: int) -> None:
        spec: dict[str, Any] = {"gpus": {"min": least, "max": most}, "steps": 10**9, "command": ["python", "train.py"]}
        self.cluster.apply(ELASTIC_JOB, {"metadata": {"name": name, "namespace": self.namespace}, "spec": spec})

    def job(self, name: str) -> Object:
        return self.cluster.get(ELASTIC_JOB, name, self.namespace)

    def phase(self, name: str) -> str:
        return str(self.job(name).get("status", {}).get("phase", ""))

    def until_phase(self, name: str, phase: str) -> None:
        eventually(lambda: self.phase(name) == phase, what=f"{name} is {phase}; it is {self.phase(name)}")

    def pods(self) -> list[Object]:
        return list(self.cluster.list(POD, namespace=self.namespace, labels=JOB_LABEL).items)

    def _act(self) -> None:
        from time import time

        while not self._stop.wait(0.1):
            self.agents.step(self.store.load().snapshot, time())


@pytest.fixture
def operated(
    control_plane: ControlPlane,
    definitions: None,
    cluster: Cluster,
    kubelet: FakeKubelet,
    namespace: str,
    tmp_path: Path,
) -> Iterator[Operated]:
    made = Operated(control_plane, cluster, kubelet, namespace, tmp_path)
    yield made
    made.close()
    for job in cluster.list(ELASTIC_JOB).items:
        cluster.patch(ELASTIC_JOB, name_of(job), namespace, change={"metadata": {"finalizers": None}})
        cluster.delete(ELASTIC_JOB, name_of(job), namespace)
    custom_resources.remove_all(cluster)


def test_an_applied_job_runs_is_scaled_and_leaves_nothing_behind(operated: Operated) -> None:
    operated.add_nodes(2)
    operated.start_operator()
    operated.submit("llama", 8, 8)
    operated.until_phase("llama", "Running")
    job = operated.job("llama")
    assert job["status"]["allocation"]["gpus"] == 8
    assert {pod["metadata"]["ownerReferences"][0]["uid"] for pod in operated.pods()} == {uid_of(job)}
    (before,) = operated.pods()
    operated.cluster.patch(
        ELASTIC_JOB, "llama", operated.namespace, change={"spec": {"replicas": 16}}, subresource="scale"
    )
    eventually(lambda: operated.job("llama")["status"]["allocation"]["gpus"] == 16, what="it has 16 GPUs")
    operated.until_phase("llama", "Running")
    assert uid_of(before) in {uid_of(pod) for pod in operated.pods()}
    assert any(event["regarding"]["name"] == "llama" for event in operated.cluster.list(EVENT).items)
    operated.cluster.delete(ELASTIC_JOB, "llama", operated.namespace)
    eventually(lambda: operated.cluster.find(ELASTIC_JOB, "llama", operated.namespace) is None, what="it is gone")
    assert operated.pods() == []


def test_a_second_operator_takes_over_and_the_job_hears_nothing_of_it(operated: Operated) -> None:
    operated.add_nodes(1)
    first = operated.start_operator()
    operated.submit("llama", 4, 4)
    operated.until_phase("llama", "Running")
    before = {uid_of(pod) for pod in operated.pods()}
    operated.start_operator()
    first.send_signal(signal.SIGKILL)
    first.wait()
    operated.submit("later", 4, 4)
    operated.until_phase("later", "Running")
    assert before <= {uid_of(pod) for pod in operated.pods()}
    assert operated.phase("llama") == "Running"


def test_sigterm_hands_over_at_once(operated: Operated) -> None:
    operated.add_nodes(1)
    first = operated.start_operator()
    operated.submit("llama", 4, 4)
    operated.until_phase("llama", "Running")
    first.send_signal(signal.SIGTERM)
    assert first.wait(timeout=60) == 0
    lease = operated.cluster.get(LEASE, "ebbtide-operator", operated.namespace)
    assert not lease["spec"].get("holderIdentity")
    assert operated.store.lease() is None
    assert operated.phase("llama") == "Running"


def test_a_job_that_is_nonsense_is_told_so(operated: Operated) -> None:
    operated.add_nodes(1)
    operated.start_operator()
    operated.submit("big", 64, 64)
    eventually(lambda: operated.job("big").get("status", {}).get("conditions"), what="it has conditions")
    eventually(lambda: operated.phase("big") in ("Queued", "Failed"), what="it waits or has failed")


def test_a_node_that_is_not_of_a_pool_is_never_touched(operated: Operated) -> None:
    operated.add_nodes(1)
    other = operated.kubelet.add_node(f"{operated.namespace}-x", gpus=8)
    operated.start_operator()
    operated.submit("llama", 4, 8)
    operated.until_phase("llama", "Running")
    after = operated.cluster.get(NODE, name_of(other))
    assert labels_of(after) == labels_of(other)
    assert after["spec"] == other["spec"]
