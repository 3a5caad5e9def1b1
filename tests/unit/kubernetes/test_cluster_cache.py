"""ClusterCache with objects of arbitrary content."""

from __future__ import annotations

from pathlib import Path

import pytest

from scheduler.kubernetes.api_objects import (
    EPOCH_ANNOTATION,
    GENERATION_LABEL,
    JOB_LABEL,
    MANAGED_BY_LABEL,
    NODE_LABEL,
    ORIGIN_ANNOTATION,
    Object,
    uid_of,
)
from scheduler.kubernetes.client import ObjectList, connect
from scheduler.kubernetes.cluster_cache import ClusterCache
from tests.unit.kubernetes.test_flow_control import kubeconfig

ENDLESS = "9" * 5000
OURS = {MANAGED_BY_LABEL: "ebbtide", JOB_LABEL: "a", NODE_LABEL: "t0", GENERATION_LABEL: ENDLESS}


@pytest.fixture
def build_cache(tmp_path: Path) -> ClusterCache:
    """Return a cache without watches; tests pass the lists."""
    return ClusterCache(connect(kubeconfig(tmp_path, "http://127.0.0.1:1")))


def build_object(name: str, *, namespace: str = "", notes: dict[str, str] | None = None, **more: object) -> Object:
    meta = {"name": name, "namespace": namespace, "uid": f"{namespace}/{name}", "resourceVersion": "1"}
    return {"metadata": {**meta, "labels": OURS, "annotations": notes or {}}, **more}


def test_huge_numbers_in_labels_are_ignored(build_cache: ClusterCache) -> None:
    """Anyone who can write a pod or ConfigMap could otherwise kill the watch thread, and with it the operator."""
    notes = {EPOCH_ANNOTATION: ENDLESS}
    pod = build_object("p", namespace="ns", notes=notes, spec={"schedulerName": "ebbtide", "containers": []})
    build_cache.pods.replace(ObjectList((pod,), "1"))
    build_cache.plans.replace(ObjectList((build_object("ebbtide-a", namespace="ns", notes=notes),), "1"))
    build_cache.nodes.replace(ObjectList((build_object("t0", notes=notes),), "1"))
    view = build_cache.get_view()
    assert [each.generation for each in view.pods] == [0]
    assert [plan.generation for plan in view.plans.values()] == [-1]
    assert view.nodes["t0"].epoch == 0


def test_resource_in_another_namespace_is_a_different_entry(build_cache: ClusterCache) -> None:
    claims = {ORIGIN_ANNOTATION: "api"}
    own, other = (build_object("hello-k3f9q1", namespace=each, notes=claims, spec={}) for each in ("jobs", "else"))
    build_cache.jobs.replace(ObjectList((own, other), "1"))
    resources = build_cache.get_view().elastic_jobs
    assert uid_of(resources["jobs", "hello-k3f9q1"]) == uid_of(own)
    assert uid_of(resources["else", "hello-k3f9q1"]) == uid_of(other)
