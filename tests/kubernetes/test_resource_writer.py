"""ResourceWriter: rejected creations are retried with backoff and do not slow others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from scheduler.kubernetes.api_actions import ActionPool
from scheduler.kubernetes.api_objects import CONFIG_MAP
from scheduler.kubernetes.client import KubernetesClient, connect
from scheduler.kubernetes.cluster_cache import ClusterCache
from scheduler.kubernetes.flow_control import RequestRecord
from scheduler.kubernetes.resource_writer import (
    PAUSE_BASE_S,
    PAUSE_CAP_S,
    RETRIES_PER_ROUND_MAX,
    ResourceWriter,
)
from scheduler.kubernetes.resource_writes import Create, Writes
from tests.kubernetes.control_plane import ControlPlane
from tests.kubernetes.objects import NAMESPACE, build_config_map


@dataclass
class Desk:
    """A writer with a simulated clock, and the statuses of its requests."""

    writer: ResourceWriter
    effects: ActionPool
    asked: list[RequestRecord]
    clock_s: list[float] = field(default_factory=lambda: [0.0])

    def write(self, *every: Writes) -> list[int]:
        self.asked.clear()
        self.effects.run_all(self.writer.build_actions(every))
        return [each.status for each in self.asked]

    def wait(self, seconds: float) -> None:
        self.clock_s[0] += seconds


@pytest.fixture
def desk(control_plane: ControlPlane, cluster: KubernetesClient) -> Iterator[Desk]:
    asked: list[RequestRecord] = []
    clock_s = [0.0]
    own = connect(control_plane.admin_kubeconfig, on_request=asked.append)
    effects = ActionPool()
    yield Desk(ResourceWriter(own, ClusterCache(own), monotonic_s=lambda: clock_s[0]), effects, asked, clock_s)
    effects.close()
    own.close()


def making(name: str, namespace: str) -> Writes:
    return (Create(CONFIG_MAP, build_config_map(name, namespace)),)


def test_rejected_creation_backs_off(desk: Desk, namespace: str) -> None:
    steps = making("lost", f"{namespace}-b")
    assert desk.write(steps) == [404]
    tries = []
    for second in range(int(4 * PAUSE_CAP_S)):
        desk.wait(1.0)
        if desk.write(steps):
            tries.append(second)
    pauses = [after - before for before, after in pairwise(tries)]
    assert tries[0] <= PAUSE_BASE_S
    assert max(pauses) <= PAUSE_CAP_S + 1.0
    assert len(tries) < 20


def test_creation_succeeds_once_the_namespace_exists(desk: Desk, cluster: KubernetesClient, namespace: str) -> None:
    steps = making("late", f"{namespace}-b")
    assert desk.write(steps) == [404]
    cluster.create(NAMESPACE, {"metadata": {"name": f"{namespace}-b"}})
    assert desk.write(steps) == []
    desk.wait(PAUSE_BASE_S)
    assert desk.write(steps) == [200]


def test_thousand_rejected_objects_do_not_slow_others(desk: Desk, namespace: str) -> None:
    lost = [making(f"lost-{number}", f"{namespace}-b") for number in range(3 * RETRIES_PER_ROUND_MAX)]
    assert len(desk.write(*lost)) == len(lost)
    desk.wait(PAUSE_BASE_S)
    for _ in range(2):
        new = making(f"new-{desk.clock_s[0]:.0f}", namespace)
        assert sorted(desk.write(*lost, new)) == [200, *[404] * RETRIES_PER_ROUND_MAX]
        desk.wait(PAUSE_CAP_S)
