"""One control plane per test process, cleaned after each test, and a fresh namespace per test."""

from __future__ import annotations

import gc
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler.kubernetes.client import KubernetesClient, connect
from scheduler.kubernetes.flow_control import ClientLimits
from tests.kubernetes import custom_resources
from tests.kubernetes.control_plane import ASSETS, ControlPlane, missing_binaries
from tests.kubernetes.fake_kubelet import FakeKubelet
from tests.kubernetes.objects import NAMESPACE
from tests.kubernetes.operated import Operated
from tests.kubernetes.sweeping import sweep

HERE = Path(__file__).parent
UNHURRIED = ClientLimits(qps=1000.0, burst=1000)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = missing_binaries()
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.kubernetes)
            # API servers are killed during responses, and some sockets are left to the garbage collector. `cluster`
            # runs it after
            # each test, so that the warnings do not appear in other tests.
            item.add_marker(pytest.mark.filterwarnings("ignore:unclosed <ssl.SSLSocket:ResourceWarning"))
            if missing:
                reason = f"no {' and no '.join(missing)} in {ASSETS} (KUBEBUILDER_ASSETS)"
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """Not shared between xdist workers: a test that freezes the API server would freeze the other worker's."""
    plane = ControlPlane(tmp_path_factory.mktemp("control-plane"))
    try:
        plane.start()
        yield plane
    finally:
        plane.close()


@pytest.fixture
def cluster(control_plane: ControlPlane) -> Iterator[KubernetesClient]:
    """Yield an admin client. Afterwards, everything that an operator would see is removed."""
    opened = connect(control_plane.admin_kubeconfig, limits=UNHURRIED)
    yield opened
    control_plane.revive_api()
    sweep(opened)
    opened.close()
    gc.collect()


@pytest.fixture
def namespace(cluster: KubernetesClient) -> str:
    name = f"test-{uuid.uuid4().hex[:8]}"
    cluster.create(NAMESPACE, {"metadata": {"name": name}})
    return name


@pytest.fixture
def kubelet(cluster: KubernetesClient) -> Iterator[FakeKubelet]:
    """Yield a fake kubelet. Its nodes and pods are removed after the test."""
    started = FakeKubelet(cluster)
    started.start()
    yield started
    started.close()


@pytest.fixture(scope="session")
def definitions(control_plane: ControlPlane) -> None:
    """Install Ebbtide's custom resource definitions."""
    opened = connect(control_plane.admin_kubeconfig, limits=UNHURRIED)
    custom_resources.install(opened)
    opened.close()


@pytest.fixture
def operated(
    control_plane: ControlPlane,
    definitions: None,
    cluster: KubernetesClient,
    kubelet: FakeKubelet,
    namespace: str,
    tmp_path: Path,
) -> Iterator[Operated]:
    created = Operated(control_plane, cluster, kubelet, namespace, tmp_path)
    yield created
    created.close()
    assert all(gpus <= 8 for gpus in created.most_held.values()), f"booked twice: {created.most_held}"
