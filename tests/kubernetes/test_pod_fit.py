"""Jobs run only on nodes whose kubelet admits their pods. What it refuses becomes a condition and is not repeated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from scheduler.domain.commands import AddNode, CreatePool
from scheduler.domain.fleet import Node, Pool, PoolKind
from scheduler.domain.placement_record import FREE_REFUSALS
from scheduler.domain.pod_requirements import UNKNOWN_CAPACITY
from scheduler.kubernetes.api_objects import (
    NODE,
    PERSISTENT_VOLUME,
    POD,
    VOLUME_CLAIM,
    Object,
    ResourceKind,
    labels_of,
)
from scheduler.kubernetes.client import KubernetesClient
from tests.kubernetes.fake_kubelet import FakeKubelet
from tests.kubernetes.operated import Operated
from tests.kubernetes.pod_admission import Rejection
from tests.kubernetes.site import GPU, GPU_BYTES, Site
from tests.kubernetes.waiting import eventually
from tests.pod_matrix import check, play
from tests.random_pods import OVERHEAD, RUNTIME_CLASS, RandomNode, build_volume_affinity, find_access_mode

ADMISSION = "NodesAdmitPods"
RUNTIME_CLASS_KIND = ResourceKind("node.k8s.io", "v1", "RuntimeClass", "runtimeclasses", is_namespaced=False)


def build_spec(gpus: int, *, retries: int = 3, volumes: list[Any] | None = None, **requests: str) -> dict[str, Any]:
    container = {"name": "main", "image": "none", "resources": {"requests": requests}}
    template = {"spec": {"containers": [container], "volumes": volumes or []}}
    sized = {"min": gpus, "max": gpus}
    return {"gpus": sized, "steps": 10**9, "command": ["true"], "retries": retries, "template": template}


def find_condition(operated: Operated, name: str, kind: str) -> dict[str, Any]:
    found = operated.job(name).get("status", {}).get("conditions", [])
    return next((each for each in found if each["type"] == kind), {})


def pods_of(operated: Operated, name: str) -> list[Object]:
    job_id = operated.job(name)["status"]["jobId"]
    return [pod for pod in operated.pods() if labels_of(pod)["ebbtide.dev/job"] == job_id]


def test_job_that_fits_on_no_node_is_explained_and_delays_no_other(operated: Operated) -> None:
    """The nodes have 64 cores."""
    operated.add_nodes(2)
    operated.start_operator()
    operated.apply_job("hopeless", build_spec(8, cpu="96"))
    eventually(lambda: find_condition(operated, "hopeless", "Scheduled").get("reason") == "NoFeasibleNode", what="told")
    operated.apply_job("wide", build_spec(16, cpu="8"))
    operated.until_phase("wide", "Running")
    text = "needs 96 CPUs per node; the largest node of pool training has 64 CPUs"
    eventually(lambda: text in operated.job("hopeless")["status"]["message"], what="the reason has numbers")
    assert operated.job("hopeless")["status"]["gpus"] == "0/8"
    assert not pods_of(operated, "hopeless")
    assert not operated.kubelet.rejections


def test_refused_job_moves_to_another_node(operated: Operated) -> None:
    operated.add_nodes(2)
    operated.kubelet.broken_nodes.add(f"{operated.namespace}-t0")
    operated.start_operator()
    operated.submit("job", 8, 8)
    operated.until_phase("job", "Running")
    (node,) = {pod["spec"]["nodeName"] for pod in pods_of(operated, "job")}
    assert node == f"{operated.namespace}-t1"
    assert len(operated.kubelet.rejections) <= 1


def test_job_that_every_node_refuses_backs_off_and_fails(operated: Operated) -> None:
    """It may not use a node twice within two minutes, and the third refused start costs its only try."""
    operated.add_nodes(FREE_REFUSALS + 1)
    operated.kubelet.broken_nodes |= {f"{operated.namespace}-t{number}" for number in range(FREE_REFUSALS + 1)}
    operated.start_operator()
    operated.apply_job("job", build_spec(8, retries=0, cpu="1"))
    eventually(lambda: find_condition(operated, "job", ADMISSION), what="the refusal is a condition")
    found = find_condition(operated, "job", ADMISSION)
    assert (found["status"], found["reason"]) == ("False", "UnexpectedAdmissionError")
    assert "no healthy devices present" in found["message"]
    operated.until_phase("job", "Failed")
    failed = find_condition(operated, "job", "Failed")
    assert failed["status"] == "True"
    assert "UnexpectedAdmissionError" in failed["message"]
    assert operated.job("job")["status"]["gpus"] == "0/8"
    refused_on = [pod["spec"]["nodeName"] for pod, _ in operated.kubelet.rejections]
    assert sorted(refused_on) == sorted(operated.kubelet.broken_nodes)


def test_missing_claim_is_a_condition_and_holds_no_gpus(operated: Operated) -> None:
    operated.add_nodes(1)
    operated.start_operator()
    volumes = [{"name": "data", "persistentVolumeClaim": {"claimName": "lost"}}]
    operated.apply_job("job", build_spec(8, volumes=volumes))
    eventually(lambda: find_condition(operated, "job", "VolumesReady"), what="the claim is a condition")
    found = find_condition(operated, "job", "VolumesReady")
    assert (found["status"], found["reason"]) == ("False", "ClaimNotFound")
    assert operated.job("job")["status"]["gpus"] == "0/8"
    assert not pods_of(operated, "job")
    operated.submit("other", 8, 8)
    operated.until_phase("other", "Running")
    operated.agents.finish(operated.job("other")["status"]["jobId"])
    operated.until_phase("other", "Succeeded")
    wants = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    meta = {"name": "lost", "namespace": operated.namespace}
    operated.cluster.create(VOLUME_CLAIM, {"metadata": meta, "spec": wants})
    operated.cluster.patch_status(VOLUME_CLAIM, "lost", operated.namespace, change={"status": {"phase": "Bound"}})
    operated.until_phase("job", "Running")
    assert operated.condition("job", "VolumesReady") == "True"
    assert operated.job("other")["status"]["gpus"] == "0/8"


def test_missing_secret_of_a_volume_is_named_at_once_and_then_refused(operated: Operated) -> None:
    missing = 'secret "lost" not found'
    operated.settings["EBBTIDE_POD_START_TIMEOUT_S"] = "10"
    operated.add_nodes(1)
    operated.start_operator()
    operated.apply_job("job", build_spec(8, volumes=[{"name": "data", "secret": {"secretName": "lost"}}]))
    eventually(lambda: missing in find_condition(operated, "job", "PodsStarted").get("message", ""), what="named")
    assert operated.phase("job") == "Starting"
    eventually(lambda: find_condition(operated, "job", ADMISSION), what="the start is given up")
    found = find_condition(operated, "job", ADMISSION)
    assert (found["status"], found["reason"]) == ("False", "FailedMount")
    assert missing in found["message"]
    eventually(lambda: operated.job("job")["status"]["gpus"] == "0/8", what="it holds no GPUs")


def test_node_selector_and_overhead_of_a_runtime_class_count(operated: Operated) -> None:
    """Only the second node has the label. Without the overhead of 8 cores, the pod would fit twice."""
    scheduling = {"nodeSelector": {"example.com/sandbox": operated.namespace}}
    body = {"metadata": {"name": operated.namespace}, "handler": "runc", "scheduling": scheduling}
    operated.cluster.create(RUNTIME_CLASS_KIND, {**body, "overhead": {"podFixed": {"cpu": "8"}}})
    operated.add_nodes(2)
    node = f"{operated.namespace}-t1"
    operated.cluster.patch(NODE, node, change={"metadata": {"labels": {"example.com/sandbox": operated.namespace}}})
    operated.start_operator()
    for name in ("first", "second"):
        spec = build_spec(2, cpu="30")
        spec["template"]["spec"]["runtimeClassName"] = operated.namespace
        operated.apply_job(name, spec)
    operated.until_phase("first", "Running")
    eventually(lambda: operated.job("second").get("status", {}).get("reason"), what="the second one waits")
    assert {pod["spec"]["nodeName"] for pod in pods_of(operated, "first")} == {node}
    assert not pods_of(operated, "second")
    assert not operated.kubelet.rejections
    operated.cluster.delete(RUNTIME_CLASS_KIND, operated.namespace)


class SiteWorld(Site):
    """A world of random jobs and pods on the API server."""

    def __init__(self, cluster: KubernetesClient, kubelet: FakeKubelet, namespace: str, folder: Path) -> None:
        super().__init__(cluster, kubelet, namespace, folder)
        self.agents.steps = 3
        self.send(CreatePool(Pool("training", PoolKind.TRAINING)))
        overhead = {"overhead": {"podFixed": OVERHEAD}}
        self.cluster.apply(RUNTIME_CLASS_KIND, {"metadata": {"name": RUNTIME_CLASS}, "handler": "runc", **overhead})

    @property
    def rejections(self) -> list[tuple[Object, Rejection]]:
        return self.kubelet.rejections

    @property
    def admitted_count(self) -> int:
        return self.kubelet.admitted_count

    def add_random_node(self, node: RandomNode) -> None:
        self.kubelet.add_node(node.name, gpus=node.gpus, labels=node.labels, capacity=node.capacity, taints=node.taints)
        self.send(AddNode(Node(node.name, "training", GPU, node.gpus, GPU_BYTES, capacity=UNKNOWN_CAPACITY)))

    def add_claim(self, name: str, zones: Sequence[str] = ()) -> None:
        volume, modes = f"{self.namespace}-{name}", [find_access_mode(name)]
        storage = {"accessModes": modes, "capacity": {"storage": "1Gi"}, "hostPath": {"path": "/data"}}
        self.cluster.create(
            PERSISTENT_VOLUME, {"metadata": {"name": volume}, "spec": {**storage, **build_volume_affinity(zones)}}
        )
        wants = {"accessModes": modes, "resources": {"requests": {"storage": "1Gi"}}, "volumeName": volume}
        meta = {"name": name, "namespace": self.namespace}
        self.cluster.create(VOLUME_CLAIM, {"metadata": meta, "spec": wants})
        self.cluster.patch_status(VOLUME_CLAIM, name, self.namespace, change={"status": {"phase": "Bound"}})

    def list_nodes(self) -> list[Object]:
        return list(self.cluster.list(NODE).items)

    def list_pods(self) -> list[Object]:
        return list(self.cluster.list(POD, namespace=self.namespace).items)

    def create_pod(self, pod: Object) -> None:
        """Create a pod between two ticks. In one of a hundred cases, the next tick does not know of it yet."""
        self.cluster.create(POD, pod)
        if self.sent % 100:
            name = pod["metadata"]["name"]
            eventually(lambda: self.mirrors.pods.get(name, self.namespace), what="the pod is known")

    def delete_pod(self, name: str) -> None:
        self.cluster.delete(POD, name, self.namespace, grace_period_s=0)

    def step(self) -> None:
        super().step()
        assert not [node for node, gpus in self.most_held.items() if gpus > 8]


@pytest.fixture
def world(
    definitions: None, cluster: KubernetesClient, kubelet: FakeKubelet, namespace: str, tmp_path: Path
) -> Iterator[SiteWorld]:
    created = SiteWorld(cluster, kubelet, namespace, tmp_path)
    yield created
    created.close()


def test_random_jobs_and_pods_are_admitted(world: SiteWorld) -> None:
    play(world, Random(1), nodes=6, jobs=30, foreign=30)
    check(world)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(10))
def test_ten_thousand_jobs_and_pods_are_admitted(world: SiteWorld, seed: int) -> None:
    """A thousand for each seed, because a test has 15 minutes."""
    play(world, Random(seed), nodes=20, jobs=500, foreign=500)
    check(world)
