"""The behavior of the fake kubelet that executors rely on."""

from __future__ import annotations

import time

from scheduler.kubernetes.api_objects import GPU_RESOURCE, LEASE, NODE, POD, Object, name_of
from scheduler.kubernetes.client import KubernetesClient
from tests.kubernetes.fake_kubelet import LEASE_NAMESPACE, FakeKubelet
from tests.kubernetes.objects import build_pod
from tests.kubernetes.waiting import eventually


def bound(cluster: KubernetesClient, name: str, namespace: str, node: str, *, grace_s: int = 30) -> Object:
    pod = cluster.create(POD, build_pod(name, namespace, gpus=4, grace_s=grace_s))
    cluster.bind(pod, node)
    return pod


def phase(cluster: KubernetesClient, pod: Object) -> str:
    found = cluster.get_or_none(POD, name_of(pod), pod["metadata"]["namespace"])
    return str(found["status"]["phase"]) if found else "gone"


def ready(node: Object) -> str:
    (condition,) = [each for each in node["status"]["conditions"] if each["type"] == "Ready"]
    return str(condition["status"])


def test_node_is_ready_with_gpus(cluster: KubernetesClient, namespace: str) -> None:
    kubelet = FakeKubelet(cluster, lease_period_s=0.2)
    kubelet.start()
    node = kubelet.add_node(f"n-{namespace}", gpus=4, labels={"pool": "a"})
    assert node["status"]["allocatable"][GPU_RESOURCE] == "4"
    assert ready(node) == "True"
    lease = cluster.get(LEASE, name_of(node), LEASE_NAMESPACE)
    eventually(lambda: cluster.get(LEASE, name_of(node), LEASE_NAMESPACE) != lease, what="it is renewed")
    kubelet.close()
    assert cluster.get_or_none(NODE, name_of(node)) is None


def test_bound_pod_runs_and_exits(cluster: KubernetesClient, kubelet: FakeKubelet, namespace: str) -> None:
    started: list[str] = []
    kubelet.on_start = lambda pod: started.append(name_of(pod))
    node = name_of(kubelet.add_node(f"n-{namespace}"))
    good, bad = (bound(cluster, name, namespace, node) for name in ("good", "bad"))
    eventually(lambda: {phase(cluster, good), phase(cluster, bad)} == {"Running"}, what="both run")
    assert sorted(started) == ["bad", "good"]
    assert cluster.get(POD, "good", namespace)["status"]["podIP"].startswith("10.")
    kubelet.finish(good, 0)
    kubelet.finish(bad, 3)
    eventually(lambda: (phase(cluster, good), phase(cluster, bad)) == ("Succeeded", "Failed"), what="both ended")
    (container,) = cluster.get(POD, "bad", namespace)["status"]["containerStatuses"]
    assert container["state"]["terminated"]["exitCode"] == 3


def test_deleted_pod_ends_within_its_grace_period(
    cluster: KubernetesClient, kubelet: FakeKubelet, namespace: str
) -> None:
    reported: list[str] = []
    kubelet.on_stop = lambda pod: reported.append(name_of(pod))
    kubelet.stop_s = lambda pod: {"quick": 0.5, "slow": 600.0}[name_of(pod)]
    node = name_of(kubelet.add_node(f"n-{namespace}"))
    pods = [bound(cluster, name, namespace, node) for name in ("quick", "slow")]
    eventually(lambda: {phase(cluster, pod) for pod in pods} == {"Running"}, what="both run")
    began_s = time.monotonic()
    for pod in pods:
        cluster.delete(POD, name_of(pod), namespace, grace_period_s=2)
    eventually(lambda: phase(cluster, pods[0]) == "gone", what="the quick one is gone")
    eventually(lambda: phase(cluster, pods[1]) == "gone", what="the slow one is gone")
    assert time.monotonic() - began_s >= 2.0
    assert sorted(reported) == ["quick", "slow"]


def test_failed_node_is_inactive_until_healed(cluster: KubernetesClient, kubelet: FakeKubelet, namespace: str) -> None:
    node = name_of(kubelet.add_node(f"n-{namespace}"))
    pod = bound(cluster, "p", namespace, node)
    eventually(lambda: phase(cluster, pod) == "Running", what="it runs")
    kubelet.fail_node(node)
    assert ready(cluster.get(NODE, node)) == "Unknown"
    cluster.delete(POD, "p", namespace, grace_period_s=1)
    time.sleep(2.0)
    assert phase(cluster, pod) == "Running"
    kubelet.heal_node(node)
    eventually(lambda: phase(cluster, pod) == "gone", what="the deletion is finished")
    assert ready(cluster.get(NODE, node)) == "True"
