"""The contract of KubernetesClient, on a real API server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from scheduler.kubernetes.api_error import ApiError
from scheduler.kubernetes.api_objects import (
    CONFIG_MAP,
    FIELD_MANAGER,
    NODE,
    POD,
    SERVICE,
    Object,
    ResourceKind,
    labels_of,
    name_of,
    uid_of,
    version_of,
)
from scheduler.kubernetes.client import EvictionResult, KubernetesClient, connect
from scheduler.kubernetes.flow_control import RequestRecord
from tests.kubernetes.control_plane import SERVICE_ACCOUNT, ControlPlane
from tests.kubernetes.fake_kubelet import FakeKubelet
from tests.kubernetes.objects import BUDGET, build_config_map, build_pod
from tests.kubernetes.waiting import eventually


def refused(ask: Callable[[], Any]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        ask()
    return caught.value


def is_ready(pod: Object) -> bool:
    return any(each["type"] == "Ready" and each["status"] == "True" for each in pod["status"].get("conditions", ()))


@pytest.fixture
def node(kubelet: FakeKubelet, namespace: str) -> str:
    return name_of(kubelet.add_node(f"node-of-{namespace}"))


def test_list_reads_all_pages(cluster: KubernetesClient, namespace: str) -> None:
    for number in range(7):
        cluster.create(CONFIG_MAP, build_config_map(f"c{number}", namespace, labels={"odd": str(number % 2)}))
    listed = cluster.list(CONFIG_MAP, namespace=namespace, page_size=3)
    assert [name_of(item) for item in listed.items] == [f"c{number}" for number in range(7)]
    assert all(item["kind"] == "ConfigMap" for item in listed.items)
    assert int(listed.resource_version) >= max(version_of(item) for item in listed.items)
    odd = cluster.list(CONFIG_MAP, namespace=namespace, label_selector="odd=1", page_size=2)
    assert [name_of(item) for item in odd.items] == ["c1", "c3", "c5"]
    named = cluster.list(CONFIG_MAP, namespace=namespace, field_selector="metadata.name=c2")
    assert [name_of(item) for item in named.items] == ["c2"]


def test_list_restarts_after_an_expired_page(
    cluster: KubernetesClient, control_plane: ControlPlane, namespace: str
) -> None:
    for number in range(6):
        cluster.create(CONFIG_MAP, build_config_map(f"c{number}", namespace))
    lists: list[int] = []

    def note(asked: RequestRecord) -> None:
        lists.append(asked.status)
        if len(lists) == 1:
            # Between the first and the second page, write an object and make server and etcd forget the past.
            cluster.create(CONFIG_MAP, build_config_map("c9", namespace))
            control_plane.forget_past()

    reader = connect(control_plane.admin_kubeconfig, on_request=note)
    listed = reader.list(CONFIG_MAP, namespace=namespace, page_size=4)
    assert [name_of(item) for item in listed.items] == [*(f"c{number}" for number in range(6)), "c9"]
    assert lists[1:] == [410, 200, 200]
    reader.close()


def test_missing_object_is_none_or_an_error(cluster: KubernetesClient, namespace: str) -> None:
    assert cluster.get_or_none(CONFIG_MAP, "nothing", namespace) is None
    assert refused(lambda: cluster.get(CONFIG_MAP, "nothing", namespace)).is_not_found
    assert refused(lambda: cluster.list(ResourceKind("nowhere.example", "v1", "Ghost", "ghosts"))).is_not_found


def test_create_fails_for_an_existing_name(cluster: KubernetesClient, namespace: str) -> None:
    created = cluster.create(CONFIG_MAP, build_config_map("c", namespace, k="v"))
    assert created["metadata"]["managedFields"][0]["manager"] == FIELD_MANAGER
    error = refused(lambda: cluster.create(CONFIG_MAP, build_config_map("c", namespace)))
    assert error.is_already_exists
    assert not error.is_conflict


def test_schema_violation_names_the_field(cluster: KubernetesClient, namespace: str) -> None:
    pod = build_pod("p", namespace)
    pod["spec"]["restartPolicy"] = "Sometimes"
    error = refused(lambda: cluster.create(POD, pod))
    assert error.is_invalid
    assert "restartPolicy" in error.message


def test_apply_creates_and_owns_only_its_fields(cluster: KubernetesClient, namespace: str) -> None:
    first = cluster.apply(CONFIG_MAP, build_config_map("c", namespace, ours="1"))
    cluster.patch(CONFIG_MAP, "c", namespace, change={"data": {"theirs": "x"}})
    second = cluster.apply(CONFIG_MAP, build_config_map("c", namespace, other="2"))
    assert uid_of(second) == uid_of(first)
    assert second["data"] == {"other": "2", "theirs": "x"}
    again = cluster.apply(CONFIG_MAP, build_config_map("c", namespace, other="2"))
    assert version_of(again) == version_of(second)


def test_apply_without_force_keeps_fields_of_others(
    cluster: KubernetesClient, namespace: str, control_plane: ControlPlane
) -> None:
    cluster.create(CONFIG_MAP, build_config_map("c", namespace, k="theirs"))
    error = refused(lambda: cluster.apply(CONFIG_MAP, build_config_map("c", namespace, k="ours"), force=False))
    assert error.is_conflict
    assert cluster.apply(CONFIG_MAP, build_config_map("c", namespace, k="ours"))["data"] == {"k": "ours"}


def test_apply_of_an_old_version_conflicts(cluster: KubernetesClient, namespace: str) -> None:
    old = cluster.apply(CONFIG_MAP, build_config_map("c", namespace, k="1"))
    cluster.apply(CONFIG_MAP, build_config_map("c", namespace, k="2"))
    late = build_config_map("c", namespace, k="3")
    late["metadata"]["resourceVersion"] = old["metadata"]["resourceVersion"]
    assert refused(lambda: cluster.apply(CONFIG_MAP, late)).is_conflict


@pytest.mark.parametrize("change", [{"data": {"k": "2"}}, [{"op": "replace", "path": "/data/k", "value": "2"}]])
def test_patch_of_an_old_version_conflicts(
    cluster: KubernetesClient, namespace: str, change: Object | list[Object]
) -> None:
    old = cluster.create(CONFIG_MAP, build_config_map("c", namespace, k="0"))["metadata"]["resourceVersion"]
    now = cluster.patch(CONFIG_MAP, "c", namespace, change={"data": {"k": "1"}})["metadata"]["resourceVersion"]
    assert refused(lambda: cluster.patch(CONFIG_MAP, "c", namespace, change=change, resource_version=old)).is_conflict
    patched = cluster.patch(CONFIG_MAP, "c", namespace, change=change, resource_version=now)
    assert patched["data"] == {"k": "2"}


def test_replace_of_an_old_version_conflicts(cluster: KubernetesClient, namespace: str) -> None:
    first = cluster.create(CONFIG_MAP, build_config_map("c", namespace, k="0"))
    second = cluster.replace(CONFIG_MAP, {**first, "data": {"k": "1"}})
    assert second["data"] == {"k": "1"}
    assert refused(lambda: cluster.replace(CONFIG_MAP, {**first, "data": {"k": "2"}})).is_conflict


def test_status_is_written_separately(cluster: KubernetesClient, node: str) -> None:
    before = cluster.get(NODE, node)
    condition = {"type": "Lent", "status": "True", "reason": "Test", "message": "", "lastTransitionTime": None}
    applied = cluster.apply(
        NODE, {"metadata": {"name": node}, "status": {"conditions": [condition]}}, subresource="status"
    )
    assert {each["type"] for each in applied["status"]["conditions"]} == {"Ready", "Lent"}
    old = before["metadata"]["resourceVersion"]
    assert refused(
        lambda: cluster.patch_status(NODE, node, change={"status": {"phase": "x"}}, resource_version=old)
    ).is_conflict


def test_delete_returns_a_terminating_object(cluster: KubernetesClient, namespace: str) -> None:
    assert cluster.delete(CONFIG_MAP, "nothing", namespace) is None
    cluster.create(CONFIG_MAP, build_config_map("c", namespace))
    assert cluster.delete(CONFIG_MAP, "c", namespace) is None
    held = build_config_map("held", namespace)
    held["metadata"]["finalizers"] = ["ebbtide.dev/test"]
    cluster.create(CONFIG_MAP, held)
    left = cluster.delete(CONFIG_MAP, "held", namespace)
    assert left is not None
    assert "deletionTimestamp" in left["metadata"]
    cluster.patch(CONFIG_MAP, "held", namespace, change={"metadata": {"finalizers": None}})
    assert cluster.get_or_none(CONFIG_MAP, "held", namespace) is None


def test_delete_checks_the_uid(cluster: KubernetesClient, namespace: str) -> None:
    created = cluster.create(CONFIG_MAP, build_config_map("c", namespace))
    assert cluster.delete(CONFIG_MAP, "c", namespace, uid="00000000-0000-0000-0000-000000000000") is None
    assert cluster.get_or_none(CONFIG_MAP, "c", namespace) == created
    old = created["metadata"]["resourceVersion"]
    cluster.patch(CONFIG_MAP, "c", namespace, change={"data": {"k": "v"}})
    error = refused(lambda: cluster.delete(CONFIG_MAP, "c", namespace, uid=uid_of(created), resource_version=old))
    assert error.is_conflict
    assert cluster.delete(CONFIG_MAP, "c", namespace, uid=uid_of(created)) is None
    assert cluster.get_or_none(CONFIG_MAP, "c", namespace) is None


def test_delete_of_bound_and_unbound_pods(
    cluster: KubernetesClient, kubelet: FakeKubelet, namespace: str, node: str
) -> None:
    kubelet.stop_s = lambda pod: 600.0
    cluster.create(POD, build_pod("free", namespace))
    assert cluster.delete(POD, "free", namespace, grace_period_s=30) is None
    assert cluster.get_or_none(POD, "free", namespace) is None
    pod = cluster.create(POD, build_pod("bound", namespace))
    cluster.bind(pod, node)
    # The API server checks its watch cache first, and deletes a pod that is unbound there without grace period.
    eventually(lambda: kubelet.pods.get("bound", namespace), what="the binding has come round")
    left = cluster.delete(POD, "bound", namespace, uid=uid_of(pod), grace_period_s=600)
    assert left is not None
    assert left["metadata"]["deletionGracePeriodSeconds"] == 600


def test_bind_is_idempotent_and_conflicts_elsewhere(
    cluster: KubernetesClient, kubelet: FakeKubelet, namespace: str, node: str
) -> None:
    other = name_of(kubelet.add_node(f"other-of-{namespace}"))
    pod = cluster.create(POD, build_pod("p", namespace))
    cluster.bind(pod, node)
    cluster.bind(pod, node)
    assert cluster.get(POD, "p", namespace)["spec"]["nodeName"] == node
    assert refused(lambda: cluster.bind(pod, other)).is_conflict


def test_bind_checks_the_uid(cluster: KubernetesClient, namespace: str, node: str) -> None:
    first = cluster.create(POD, build_pod("p", namespace))
    cluster.delete(POD, "p", namespace)
    cluster.create(POD, build_pod("p", namespace))
    assert refused(lambda: cluster.bind(first, node)).is_conflict
    assert "nodeName" not in cluster.get(POD, "p", namespace)["spec"]
    cluster.delete(POD, "p", namespace)
    assert refused(lambda: cluster.bind(first, node)).is_not_found


def test_eviction_respects_the_budget(
    cluster: KubernetesClient, kubelet: FakeKubelet, namespace: str, node: str
) -> None:
    pod = cluster.create(POD, build_pod("p", namespace, labels={"app": "a"}))
    cluster.bind(pod, node)
    budget = cluster.create(
        BUDGET,
        {
            "metadata": {"name": "b", "namespace": namespace},
            "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "a"}}},
        },
    )
    # The status that the disruption controller would write.
    status = {"observedGeneration": budget["metadata"]["generation"], "expectedPods": 1, "currentHealthy": 1}
    none_allowed = {**status, "desiredHealthy": 1, "disruptionsAllowed": 0}
    cluster.patch_status(BUDGET, "b", namespace, change={"status": none_allowed})
    kubelet_saw = cluster.get(POD, "p", namespace)
    # Budgets do not protect pods that are not ready yet.
    eventually(lambda: is_ready(cluster.get(POD, "p", namespace)), what="the kubelet says that it is ready")
    assert cluster.evict(kubelet_saw) is EvictionResult.BLOCKED
    cluster.patch_status(BUDGET, "b", namespace, change={"status": {**none_allowed, "disruptionsAllowed": 1}})
    assert cluster.evict(kubelet_saw) is EvictionResult.EVICTED
    cluster.delete(POD, "p", namespace, grace_period_s=0)
    assert cluster.evict(kubelet_saw) is EvictionResult.NOT_FOUND
    cluster.create(POD, build_pod("p", namespace))
    assert cluster.evict(kubelet_saw) is EvictionResult.NOT_FOUND


def test_forbidden_request_raises(cluster: KubernetesClient, control_plane: ControlPlane, namespace: str) -> None:
    cluster.create(SERVICE_ACCOUNT, {"metadata": {"name": "robot", "namespace": namespace}})
    for path in (
        control_plane.kubeconfig_of_user("somebody", "a-group"),
        control_plane.kubeconfig_of_service_account("robot", namespace),
    ):
        asker = connect(path)
        error = refused(lambda asker=asker: asker.list(SERVICE))  # type: ignore[misc]
        assert error.is_forbidden
        assert "cannot list resource" in error.message
        asker.close()


def test_labels_can_be_removed(cluster: KubernetesClient, namespace: str) -> None:
    cluster.create(CONFIG_MAP, build_config_map("c", namespace, labels={"a": "1", "b": "2"}))
    patched = cluster.patch(CONFIG_MAP, "c", namespace, change={"metadata": {"labels": {"a": None}}})
    assert labels_of(patched) == {"b": "2"}
