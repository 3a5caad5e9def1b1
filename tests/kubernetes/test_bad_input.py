"""Invalid resources: a condition explains the error, and nothing else is affected."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from scheduler.kubernetes.api_error import ApiError
from scheduler.kubernetes.api_objects import ELASTIC_JOB, POOL
from tests.kubernetes.objects import NAMESPACE
from tests.kubernetes.operated import POOL_LABELS, Operated
from tests.kubernetes.waiting import eventually


def build_job(gpus: int, **pod: Any) -> dict[str, Any]:
    container = {"name": "main", "image": "trainer:1", **pod.pop("container", {})}
    template = {"spec": {"containers": [container], **pod}}
    return {"gpus": {"min": gpus, "max": gpus}, "steps": 10**9, "command": ["python", "train.py"], "template": template}


def refusal(operated: Operated, name: str, spec: dict[str, Any]) -> str:
    with pytest.raises(ApiError) as refused:
        operated.apply_job(name, spec)
    assert refused.value.is_invalid
    return refused.value.message


def pool_condition(operated: Operated, pool: str, kind: str) -> tuple[str, str, str]:
    found = operated.cluster.get(POOL, pool).get("status", {}).get("conditions", [])
    return next(
        ((each["status"], each["reason"], each["message"]) for each in found if each["type"] == kind), ("", "", "")
    )


def job_condition(operated: Operated, name: str, kind: str) -> tuple[str, str, str]:
    found = operated.job(name).get("status", {}).get("conditions", [])
    return next(
        ((each["status"], each["reason"], each["message"]) for each in found if each["type"] == kind), ("", "", "")
    )


def test_template_with_gpus_is_rejected_by_schema_and_operator(operated: Operated) -> None:
    operated.add_nodes(1)
    operated.start_operator()
    asks = {"resources": {"limits": {"nvidia.com/gpu": 8}}}
    main, early = build_job(4, container=asks), build_job(4, initContainers=[{"name": "early", "image": "x", **asks}])
    words = "resources.limits: Invalid value"
    assert words in refusal(operated, "main", main)
    assert words in refusal(operated, "early", early)
    operated.remove_schema("ElasticJob")
    try:
        eventually(lambda: operated.can_apply("main", main), what="the torn schema is in use")
        operated.apply_job("early", early)
        for name, place in (("main", "containers[0]"), ("early", "initContainers[0]")):
            eventually(partial(_is_refused, operated, name), what=f"{name} is refused")
            status, reason, message = job_condition(operated, name, "Accepted")
            assert (status, reason) == ("False", "Refused")
            assert message.startswith(f"template.spec.{place}.resources.limits[nvidia.com/gpu]: got 8;")
        assert operated.pods() == []
    finally:
        for name in ("main", "early"):
            operated.cluster.delete(ELASTIC_JOB, name, operated.namespace)
        operated.restore("ElasticJob")


def _is_refused(operated: Operated, name: str) -> bool:
    return operated.condition(name, "Accepted") == "False"


def test_job_with_invalid_pods_waits_without_gpus(operated: Operated) -> None:
    operated.add_nodes(1)
    operator = operated.start_operator()
    operated.submit("sound", 4, 4)
    operated.until_phase("sound", "Running")
    operated.apply_job("broken", build_job(4, container={"securityContext": {"runAsUser": -5}}))
    eventually(lambda: _reason(operated, "broken", operated.namespace) == "TemplateRejected", what="it is told")
    status, reason, message = job_condition(operated, "broken", "Scheduled")
    assert (status, reason) == ("False", "TemplateRejected")
    assert "template.spec.containers[0].securityContext.runAsUser: Invalid value" in message
    operated.submit("after", 4, 4)
    operated.until_phase("after", "Running")
    assert operated.phase("sound") == "Running"
    assert operated.held("broken") == 0
    assert operator.poll() is None


def test_closed_namespace_does_not_block_other_jobs(operated: Operated) -> None:
    operated.add_nodes(1)
    operated.start_operator()
    operated.submit("sound", 4, 4)
    operated.until_phase("sound", "Running")
    locked, label = f"{operated.namespace}-locked", {"pod-security.kubernetes.io/enforce": "restricted"}
    operated.cluster.create(NAMESPACE, {"metadata": {"name": locked, "labels": label}})
    operated.cluster.apply(ELASTIC_JOB, {"metadata": {"name": "risky", "namespace": locked}, "spec": build_job(4)})
    eventually(lambda: _reason(operated, "risky", locked) == "TemplateRejected", what="its pods are not let in")
    operated.submit("after", 4, 4)
    operated.until_phase("after", "Running")
    assert _phase(operated, "risky", locked) == "Queued"
    operated.cluster.delete(ELASTIC_JOB, "sound", operated.namespace)
    operated.cluster.patch(NAMESPACE, locked, change={"metadata": {"labels": dict.fromkeys(label)}})
    eventually(lambda: _phase(operated, "risky", locked) == "Running", what="its pods are let in")


def _phase(operated: Operated, name: str, namespace: str) -> str:
    return str(operated.cluster.get(ELASTIC_JOB, name, namespace).get("status", {}).get("phase", ""))


def _reason(operated: Operated, name: str, namespace: str) -> str:
    return str(operated.cluster.get(ELASTIC_JOB, name, namespace).get("status", {}).get("reason", ""))


def test_oldest_pool_keeps_a_shared_node(operated: Operated) -> None:
    operated.add_nodes(1)
    operated.start_operator()
    eventually(
        lambda: pool_condition(operated, "training", "Conflict")[0] == "False", what="the first Pool has its node"
    )
    spec = {"kind": "inference", "nodeSelector": POOL_LABELS, "gpu": "h100-80g"}
    operated.cluster.apply(POOL, {"metadata": {"name": "greedy"}, "spec": spec})
    eventually(lambda: pool_condition(operated, "greedy", "Conflict")[0] == "True", what="the second is told")
    node = f"{operated.namespace}-t0"
    status, reason, message = pool_condition(operated, "greedy", "Conflict")
    assert (status, reason) == ("True", "SelectorsOverlap")
    assert node in message
    assert operated.cluster.get(POOL, "greedy")["status"]["nodes"] == 0
    assert operated.cluster.get(POOL, "greedy")["status"]["problem"] == "SelectorsOverlap"
    assert operated.store.load().snapshot.nodes[node].pool == "training"
    operated.submit("llama", 8, 8)
    operated.until_phase("llama", "Running")
    operated.cluster.delete(POOL, "greedy")
    eventually(lambda: operated.cluster.get_or_none(POOL, "greedy") is None, what="the second is gone")
    assert operated.phase("llama") == "Running"


def test_invalid_pool_is_reported_and_others_continue(operated: Operated) -> None:
    """The schema is removed, as an administrator could do by editing the definition."""
    operated.add_nodes(1)
    operator = operated.start_operator()
    operated.remove_schema("Pool")
    try:
        spec = {"kind": "idle", "nodeSelector": 7, "demand": []}
        eventually(lambda: _can_make_pool(operated, "nonsense", spec), what="the torn schema is in use")
        eventually(lambda: pool_condition(operated, "nonsense", "Accepted")[0] == "False", what="it is refused")
        _, reason, message = pool_condition(operated, "nonsense", "Accepted")
        assert reason == "Refused"
        assert all(words in message for words in ('kind: got "idle"; allowed:', "nodeSelector: got 7", "demand: got"))
        operated.submit("llama", 8, 8)
        operated.until_phase("llama", "Running")
        assert operator.poll() is None
        operated.cluster.delete(POOL, "nonsense")
        eventually(lambda: operated.cluster.get_or_none(POOL, "nonsense") is None, what="it is gone")
    finally:
        operated.restore("Pool")


def _can_make_pool(operated: Operated, name: str, spec: dict[str, Any]) -> bool:
    try:
        operated.cluster.apply(POOL, {"metadata": {"name": name}, "spec": spec})
    except ApiError as refused:
        if refused.is_invalid:
            return False
        raise
    return True


def test_pool_without_nodes_is_reported_until_one_matches(operated: Operated) -> None:
    operated.start_operator()
    spec = {"kind": "training", "nodeSelector": {"team": "harbour"}, "gpu": "h100-80g"}
    operated.cluster.apply(POOL, {"metadata": {"name": "empty"}, "spec": spec})
    eventually(lambda: pool_condition(operated, "empty", "Matched")[0] == "False", what="it is told")
    status, reason, message = pool_condition(operated, "empty", "Matched")
    assert (status, reason) == ("False", "NoNodeMatches")
    assert "team=harbour" in message
    operated.kubelet.add_node(f"{operated.namespace}-x", gpus=8, labels={"team": "harbour"})
    eventually(lambda: pool_condition(operated, "empty", "Matched")[0] == "True", what="it has found its node")
