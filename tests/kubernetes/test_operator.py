"""The operator process on a real API server: custom resources become pods, loans and statuses."""

from __future__ import annotations

import signal

from scheduler.domain.commands import Command, ScaleJob, SubmitJob
from scheduler.domain.job_spec import JobSpec
from scheduler.domain.job_state import JobState
from scheduler.kubernetes.api_objects import ELASTIC_JOB, LEASE, NODE, POOL, labels_of, name_of, uid_of
from tests.kubernetes.operated import Operated
from tests.kubernetes.waiting import eventually


def test_job_runs_scales_and_leaves_nothing(operated: Operated) -> None:
    operated.add_nodes(2)
    operated.start_operator()
    operated.submit("llama", 8, 8)
    operated.until_phase("llama", "Running")
    job = operated.job("llama")
    assert job["status"]["allocation"]["gpus"] == 8
    assert {pod["metadata"]["ownerReferences"][0]["uid"] for pod in operated.pods()} == {uid_of(job)}
    (before,) = operated.pods()
    operated.scale("llama", 16)
    eventually(lambda: operated.job("llama")["status"]["allocation"]["gpus"] == 16, what="it has 16 GPUs")
    operated.until_phase("llama", "Running")
    assert uid_of(before) in {uid_of(pod) for pod in operated.pods()}
    eventually(lambda: {event["regarding"]["name"] for event in operated.events()} >= {"llama"}, what="it is told")
    operated.cluster.delete(ELASTIC_JOB, "llama", operated.namespace)
    eventually(
        lambda: operated.cluster.get_or_none(ELASTIC_JOB, "llama", operated.namespace) is None, what="it is gone"
    )
    assert operated.pods() == []


def test_takeover_does_not_disturb_the_job(operated: Operated) -> None:
    operated.add_nodes(1)
    first = operated.start_operator()
    operated.submit("llama", 4, 4)
    operated.until_phase("llama", "Running")
    before = {uid_of(pod) for pod in operated.pods()}
    operated.start_operator()
    first.send_signal(signal.SIGKILL)
    first.wait()
    operated.submit("later", 4, 4)
    operated.until_phase("later", "Running")
    assert before <= {uid_of(pod) for pod in operated.pods()}
    assert operated.phase("llama") == "Running"


def test_sigterm_hands_over_at_once(operated: Operated) -> None:
    operated.add_nodes(1)
    first = operated.start_operator()
    operated.submit("llama", 4, 4)
    operated.until_phase("llama", "Running")
    first.send_signal(signal.SIGTERM)
    assert first.wait(timeout=60) == 0
    lease = operated.cluster.get(LEASE, "ebbtide-operator", operated.namespace)
    assert not lease["spec"].get("holderIdentity")
    assert operated.store.get_lease() is None
    assert operated.phase("llama") == "Running"


def test_invalid_job_is_reported(operated: Operated) -> None:
    operated.add_nodes(1)
    operated.start_operator()
    operated.submit("big", 64, 64)
    eventually(lambda: operated.job("big").get("status", {}).get("conditions"), what="it has conditions")
    eventually(lambda: operated.phase("big") in ("Queued", "Failed"), what="it waits or has failed")


def test_node_without_pool_is_untouched(operated: Operated) -> None:
    operated.add_nodes(1)
    other = operated.kubelet.add_node(f"{operated.namespace}-x", gpus=8)
    operated.start_operator()
    operated.submit("llama", 4, 8)
    operated.until_phase("llama", "Running")
    after = operated.cluster.get(NODE, name_of(other))
    assert labels_of(after) == labels_of(other)
    assert after["spec"] == other["spec"]


def test_node_is_lent_and_returned_by_deployment_demand(operated: Operated) -> None:
    operated.add_nodes(1)
    operated.add_inference(2, replicas=0)
    lending = {"demandProfile": [0] * 24}  # lends before the forecast is calibrated
    operated.cluster.patch(POOL, "inference", change={"spec": {"lending": lending}})
    operated.start_operator()
    operated.submit("llama", 8, 16)
    eventually(lambda: operated.held("llama") == 16, what="it has grown onto a lent node")
    lent = operated.lent_nodes()
    assert lent
    operated.scale_inference(2)
    eventually(lambda: not operated.lent_nodes(), what="the node is home")
    assert operated.held("llama") <= 8
    assert all(pod["spec"]["nodeName"] not in lent for pod in operated.pods())
    broken = [event for event in operated.events() if event["reason"] == "Breach"]
    assert all(event["regarding"]["name"] not in lent for event in broken), "it was home in time"


def test_http_job_is_controlled_by_its_resource(operated: Operated) -> None:
    operated.add_nodes(2)
    operated.start_operator()
    spec = JobSpec("hello", 8, 8, steps=10**9, command=("python", "train.py"))
    operated.store.send(Command("from-http", 0.0, SubmitJob("hello-k3f9q1", spec)))
    eventually(lambda: operated.find("hello-k3f9q1"), what="it has an ElasticJob")
    operated.until_phase("hello-k3f9q1", "Running")
    operated.store.send(Command("scale-by-http", 0.0, ScaleJob("hello-k3f9q1", 8, 16)))
    eventually(lambda: operated.job("hello-k3f9q1")["spec"]["gpus"]["max"] == 16, what="the resource follows")
    eventually(lambda: operated.held("hello-k3f9q1") == 16, what="it runs on 16 GPUs")
    operated.cluster.delete(ELASTIC_JOB, "hello-k3f9q1", operated.namespace)
    eventually(lambda: operated.find("hello-k3f9q1") is None, what="the resource is gone")
    ended = operated.store.get_ended_job("hello-k3f9q1")
    assert ended is not None
    assert ended.state is JobState.CANCELLED
    assert operated.pods() == []


def test_job_continues_after_node_deletion(operated: Operated) -> None:
    operated.add_nodes(2)
    operated.start_operator()
    operated.submit("llama", 8, 8)
    operated.until_phase("llama", "Running")
    (pod,) = operated.pods()
    lost = pod["spec"]["nodeName"]
    operated.kubelet.remove_node(lost)
    eventually(lambda: _nodes_of(operated) == {lost} ^ _all_nodes(operated), what="it has moved")
    operated.until_phase("llama", "Running")
    eventually(lambda: lost not in operated.store.load().snapshot.nodes, what="the node is forgotten")


def _nodes_of(operated: Operated) -> set[str]:
    return {pod["spec"].get("nodeName", "") for pod in operated.pods()}


def _all_nodes(operated: Operated) -> set[str]:
    return {f"{operated.namespace}-t{number}" for number in range(2)}


def test_invalid_objects_are_reported_and_others_continue(operated: Operated) -> None:
    """The schema is removed, as an administrator could do by editing the definition."""
    operated.add_nodes(1)
    operated.start_operator()
    operated.remove_schema("ElasticJob")
    try:
        spec = {"gpus": {"min": "few", "max": 1}, "command": {"a": 1}, "template": 7, "suspend": "perhaps"}
        eventually(lambda: operated.can_apply("nonsense", spec), what="the torn schema is in use")
        eventually(lambda: operated.condition("nonsense", "Accepted") == "False", what="it is refused")
        operated.submit("llama", 8, 8)
        operated.until_phase("llama", "Running")
    finally:
        operated.cluster.delete(ELASTIC_JOB, "nonsense", operated.namespace)
        operated.restore("ElasticJob")
