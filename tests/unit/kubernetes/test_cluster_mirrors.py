"""What mirrors make of objects that anybody may have written."""

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
from tests.unit.kubernetes.test_asking import kubeconfig

ENDLESS = "9" * 5000
OURS = {MANAGED_BY_LABEL: "ebbtide", JOB_LABEL: "a", NODE_LABEL: "t0", GENERATION_LABEL: ENDLESS}


@pytest.fixture
def mirrors(tmp_path: Path) -> ClusterCache:
    """Never started: lists are given by hand."""
    return ClusterCache(connect(kubeconfig(tmp_path, "http://127.0.0.1:1")))


def an_object(name: str, *, namespace: str = "", notes: dict[str, str] | None = None, **more: object) -> Object:
    meta = {"name": name, "namespace": namespace, "uid": f"{namespace}/{name}", "resourceVersion": "1"}
    return {"metadata": {**meta, "labels": OURS, "annotations": notes or {}}, **more}


def test_numbers_of_thousands_of_digits_stop_nobody(mirrors: ClusterCache) -> None:
    """Who may write a pod or a ConfigMap somewhere could end the thread that watches them, and with it the operator."""
    notes = {EPOCH_ANNOTATION: ENDLESS}
    pod = an_object("p", namespace="ns", notes=notes, spec={"schedulerName": "ebbtide", "containers": []})
    mirrors.pods.replace(ObjectList((pod,), "1"))
    mirrors.plans.replace(ObjectList((an_object("ebbtide-a", namespace="ns", notes=notes),), "1"))
    mirrors.nodes.replace(ObjectList((an_object("t0", notes=notes),), "1"))
    view = mirrors.get_view()
    assert [each.generation for each in view.pods] == [0]
    assert [plan.generation for plan in view.plans.values()] == [-1]
    assert view.nodes["t0"].epoch == 0


def test_a_resource_of_another_namespace_that_claims_a_job_is_another_one(mirrors: ClusterCache) -> None:
    claims = {ORIGIN_ANNOTATION: "api"}
    own, other = (an_object("hello-k3f9q1", namespace=each, notes=claims, spec={}) for each in ("jobs", "else"))
    mirrors.jobs.replace(ObjectList((own, other), "1"))
    resources = mirrors.get_view().elastic_jobs
    assert uid_of(resources["jobs", "hello-k3f9q1"]) == uid_of(own)
    assert uid_of(resources["else", "hello-k3f9q1"]) == uid_of(other)
