"""The rules for pods of templates are those of the API server: it rejects and accepts the same pods."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.kubernetes.api_error import ApiError
from scheduler.kubernetes.api_objects import POD
from scheduler.kubernetes.client import KubernetesClient
from tests.pod_rule_cases import ACCEPTED, REJECTED


def create(cluster: KubernetesClient, namespace: str, spec: dict[str, Any]) -> None:
    """Create the pod. The first container gets the name and the image that Ebbtide would give it."""
    first, *others = spec["containers"]
    containers = [{"name": "worker", "image": "trainer:1", **first}, *others]
    metadata = {"name": "pod", "namespace": namespace}
    cluster.create(POD, {"metadata": metadata, "spec": {**spec, "containers": containers}})


@pytest.mark.parametrize("spec", [spec for spec, _ in REJECTED])
def test_api_server_rejects_what_a_template_must_not_have(
    cluster: KubernetesClient, namespace: str, spec: dict[str, Any]
) -> None:
    with pytest.raises(ApiError) as refused:
        create(cluster, namespace, spec)
    assert refused.value.status == 422, refused.value


@pytest.mark.parametrize("spec", ACCEPTED)
def test_api_server_accepts_what_a_template_may_have(
    cluster: KubernetesClient, namespace: str, spec: dict[str, Any]
) -> None:
    create(cluster, namespace, spec)
