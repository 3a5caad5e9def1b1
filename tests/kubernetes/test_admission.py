"""Requests that the API server rejects with 500 until someone fixes the cluster. Other jobs do not wait."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scheduler.domain.commands import CancelJob, ReportDemand, SubmitJob
from scheduler.domain.job_account import OnResize
from scheduler.domain.job_spec import JobSpec
from scheduler.domain.job_state import JobState
from scheduler.domain.lending_policy import LendingPolicy
from scheduler.kubernetes.api_error import ApiError
from scheduler.kubernetes.api_objects import GPU_RESOURCE, NODE, POD, Object, ResourceKind
from scheduler.kubernetes.client import KubernetesClient
from scheduler.kubernetes.node_view import parse_node_view
from tests.kubernetes.fake_kubelet import FakeKubelet
from tests.kubernetes.objects import BUDGET, NAMESPACE
from tests.kubernetes.site import Site
from tests.kubernetes.waiting import eventually

WEBHOOK = ResourceKind(
    "admissionregistration.k8s.io",
    "v1",
    "ValidatingWebhookConfiguration",
    "validatingwebhookconfigurations",
    is_namespaced=False,
)


@pytest.fixture
def site(
    definitions: None, cluster: KubernetesClient, kubelet: FakeKubelet, namespace: str, tmp_path: Path
) -> Iterator[Site]:
    created = Site(cluster, kubelet, namespace, tmp_path)
    yield created
    created.close()


def spec(name: str, gpus: int) -> JobSpec:
    return JobSpec(name, gpus, gpus, steps=10**9, command=("python", "train.py"), on_resize=OnResize.CHECKPOINT)


def start(site: Site, job_id: str, gpus: int) -> None:
    site.send(SubmitJob(job_id, spec(job_id, gpus)))
    site.step()
    site.until(lambda: site.job(job_id).state is JobState.RUNNING, what=f"{job_id} runs")


def gives_its_gpus_back(site: Site, job_id: str) -> None:
    site.send(CancelJob(job_id))
    site.step()
    site.until(lambda: job_id not in site.snapshot.jobs, what=f"the GPUs of {job_id} are free")


@contextmanager
def unavailable_webhook(site: Site, namespace: str) -> Iterator[None]:
    """Register an unavailable admission webhook for pods of the namespace."""
    hook = {
        "name": "down.example.dev",
        "clientConfig": {"url": "https://127.0.0.1:1/"},
        "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}],
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
        "failurePolicy": "Fail",
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
    }
    site.cluster.create(WEBHOOK, {"metadata": {"name": namespace}, "webhooks": [hook]})
    try:
        eventually(lambda: not _may_make_pods(site, namespace), what="the webhook is asked")
        yield
    finally:
        site.cluster.delete(WEBHOOK, namespace)


def _may_make_pods(site: Site, namespace: str) -> bool:
    try:
        site.cluster.create(POD, build_pod("tried", namespace))
    except ApiError as error:
        return not error.is_webhook_unavailable
    site.cluster.delete(POD, "tried", namespace, grace_period_s=0)
    return True


def build_pod(name: str, namespace: str, *, gpus: int = 0, node: str = "") -> Object:
    limits = {GPU_RESOURCE: str(gpus)} if gpus else {}
    spec: dict[str, Any] = {"containers": [{"name": "main", "image": "x", "resources": {"limits": limits}}]}
    meta = {"name": name, "namespace": namespace, "labels": {"app": "chat"}}
    return {"metadata": meta, "spec": {**spec, "nodeName": node or None}}


def test_unavailable_webhook_does_not_block_other_jobs(site: Site) -> None:
    site.add_pools(training=1, inference=0)
    start(site, "llama-1", 4)
    theirs = f"{site.namespace}-b"
    site.cluster.create(NAMESPACE, {"metadata": {"name": theirs}})
    with unavailable_webhook(site, theirs):
        site.send(SubmitJob("unadmitted-1", replace(spec("unadmitted-1", 4), namespace=theirs)))
        site.step()
        site.until(lambda: site.job("unadmitted-1").state is JobState.STARTING, what="it has GPUs, and no pods")
        gives_its_gpus_back(site, "llama-1")
        assert site.job("unadmitted-1").state is JobState.STARTING
    site.until(lambda: site.job("unadmitted-1").state is JobState.RUNNING, what="it is admitted")


def test_pod_with_two_budgets_does_not_block_other_loans(site: Site) -> None:
    """The API server never evicts such a pod, and reports that with status 500."""
    node = f"{site.namespace}-i0"
    lending = LendingPolicy(headroom=0.0, return_deadline_s=600.0, cold_start_s=0.0, demand_profile=(0.0,) * 24)
    site.add_pools(training=1, inference=3, lending=lending)
    site.send(ReportDemand("inference", 0.0))
    start(site, "llama-1", 4)
    for number in range(2):
        pod = build_pod(f"chat-{number}", site.namespace, gpus=1, node=f"{site.namespace}-i{number}")
        site.cluster.create(POD, pod)
    for name in ("by-app", "by-team"):
        selector = {"matchLabels": {"app": "chat"}}
        body = {
            "metadata": {"name": name, "namespace": site.namespace},
            "spec": {"minAvailable": 1, "selector": selector},
        }
        site.cluster.create(BUDGET, body)
    site.send(SubmitJob("wide-1", spec("wide-1", 16)))
    site.until(lambda: parse_node_view(site.cluster.get(NODE, node)).is_tainted, what="a node is offered and closed")
    gives_its_gpus_back(site, "llama-1")
    assert all(site.cluster.get_or_none(POD, f"chat-{number}", site.namespace) is not None for number in range(2))
