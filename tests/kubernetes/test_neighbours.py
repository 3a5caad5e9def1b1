"""Other users of the cluster: foreign pods, jobs and nodes, and queue controllers such as Kueue."""

from __future__ import annotations

from typing import Any

from scheduler.domain.events import EventCode
from scheduler.kubernetes.api_objects import (
    ELASTIC_JOB,
    GPU_RESOURCE,
    MANAGED_BY,
    NODE,
    POD,
    POOL,
    Object,
    annotations_of,
    labels_of,
    name_of,
)
from scheduler.store.protocol import Page
from tests.kubernetes.operated import Operated
from tests.kubernetes.waiting import eventually

COMMAND = ["python", "train.py"]


def build_foreign_pod(
    operated: Operated, name: str, gpus: int, *, node: str = "", scheduler: str = "volcano"
) -> Object:
    """Build a foreign pod, bound to `node` by its own scheduler, or unbound."""
    container = {"name": "main", "image": "x", "resources": {"limits": {GPU_RESOURCE: str(gpus)}}}
    spec: dict[str, Any] = {"containers": [container], "schedulerName": scheduler, "nodeName": node or None}
    group = {"scheduling.k8s.io/group-name": "theirs"}
    meta = {"name": name, "namespace": operated.namespace, "annotations": group}
    return operated.cluster.create(POD, {"metadata": meta, "spec": spec})


def used_nodes(operated: Operated) -> dict[str, int]:
    """Return the GPUs of our jobs by node."""
    return {
        pod["spec"]["nodeName"]: int(pod["spec"]["containers"][0]["resources"]["limits"][GPU_RESOURCE])
        for pod in operated.pods()
        if "nodeName" in pod["spec"]
    }


def taken_gpus(operated: Operated, node: str) -> int:
    """Return the GPUs that the operator counts as used by others."""
    known = operated.store.load().snapshot.nodes.get(node)
    return -1 if known is None else known.other_gpus


def test_foreign_pods_count_as_used(operated: Operated) -> None:
    operated.add_nodes(2)
    first, second = (f"{operated.namespace}-t{number}" for number in range(2))
    early = build_foreign_pod(operated, "early", 6, node=first)
    waits = build_foreign_pod(operated, "waits", 8, scheduler="default-scheduler")
    operated.start_operator()
    operated.submit("llama", 8, 8)
    operated.until_phase("llama", "Running")
    assert used_nodes(operated) == {second: 8}
    operated.submit("small", 4, 4)
    eventually(lambda: operated.phase("small") == "Queued", what="2 free GPUs are too few")
    operated.kubelet.finish(early, 0)
    operated.until_phase("small", "Running")
    assert used_nodes(operated) == {first: 4, second: 8}
    late = build_foreign_pod(operated, "late", 4, node=first, scheduler="default-scheduler")
    eventually(lambda: taken_gpus(operated, first) == 4, what="the late pod is seen")
    operated.submit("more", 2, 2)
    eventually(lambda: operated.phase("more") == "Queued", what="no GPU is free")
    operated.cluster.delete(POD, name_of(late), operated.namespace, grace_period_s=0)
    operated.until_phase("more", "Running")
    assert [operated.phase(name) for name in ("llama", "small")] == ["Running", "Running"]
    assert operated.cluster.get(POD, name_of(waits), operated.namespace) == waits, "it waits for its own scheduler"


def _pool_problem(operated: Operated) -> str:
    return str(operated.cluster.get(POOL, "training").get("status", {}).get("problem", ""))


def test_foreign_taint_cordons_until_tolerated(operated: Operated) -> None:
    operated.add_nodes(2)
    first, second = (f"{operated.namespace}-t{number}" for number in range(2))
    kept = {"key": "dedicated", "value": "others", "effect": "NoExecute"}
    operated.cluster.patch(NODE, first, change={"spec": {"taints": [kept]}})
    operated.start_operator()
    operated.submit("llama", 8, 8)
    operated.until_phase("llama", "Running")
    operated.submit("small", 4, 4)
    eventually(lambda: operated.phase("small") == "Queued", what="the free node is not for us")
    assert used_nodes(operated) == {second: 8}
    eventually(lambda: _pool_problem(operated) == "TaintsNotTolerated", what="the Pool says which taints")
    bears = {"key": "dedicated", "operator": "Equal", "value": "others"}
    operated.cluster.patch(POOL, "training", change={"spec": {"tolerations": [bears]}})
    operated.until_phase("small", "Running")
    assert used_nodes(operated) == {first: 4, second: 8}
    (pod,) = [pod for pod in operated.pods() if pod["spec"].get("nodeName") == first]
    assert bears in pod["spec"]["tolerations"], "or NoExecute would have it evicted"
    eventually(lambda: not _pool_problem(operated), what="nothing is wrong with the Pool any more")


def test_job_of_another_manager_is_ignored(operated: Operated) -> None:
    operated.add_nodes(1)
    operated.start_operator()
    spec = {"gpus": {"min": 1, "max": 8}, "command": COMMAND, "managedBy": "kueue.x-k8s.io/multikueue"}
    operated.apply_job("theirs", spec)
    before = operated.job("theirs")
    operated.apply_job("ours", {**spec, "managedBy": MANAGED_BY})
    operated.until_phase("ours", "Running")
    operated.cluster.patch(ELASTIC_JOB, "theirs", operated.namespace, change={"spec": {"suspend": True}})
    operated.submit("later", 1, 1)
    eventually(lambda: operated.phase("later") in ("Running", "Queued"), what="rounds went by")
    after = operated.job("theirs")
    assert "status" not in after
    assert "finalizers" not in after["metadata"]
    assert (labels_of(after), annotations_of(after)) == (labels_of(before), annotations_of(before))
    assert all(job.spec.name != "theirs" for job in operated.store.load().snapshot.jobs.values())
    assert all("theirs" not in name_of(pod) for pod in operated.pods())
    operated.cluster.delete(ELASTIC_JOB, "theirs", operated.namespace)
    assert operated.find("theirs") is None, "nothing of ours holds it"


def test_suspended_job_follows_its_queue_controller(operated: Operated) -> None:
    """Like Kueue's integrations: created suspended, admitted, preempted, admitted again."""
    operated.add_nodes(1)
    operated.start_operator()
    spec = {"gpus": {"min": 8, "max": 8}, "steps": 10**9, "command": COMMAND, "suspend": True}
    operated.apply_job("llama", spec)
    eventually(lambda: operated.condition("llama", "Suspended") == "True", what="it rests from the start")
    operated.submit("first", 8, 8)
    operated.until_phase("first", "Running")
    assert all("llama" not in name_of(pod) for pod in operated.pods())
    operated.cluster.delete(ELASTIC_JOB, "first", operated.namespace)
    _suspend(operated, False)
    operated.until_phase("llama", "Running")
    eventually(lambda: _saved_steps(operated) > 5.0, what="it has saved some steps")
    before = _saved_steps(operated)
    _suspend(operated, True)
    operated.until_phase("llama", "Suspended")
    eventually(lambda: not operated.pods(), what="it has given its GPUs back")
    operated.submit("second", 8, 8)
    operated.until_phase("second", "Running")
    operated.cluster.delete(ELASTIC_JOB, "second", operated.namespace)
    _suspend(operated, False)
    operated.until_phase("llama", "Running")
    assert _saved_steps(operated) >= before
    lost = [
        each for each in operated.store.list_events(Page(limit=10_000)) if each.event.code is EventCode.JOB_LOST_WORK
    ]
    assert lost == []


def _suspend(operated: Operated, suspend: bool) -> None:
    operated.cluster.patch(ELASTIC_JOB, "llama", operated.namespace, change={"spec": {"suspend": suspend}})


def _saved_steps(operated: Operated) -> float:
    jobs = operated.store.load().snapshot.jobs.values()
    return next(job.progress.checkpoint_steps for job in jobs if job.spec.name == "llama")


def test_foreign_nodes_are_never_touched(operated: Operated) -> None:
    operated.add_nodes(1)
    theirs = operated.kubelet.add_node(f"{operated.namespace}-v", gpus=8, labels={"volcano.sh/nodes": "batch"})
    bare = operated.kubelet.add_node(f"{operated.namespace}-w", gpus=8)
    pod = build_foreign_pod(operated, "volcano-task", 8, node=name_of(theirs))
    operated.start_operator()
    operated.submit("llama", 8, 8)
    operated.submit("wide", 16, 16)
    operated.until_phase("llama", "Running")
    eventually(lambda: operated.condition("wide", "Scheduled") == "False", what="it is told why it waits")
    assert set(used_nodes(operated)) == {f"{operated.namespace}-t0"}
    for node in (theirs, bare):
        after = operated.cluster.get(NODE, name_of(node))
        assert (labels_of(after), annotations_of(after)) == (labels_of(node), annotations_of(node))
        assert after["spec"] == node["spec"]
    left = operated.cluster.get(POD, name_of(pod), operated.namespace)
    assert left["status"]["phase"] == "Running"
    assert (labels_of(left), annotations_of(left)) == (labels_of(pod), annotations_of(pod))
    assert {name_of(theirs), name_of(bare)}.isdisjoint(operated.store.load().snapshot.nodes)
