"""Lost, late and rejected responses: everything is done once, and the cache matches the server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from scheduler.kubernetes.api_objects import CONFIG_MAP, POD, name_of, uid_of, version_of
from scheduler.kubernetes.client import KubernetesClient, connect
from scheduler.kubernetes.flow_control import ClientLimits
from scheduler.kubernetes.object_cache import ObjectCache
from scheduler.kubernetes.reflector import Reflector
from tests.kubernetes.control_plane import ControlPlane
from tests.kubernetes.fake_kubelet import FakeKubelet
from tests.kubernetes.fault_proxy import FAULTLESS, Fault, FaultProxy
from tests.kubernetes.objects import build_config_map, build_pod
from tests.kubernetes.waiting import eventually

FAULTS = (Fault(429), Fault(503), Fault(swallow=True), Fault(delay_s=2.0))
STUBBORN = ClientLimits(qps=1000.0, burst=1000, read_timeout_s=1.0, retry_timeout_s=60.0)


@pytest.fixture
def proxy(control_plane: ControlPlane) -> Iterator[FaultProxy]:
    with FaultProxy(control_plane).running() as started:
        yield started


@pytest.fixture
def through(proxy: FaultProxy, tmp_path: Path) -> Iterator[KubernetesClient]:
    cluster = connect(proxy.kubeconfig(tmp_path), limits=STUBBORN, rng=Random(3))
    yield cluster
    cluster.close()


def test_lost_responses_create_once(
    cluster: KubernetesClient, through: KubernetesClient, proxy: FaultProxy, namespace: str
) -> None:
    rng = Random(7)
    hits: list[Fault] = []

    def fault(method: str, path: str) -> Fault:
        chosen = rng.choice(FAULTS) if rng.random() < 0.4 else FAULTLESS
        hits.append(chosen)
        return chosen

    mirror = ObjectCache(CONFIG_MAP, namespace=namespace)
    watcher = Reflector(through, mirror, idle_timeout_s=3.0, rng=Random(4))
    watcher.start()
    proxy.fault = fault
    for number in range(12):
        created = through.create(CONFIG_MAP, build_config_map(f"c{number}", namespace, labels={"n": str(number)}))
        mirror.assume(created)
        through.apply(CONFIG_MAP, build_config_map(f"c{number}", namespace, k="v"))
        if number % 3 == 0:
            assert through.delete(CONFIG_MAP, name_of(created), namespace, uid=uid_of(created)) is None
    assert set(FAULTS) <= set(hits)
    proxy.fault = lambda method, path: FAULTLESS
    items = cluster.list(CONFIG_MAP, namespace=namespace).items
    assert {name_of(item) for item in items} == {f"c{number}" for number in range(12) if number % 3}
    truth = {(namespace, name_of(item)): version_of(item) for item in items}
    eventually(
        lambda: {key: version_of(item) for key, item in mirror.snapshot().items()} == truth,
        what="the mirror is like the server",
    )
    watcher.stop()


def test_lost_bind_response_counts_as_bound(
    cluster: KubernetesClient, through: KubernetesClient, proxy: FaultProxy, kubelet: FakeKubelet, namespace: str
) -> None:
    node = name_of(kubelet.add_node(f"n-{namespace}"))
    pod = cluster.create(POD, build_pod("p", namespace))
    lost: list[str] = []

    def lose_one(method: str, path: str) -> Fault:
        if path.partition("?")[0].endswith("/binding") and not lost:
            lost.append(path)
            return Fault(swallow=True)
        return FAULTLESS

    proxy.fault = lose_one
    through.bind(pod, node)
    assert lost
    assert cluster.get(POD, "p", namespace)["spec"]["nodeName"] == node
