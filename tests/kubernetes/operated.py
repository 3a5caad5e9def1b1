"""Operator processes on a real API server, with fake agents in the pods of a fake kubelet."""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from scheduler.kubernetes.api_error import ApiError
from scheduler.kubernetes.api_objects import (
    DEPLOYMENT,
    ELASTIC_JOB,
    EVENT,
    GPU_RESOURCE,
    JOB_LABEL,
    LOANED_TAINT_KEY,
    NODE,
    POD,
    POOL,
    Object,
    uid_of,
)
from scheduler.kubernetes.client import KubernetesClient
from scheduler.kubernetes.pod_view import count_requested_gpus
from scheduler.store.protocol import UnavailableError
from scheduler.store.schema_migration import migrate
from scheduler.store.sql_store import SqlStore
from tests.kubernetes import custom_resources
from tests.kubernetes.control_plane import ControlPlane
from tests.kubernetes.fake_agents import FakeAgents
from tests.kubernetes.fake_kubelet import FakeKubelet
from tests.kubernetes.waiting import PATIENCE_S, eventually

SERVING = {"app": "llm"}
POOL_LABELS = {"ebbtide.dev/test-pool": "training"}


class Operated:
    """Operator processes on one database, and fake agents.

    `settings` are extra variables for operators started from now on.
    """

    def __init__(
        self,
        plane: ControlPlane,
        cluster: KubernetesClient,
        kubelet: FakeKubelet,
        namespace: str,
        folder: Path,
        *,
        url: str = "",
        has_agents: bool = True,
    ) -> None:
        self.cluster, self.kubelet, self.namespace, self.folder = cluster, kubelet, namespace, folder
        self.url = url or f"sqlite:///{folder}/operator.sqlite"
        migrate(self.url)
        self.store = SqlStore(self.url)
        self.agents = FakeAgents(kubelet, self.store.run_log)
        self.operators: list[subprocess.Popen[bytes]] = []
        self.kubeconfig = plane.admin_kubeconfig
        self.lease_namespace = namespace
        self.settings: dict[str, str] = {}
        self.most_held: Counter[str] = Counter()
        self._told_before = {uid_of(event) for event in cluster.list(EVENT).items}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._act, daemon=True)
        if has_agents:
            self._thread.start()

    def start_operator(self, kubeconfig: Path | None = None, *, url: str = "") -> subprocess.Popen[bytes]:
        number = len(self.operators)
        own = {
            "EBBTIDE_DATABASE_URL": url or self.url,
            "EBBTIDE_KUBECONFIG": str(kubeconfig or self.kubeconfig),
            "EBBTIDE_JOB_NAMESPACE": self.namespace,
            "EBBTIDE_LEASE_NAMESPACE": self.lease_namespace,
            "EBBTIDE_RUN_DIR": str(self.folder / "run"),
            "EBBTIDE_FULL_PASS_PERIOD_S": "2",
            **self.settings,
        }
        command = [sys.executable, "-m", "cli", "operator"]
        with self._log_file(number).open("wb") as log:
            process = subprocess.Popen(command, env={**os.environ, **own}, stdout=log, stderr=log)
        self.operators.append(process)
        return process

    def log_of(self, process: subprocess.Popen[bytes]) -> str:
        """Return the log so far."""
        return self._log_file(self.operators.index(process)).read_text()

    def probe(self, process: subprocess.Popen[bytes], path: str) -> tuple[int, str]:
        """Return status and body of a probe."""
        marker = "health probes listen on 127.0.0.1:"
        log = eventually(lambda: self.log_of(process).partition(marker)[2], what="it answers probes")
        connection = http.client.HTTPConnection("127.0.0.1", int(log.split()[0]), timeout=10)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode().strip()
        finally:
            connection.close()

    def _log_file(self, number: int) -> Path:
        return self.folder / f"operator-{number}.log"

    def epoch(self) -> int:
        lease = self.store.get_lease()
        return 0 if lease is None else lease.epoch

    def leads_since(self, epoch: int) -> bool:
        """Return whether an operator leads in an epoch after `epoch`."""
        lease = self.store.get_lease()
        return lease is not None and lease.epoch > epoch

    def leader(self) -> subprocess.Popen[bytes]:
        """Return the operator that holds the store's lease. Holder names end in process id and random part."""
        found = eventually(self._find_leader, what="somebody leads")
        assert found is not None
        return found

    def waiting_operators(self) -> list[subprocess.Popen[bytes]]:
        leader = self.leader()
        return [each for each in self.operators if each is not leader and each.poll() is None]

    def _find_leader(self) -> subprocess.Popen[bytes] | None:
        lease = self.store.get_lease()
        pid = "" if lease is None else lease.holder.split("-")[-2]
        return next((each for each in self.operators if str(each.pid) == pid and each.poll() is None), None)

    def close(self) -> None:
        for process in self.operators:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        stuck = [process.pid for process in self.operators if not _ends_by_itself(process)]
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self.store.close()
        assert not stuck, f"operators {stuck} did not end on SIGTERM"

    def add_nodes(self, count: int, *, gpus: int = 8) -> None:
        for number in range(count):
            self.kubelet.add_node(f"{self.namespace}-t{number}", gpus=gpus, labels=POOL_LABELS)
        spec = {"kind": "training", "nodeSelector": POOL_LABELS, "gpu": "h100-80g"}
        self.cluster.apply(POOL, {"metadata": {"name": "training"}, "spec": spec})

    def add_inference(self, count: int, *, replicas: int, gpus: int = 8) -> None:
        """Add a lending pool, and a Deployment whose replicas need one whole node each."""
        labels = {"ebbtide.dev/test-pool": "inference"}
        for number in range(count):
            self.kubelet.add_node(f"{self.namespace}-i{number}", gpus=gpus, labels=labels)
        # With a profile, the pool lends before its forecast is calibrated.
        lending = {"headroom": 0, "returnDeadline": "30s", "coldStart": "0s", "demandProfile": [0] * 24}
        spec = {
            "kind": "inference",
            "nodeSelector": labels,
            "gpu": "h100-80g",
            "lending": lending,
            "demand": {"source": "deployments", "selector": SERVING},
        }
        self.cluster.apply(POOL, {"metadata": {"name": "inference"}, "spec": spec})
        container = {"name": "llm", "image": "x", "resources": {"limits": {GPU_RESOURCE: str(gpus)}}}
        template = {"metadata": {"labels": SERVING}, "spec": {"containers": [container]}}
        body = {"replicas": replicas, "selector": {"matchLabels": SERVING}, "template": template}
        meta = {"name": "llm", "namespace": self.namespace, "labels": SERVING}
        self.cluster.apply(DEPLOYMENT, {"metadata": meta, "spec": body})

    def scale_inference(self, replicas: int) -> None:
        self.cluster.patch(DEPLOYMENT, "llm", self.namespace, change={"spec": {"replicas": replicas}})

    def lent_nodes(self) -> list[str]:
        """Return the nodes with our taint."""
        return [
            node["metadata"]["name"]
            for node in self.cluster.list(NODE).items
            if any(taint["key"] == LOANED_TAINT_KEY for taint in node["spec"].get("taints", ()))
        ]

    def held(self, name: str) -> int:
        return int(self.job(name).get("status", {}).get("allocation", {}).get("gpus", 0))

    def submit(self, name: str, least: int, most: int) -> None:
        spec: dict[str, Any] = {"gpus": {"min": least, "max": most}, "steps": 10**9, "command": ["python", "train.py"]}
        spec["onResize"] = "checkpoint"
        self.apply_job(name, spec)

    def apply_job(self, name: str, spec: dict[str, Any]) -> None:
        self.cluster.apply(ELASTIC_JOB, {"metadata": {"name": name, "namespace": self.namespace}, "spec": spec})

    def can_apply(self, name: str, spec: dict[str, Any]) -> bool:
        """Return whether the API server accepts the spec now."""
        try:
            self.apply_job(name, spec)
        except ApiError as refused:
            if refused.is_invalid:
                return False
            raise
        return True

    def condition(self, name: str, kind: str) -> str:
        found = self.job(name).get("status", {}).get("conditions", [])
        return next((str(each["status"]) for each in found if each["type"] == kind), "")

    def scale(self, name: str, gpus: int) -> None:
        """Scale the job like `kubectl scale`."""
        change = {"spec": {"replicas": gpus}}
        self.cluster.patch(ELASTIC_JOB, name, self.namespace, change=change, subresource="scale")

    def remove_schema(self, kind: str) -> None:
        """Make the kind's definition accept any spec."""
        definition = custom_resources.definitions()[kind]
        for version in definition["spec"]["versions"]:
            schema = version["schema"]["openAPIV3Schema"]
            schema.pop("x-kubernetes-validations", None)
            schema["properties"]["spec"] = {"x-kubernetes-preserve-unknown-fields": True}
        self.cluster.apply(custom_resources.DEFINITION, definition)

    def restore(self, kind: str) -> None:
        self.cluster.apply(custom_resources.DEFINITION, custom_resources.definitions()[kind])

    def job(self, name: str) -> Object:
        return self.cluster.get(ELASTIC_JOB, name, self.namespace)

    def find(self, name: str) -> Object | None:
        return self.cluster.get_or_none(ELASTIC_JOB, name, self.namespace)

    def phase(self, name: str) -> str:
        return str(self.job(name).get("status", {}).get("phase", ""))

    def until_phase(self, name: str, phase: str) -> None:
        def told() -> str:
            logs = [f"{self._log_file(number)}:\n{self.log_of(each)}" for number, each in enumerate(self.operators)]
            return "\n".join([f"{name} is {phase}; it is {self.job(name).get('status')}", *logs])

        eventually(lambda: self.phase(name) == phase, what=told)

    def pods(self) -> list[Object]:
        return list(self.cluster.list(POD, namespace=self.namespace, label_selector=JOB_LABEL).items)

    def events(self) -> list[Object]:
        """Return all Events about jobs, pools and nodes since the start."""
        return [event for event in self.cluster.list(EVENT).items if uid_of(event) not in self._told_before]

    def _act(self) -> None:
        """Advance all agents by one step, and check directly at the API server which pods hold which GPUs."""
        while not self._stop.wait(0.1):
            try:
                self.agents.step(self.store.load().snapshot, time.time())
                self._look()
            except (ApiError, UnavailableError):
                continue  # the test has stopped the API server or the database

    def _look(self) -> None:
        held: Counter[str] = Counter()
        for pod in self.cluster.list(POD, field_selector="spec.nodeName!=").items:
            if pod["status"].get("phase") not in ("Succeeded", "Failed"):
                held[pod["spec"]["nodeName"]] += count_requested_gpus(pod["spec"])
        for node, gpus in held.items():
            self.most_held[node] = max(self.most_held[node], gpus)


def _ends_by_itself(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return False
    return True
