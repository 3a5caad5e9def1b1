"""KubernetesExecutor on a real API server: jobs as pods, loans as taints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from scheduler.domain.commands import CancelJob, ReportDemand, ScaleJob, SubmitJob
from scheduler.domain.job_account import OnResize
from scheduler.domain.job_spec import JobSpec
from scheduler.domain.job_state import JobState
from scheduler.domain.lending_policy import LendingPolicy
from scheduler.domain.observation import AgentReport
from scheduler.kubernetes.api_objects import (
    CONFIG_MAP,
    ELASTIC_JOB,
    EPOCH_ANNOTATION,
    GPU_RESOURCE,
    JOB_LABEL,
    LOAN_LABEL,
    LOANED_TAINT_KEY,
    NODE,
    ORIGIN_ANNOTATION,
    ORIGIN_API,
    POD,
    SECRET,
    SERVICE,
    Object,
    annotations_of,
    labels_of,
    name_of,
    uid_of,
)
from scheduler.kubernetes.client import KubernetesClient
from scheduler.store.protocol import Page
from tests.kubernetes.fake_kubelet import FakeKubelet
from tests.kubernetes.site import Site
from tests.kubernetes.waiting import eventually


@pytest.fixture
def site(
    definitions: None, cluster: KubernetesClient, kubelet: FakeKubelet, namespace: str, tmp_path: Path
) -> Iterator[Site]:
    created = Site(cluster, kubelet, namespace, tmp_path)
    yield created
    assert all(gpus <= 8 for gpus in created.most_held.values()), f"booked twice: {created.most_held}"
    created.close()


def spec(name: str, least: int, most: int | None = None) -> JobSpec:
    return JobSpec(
        name, least, most or least, steps=10**9, command=("python", "train.py"), on_resize=OnResize.CHECKPOINT
    )


def is_running(site: Site, job_id: str, gpus: int) -> bool:
    job = site.job(job_id)
    return job.state is JobState.RUNNING and job.allocation.held_gpus == gpus


def start(site: Site, job_id: str, least: int, most: int | None = None) -> None:
    site.send(SubmitJob(job_id, spec(job_id, least, most)))
    site.step()
    site.until(lambda: is_running(site, job_id, most or least), what=f"{job_id} runs on {most or least} GPUs")


def node_of(pod: Object) -> str:
    return str(pod["spec"]["nodeName"])


def test_job_becomes_a_gang_on_the_decided_nodes(site: Site) -> None:
    site.add_pools(training=2, inference=0)
    start(site, "llama-1", 12)
    target = site.job("llama-1").allocation.target
    pods = site.pods("llama-1")
    assert {node_of(pod): pod["spec"]["containers"][0]["resources"]["limits"][GPU_RESOURCE] for pod in pods} == {
        node: str(len(indices)) for node, indices in target.items()
    }
    assert all(pod["spec"]["schedulerName"] == "ebbtide" for pod in pods)
    assert all(annotations_of(pod)[EPOCH_ANNOTATION] == str(site.epoch) for pod in pods)
    for kind in (SERVICE, CONFIG_MAP, SECRET):
        assert site.cluster.get_or_none(kind, "ebbtide-llama-1", site.namespace) is not None


def test_reports_of_an_unstarted_job_are_pruned(site: Site) -> None:
    site.add_pools(training=1, inference=0)
    for generation in (0, 3):
        node = f"{site.namespace}-t{generation}"
        site.store.run_log.record_reports(AgentReport("gone-before", node, "pod-1", site.clock.now_s(), generation))
    site.step()
    site.until(lambda: not site.store.run_log.list_reports(), what="its report is gone")


def test_finished_job_leaves_nothing(site: Site) -> None:
    site.add_pools(training=1, inference=0)
    start(site, "llama-1", 4)
    site.agents.finish("llama-1")
    site.until(lambda: site.job("llama-1").state is JobState.SUCCEEDED, what="it has succeeded")
    site.until(lambda: not site.pods(), what="its pods are gone")
    site.until(lambda: not _objects(site, "llama-1"), what="its other objects are gone")
    site.until(lambda: not site.store.run_log.list_begun_runs(), what="the run log is empty")


def _objects(site: Site, job_id: str) -> list[Object]:
    found = (
        site.cluster.get_or_none(kind, f"ebbtide-{job_id}", site.namespace) for kind in (SERVICE, CONFIG_MAP, SECRET)
    )
    return [each for each in found if each is not None]


def test_resize_creates_pods_on_new_nodes_only(site: Site) -> None:
    site.add_pools(training=2, inference=0)
    start(site, "llama-1", 8, 8)
    (before,) = site.pods("llama-1")
    site.send(ScaleJob("llama-1", 8, 16))
    site.until(lambda: is_running(site, "llama-1", 16), what="it runs on 16 GPUs")
    after = {node_of(pod): pod for pod in site.pods("llama-1")}
    assert uid_of(after[node_of(before)]) == uid_of(before), "the agent on the node that stays is the same"
    assert len(after) == 2
    assert site.agents.began == [("llama-1", 1), ("llama-1", site.job("llama-1").allocation.generation)]


def test_move_to_other_gpus_of_the_node(site: Site) -> None:
    """The node has room for both pods, but agents are identified by job and node."""
    site.add_pools(training=1, inference=0)
    start(site, "llama-1", 2, 2)
    (before,) = site.pods("llama-1")
    both: list[int] = []
    site.kubelet.stop_s = lambda pod: 4.0

    def has_moved() -> bool:
        both.append(len([pod for pod in site.pods("llama-1") if pod["spec"].get("nodeName")]))
        return is_running(site, "llama-1", 4)

    site.send(ScaleJob("llama-1", 4, 4))
    site.until(has_moved, what="it runs on 4 GPUs")
    assert max(both) == 1, "never two pods of a job on a node"
    assert uid_of(before) not in {uid_of(pod) for pod in site.pods("llama-1")}
    assert site.job("llama-1").account.failures == 0


def test_cancelled_job_is_gone_after_its_grace_period(site: Site) -> None:
    site.add_pools(training=1, inference=0)
    start(site, "llama-1", 4)
    site.send(CancelJob("llama-1"))
    site.until(lambda: site.job("llama-1").state is JobState.CANCELLED, what="it is cancelled")
    site.until(lambda: not site.pods(), what="its pods are gone")


def test_foreign_pods_keep_their_gpus(site: Site) -> None:
    site.add_pools(training=1, inference=0)
    site.step()
    foreign = _foreign_pod(site, "kueue-job", 6)
    eventually(lambda: site.mirrors.pods.get("kueue-job", site.namespace), what="the pod of others is seen")
    site.send(SubmitJob("llama-1", spec("llama-1", 4)))
    for _ in range(10):
        site.step()
    assert site.job("llama-1").state is JobState.QUEUED
    assert site.pods() == []
    assert site.cluster.get(POD, name_of(foreign), site.namespace)["metadata"].get("deletionTimestamp") is None
    site.cluster.delete(POD, name_of(foreign), site.namespace, grace_period_s=0)
    site.until(lambda: is_running(site, "llama-1", 4), what="it runs once the other pod is gone")


def test_job_with_the_longest_name_runs(site: Site) -> None:
    """Pod names are host names and Services have names: DNS labels of at most 63 characters."""
    site.add_pools(training=1, inference=0)
    job_id = f"{'x' * 52}-k3f9q1"
    start(site, job_id, 4)
    assert all(pod["metadata"]["name"] == pod["spec"]["hostname"] for pod in site.pods(job_id))
    site.send(CancelJob(job_id))
    site.until(lambda: not site.pods(), what="its pods are gone")
    site.until(
        lambda: not site.cluster.list(SERVICE, namespace=site.namespace, label_selector=JOB_LABEL).items, what="clean"
    )


def test_rejected_pods_do_not_block_other_jobs(site: Site) -> None:
    """Rejections by a quota or a policy; here, by a missing namespace."""
    site.add_pools(training=1, inference=0)
    start(site, "llama-1", 4)
    site.send(SubmitJob("homeless-1", replace(spec("homeless-1", 4), namespace="not-there")))
    site.step()
    site.until(lambda: site.job("homeless-1").state is JobState.STARTING, what="it has GPUs and cannot use them")
    site.send(CancelJob("llama-1"))
    site.until(lambda: site.job("llama-1").state is JobState.CANCELLED, what="the other one is cancelled")
    start(site, "llama-2", 4)
    assert site.job("homeless-1").state is JobState.STARTING


def test_foreign_resource_does_not_own_the_jobs_objects(site: Site) -> None:
    """The garbage collector deletes objects whose owner does not exist in their namespace."""
    site.add_pools(training=1, inference=0)
    meta = {"name": "llama-1", "namespace": "default", "annotations": {ORIGIN_ANNOTATION: ORIGIN_API}}
    body = {"metadata": meta, "spec": {"gpus": {"min": 1, "max": 1}, "command": ["x"]}}
    site.cluster.create(ELASTIC_JOB, body)
    eventually(lambda: site.mirrors.jobs.get("llama-1", "default"), what="the claim is seen")
    start(site, "llama-1", 4)
    assert all("ownerReferences" not in pod["metadata"] for pod in site.pods("llama-1"))


def _foreign_pod(site: Site, name: str, gpus: int, *, node: str = "") -> Object:
    container = {"name": "main", "image": "x", "resources": {"limits": {GPU_RESOURCE: str(gpus)}}}
    spec = {"containers": [container], "nodeName": node or f"{site.namespace}-t0"}
    return site.cluster.create(POD, {"metadata": {"name": name, "namespace": site.namespace}, "spec": spec})


def test_new_leader_starts_nothing_twice(site: Site) -> None:
    site.add_pools(training=2, inference=0)
    start(site, "llama-1", 12)
    before = {uid_of(pod) for pod in site.pods("llama-1")}
    site.executor.close()
    site.executor = site.new_executor()
    site.executor.converge(site.snapshot)
    for _ in range(10):
        site.step()
    assert {uid_of(pod) for pod in site.pods("llama-1")} == before
    assert is_running(site, "llama-1", 12)
    assert site.agents.began == [("llama-1", 1)]


def test_evicted_pod_costs_no_retry(site: Site) -> None:
    site.add_pools(training=2, inference=0)
    start(site, "llama-1", 12)
    victim = site.pods("llama-1")[0]
    site.cluster.delete(POD, name_of(victim), site.namespace, grace_period_s=0)
    site.until(lambda: site.job("llama-1").allocation.generation > 1, what="it is decided anew")
    site.until(lambda: is_running(site, "llama-1", 12), what="it runs again")
    assert site.job("llama-1").account.failures == 0


def test_lent_node_is_tainted_and_returned(site: Site) -> None:
    lending = LendingPolicy(headroom=0.0, return_deadline_s=30.0, cold_start_s=0.0, demand_profile=(0.0,) * 24)
    site.add_pools(training=1, inference=2, lending=lending)
    own = {"ebbtide.dev/pool": "chat"}  # a label chosen by the administrator
    site.cluster.patch(NODE, f"{site.namespace}-i0", change={"metadata": {"labels": own}})
    before = {name_of(node): labels_of(node) for node in site.cluster.list(NODE).items}
    site.send(ReportDemand("inference", 0.0))
    start(site, "llama-1", 8, 16)
    lent = [node for node in site.cluster.list(NODE).items if LOAN_LABEL in labels_of(node)]
    assert all(_is_tainted(node) for node in lent)
    used = {node_of(pod) for pod in site.pods("llama-1")} & {name_of(node) for node in lent}
    assert used, "it grew onto a lent node"
    site.send(ReportDemand("inference", 16.0))
    site.until(lambda: not site.snapshot.loans, what="all nodes are home")
    site.until(lambda: not _bears_a_loan(site), what="no node bears a loan")
    site.until(lambda: is_running(site, "llama-1", 8), what="it goes on on its own node")
    assert {name_of(node): labels_of(node) for node in site.cluster.list(NODE).items} == before
    assert all(event.event.code.value != "RecallLate" for event in site.store.list_events(_all()))


def _bears_a_loan(site: Site) -> bool:
    return any(LOAN_LABEL in labels_of(node) or _is_tainted(node) for node in site.cluster.list(NODE).items)


def _is_tainted(node: Object) -> bool:
    return any(taint["key"] == LOANED_TAINT_KEY for taint in node["spec"].get("taints", ()))


def _all() -> Page:
    return Page(limit=10_000)
