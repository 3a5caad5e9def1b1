"""Replicas of served models through `/scale` of a real API server, with and without other autoscalers."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from scheduler.domain.commands import Command, ReportDemand
from scheduler.domain.fleet import DemandReading, Pool, PoolKind
from scheduler.domain.replica_advice import ReplicaAdvice
from scheduler.domain.serving import ModelLoad, ScaleTarget, ServedModel, SizingMode, SizingPolicy
from scheduler.domain.snapshot import Snapshot
from scheduler.kubernetes.api_error import ApiError
from scheduler.kubernetes.api_objects import AUTOSCALER, DEPLOYMENT, POOL, SCALED_OBJECT, ResourceKind
from scheduler.kubernetes.client import KubernetesClient
from scheduler.kubernetes.replica_scaling import ReplicaScaler, ScaleOrder, ScaleOutcome, carry_out
from scheduler.kubernetes.resources.fleet import PoolResource
from tests.kubernetes.custom_resources import DEFINITION
from tests.kubernetes.operated import Operated
from tests.kubernetes.test_demand import a_deployment, an_autoscaler
from tests.kubernetes.waiting import eventually

STATEFUL_SET = ResourceKind("apps", "v1", "StatefulSet", "statefulsets")
NOW_S = 1_800_000_000.0


def a_target(namespace: str, kind: ResourceKind = DEPLOYMENT) -> ScaleTarget:
    return ScaleTarget(kind.api_version, kind.name, namespace, "chat", kind.plural)


def an_order(namespace: str, replicas: int | None = 4, *, is_dry: bool = False) -> ScaleOrder:
    return ScaleOrder("llama-3-8b", a_target(namespace), replicas, is_dry)


def count_replicas(cluster: KubernetesClient, namespace: str, kind: ResourceKind = DEPLOYMENT) -> int:
    return int(cluster.get(kind, "chat", namespace)["spec"]["replicas"])


@pytest.fixture
def chat(cluster: KubernetesClient, namespace: str) -> str:
    """Create a Deployment with 2 replicas, and return its namespace."""
    cluster.create(DEPLOYMENT, a_deployment("chat", namespace, gpus=1, replicas=2))
    return namespace


def test_order_sets_the_replicas_and_a_dry_order_does_not(cluster: KubernetesClient, chat: str) -> None:
    dry = carry_out(cluster, an_order(chat, is_dry=True))
    assert (dry.outcome, count_replicas(cluster, chat)) == (ScaleOutcome.DRY_RUN, 2)
    assert "from 2 to 4" in dry.message
    done = carry_out(cluster, an_order(chat))
    assert (done.outcome, count_replicas(cluster, chat)) == (ScaleOutcome.SCALED, 4)
    assert carry_out(cluster, an_order(chat)) == done
    assert carry_out(cluster, an_order(chat, None)).outcome is ScaleOutcome.NOT_PROPOSED
    assert count_replicas(cluster, chat) == 4


def test_stateful_set_is_scaled(cluster: KubernetesClient, namespace: str) -> None:
    labels = {"app": "chat"}
    pods = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "main", "image": "none"}]}}
    spec = {"replicas": 1, "serviceName": "chat", "selector": {"matchLabels": labels}, "template": pods}
    cluster.create(STATEFUL_SET, {"metadata": {"name": "chat", "namespace": namespace}, "spec": spec})
    order = replace(an_order(namespace, 3), target=a_target(namespace, STATEFUL_SET))
    assert carry_out(cluster, order).outcome is ScaleOutcome.SCALED
    assert count_replicas(cluster, namespace, STATEFUL_SET) == 3


def test_object_of_a_horizontal_pod_autoscaler_is_left_alone(cluster: KubernetesClient, chat: str) -> None:
    cluster.create(AUTOSCALER, an_autoscaler("chat", chat))
    result = carry_out(cluster, an_order(chat))
    assert (result.outcome, count_replicas(cluster, chat)) == (ScaleOutcome.OTHER_AUTOSCALER, 2)
    assert "HorizontalPodAutoscaler chat" in result.message
    assert carry_out(cluster, an_order(chat, is_dry=True)).outcome is ScaleOutcome.OTHER_AUTOSCALER
    cluster.delete(AUTOSCALER, "chat", chat)
    assert carry_out(cluster, an_order(chat)).outcome is ScaleOutcome.SCALED


def test_object_of_a_scaled_object_is_left_alone(cluster: KubernetesClient, chat: str) -> None:
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {"name": "v1alpha1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    names = {
        "kind": "ScaledObject",
        "listKind": "ScaledObjectList",
        "plural": "scaledobjects",
        "singular": "scaledobject",
    }
    spec = {"group": "keda.sh", "scope": "Namespaced", "names": names, "versions": [version]}
    cluster.create(DEFINITION, {"metadata": {"name": "scaledobjects.keda.sh"}, "spec": spec})
    body = {"metadata": {"name": "by-queue", "namespace": chat}, "spec": {"scaleTargetRef": {"name": "chat"}}}

    def create() -> bool:
        try:
            cluster.create(SCALED_OBJECT, body)
        except ApiError as error:
            return not error.is_not_found
        return True

    try:
        eventually(create, what="the definition is served")
        result = carry_out(cluster, an_order(chat))
        assert (result.outcome, count_replicas(cluster, chat)) == (ScaleOutcome.OTHER_AUTOSCALER, 2)
        assert "ScaledObject by-queue" in result.message
    finally:
        cluster.delete(DEFINITION, "scaledobjects.keda.sh")


def test_missing_objects_and_resources_are_told(cluster: KubernetesClient, namespace: str) -> None:
    assert carry_out(cluster, an_order(namespace)).outcome is ScaleOutcome.TARGET_NOT_FOUND
    unknown = replace(a_target(namespace), resource="deploymentses")
    assert carry_out(cluster, replace(an_order(namespace), target=unknown)).outcome is ScaleOutcome.TARGET_NOT_FOUND


def test_write_requires_the_version_that_was_read(cluster: KubernetesClient, chat: str) -> None:
    before = cluster.get(DEPLOYMENT, "chat", chat, subresource="scale")
    assert before["kind"] == "Scale"
    cluster.patch(DEPLOYMENT, "chat", chat, change={"spec": {"replicas": 7}})
    version = before["metadata"]["resourceVersion"]
    with pytest.raises(ApiError) as raised:
        cluster.patch(
            DEPLOYMENT, "chat", chat, change={"spec": {"replicas": 4}}, resource_version=version, subresource="scale"
        )
    assert raised.value.is_conflict
    assert count_replicas(cluster, chat) == 7


def test_scaler_follows_proposals_and_reports_them(cluster: KubernetesClient, chat: str) -> None:
    sizing = SizingPolicy(SizingMode.SCALE, target=a_target(chat))
    pool = Pool("serving", PoolKind.INFERENCE, serving=(ServedModel("llama-3-8b", "h100-80g", 1, 0.05, sizing=sizing),))
    resource = PoolResource(pool, "uid-1", {})
    reading = DemandReading(NOW_S, 3.0, 3.0, advice=(ReplicaAdvice("llama-3-8b", 3, NOW_S),))
    snapshot = Snapshot(now_s=NOW_S, pools={"serving": pool}, demand={"serving": reading})
    scaler = ReplicaScaler(cluster, round_s=0.1)

    def reason(at: Snapshot = snapshot) -> str:
        ((condition,),) = scaler.follow([resource], at).values()
        return condition.reason

    assert reason() == "NotReadYet"
    scaler.start()
    try:
        eventually(lambda: reason() == "Scaled" and count_replicas(cluster, chat) == 3, what="3 replicas")
        cluster.patch(DEPLOYMENT, "chat", chat, change={"spec": {"replicas": 9}})
        eventually(lambda: count_replicas(cluster, chat) == 3, what="3 replicas again")
        stale = replace(snapshot, now_s=NOW_S + 7_200.0)
        eventually(lambda: reason(stale) == "NothingProposed", what="a stale reading proposes nothing")
        cluster.patch(DEPLOYMENT, "chat", chat, change={"spec": {"replicas": 9}})
        time.sleep(0.5)
        assert count_replicas(cluster, chat) == 9
        assert scaler.follow([], snapshot) == {}
    finally:
        scaler.stop()


def test_operator_scales_the_target_of_a_pool(operated: Operated) -> None:
    cluster, namespace = operated.cluster, operated.namespace
    cluster.create(DEPLOYMENT, a_deployment("chat", namespace, gpus=1, replicas=1))
    spec = {
        "kind": "inference",
        "nodeSelector": {"ebbtide.dev/test-pool": "chat"},
        "serving": [
            {
                "model": "llama-3-8b",
                "gpu": "rtx-4090",
                "objective": {"ttft": "1s", "tpot": "50ms"},
                "sizing": {"mode": "scale", "maxReplicas": 6, "target": {"namespace": namespace, "name": "chat"}},
            }
        ],
    }
    cluster.create(POOL, {"metadata": {"name": "chat"}, "spec": spec})
    operated.start_operator()
    eventually(lambda: "chat" in operated.store.load().snapshot.pools, what="the pool is known")
    load = ModelLoad("llama-3-8b", 9.0, 1.0, 5, 1, 9.0, 5, 5, 0.5, 0.04, 0.8, "tpot")
    operated.store.send(Command("demand-1", time.time(), ReportDemand("chat", 5.0, (load,))))
    eventually(lambda: count_replicas(cluster, namespace) == 5, what="5 replicas")
    assert operated.store.load().snapshot.demand["chat"].asked_gpus == 5.0

    def status() -> dict[str, Any]:
        found: dict[str, Any] = cluster.get(POOL, "chat").get("status", {})
        return found

    def reasons() -> dict[str, str]:
        return {each["type"]: each["reason"] for each in status().get("conditions", ())}

    eventually(lambda: reasons().get("ReplicasSet") == "Scaled", what="the condition says so")
    assert status()["serving"] == [{"model": "llama-3-8b", "proposedReplicas": 5}]
    cluster.create(AUTOSCALER, an_autoscaler("chat", namespace))
    eventually(lambda: reasons().get("ReplicasSet") == "OtherAutoscaler", what="the autoscaler is seen")
