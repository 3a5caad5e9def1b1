"""Demand of real Deployments and autoscalers, without running pods."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from scheduler.domain.commands import ReportDemand
from scheduler.domain.fleet import Pool, PoolKind
from scheduler.kubernetes.api_objects import AUTOSCALER, DEPLOYMENT, GPU_RESOURCE
from scheduler.kubernetes.client import KubernetesClient
from scheduler.kubernetes.demand_sources import DemandSources, PoolReadings
from scheduler.kubernetes.resources.fleet import DemandSource, DemandSourceKind, PoolResource
from tests.kubernetes.waiting import eventually

NOW_S = 1_800_000_000.0


def a_deployment(name: str, namespace: str, *, gpus: int, replicas: int, **labels: str) -> dict[str, object]:
    limits = {"limits": {GPU_RESOURCE: str(gpus)}} if gpus else {}
    pod = {"containers": [{"name": "main", "image": "none", "resources": limits}]}
    return {
        "metadata": {"name": name, "namespace": namespace, "labels": labels},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": {"app": name}},
            "template": {"metadata": {"labels": {"app": name}}, "spec": pod},
        },
    }


def an_autoscaler(name: str, namespace: str) -> dict[str, object]:
    target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": name}
    return {
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"scaleTargetRef": target, "minReplicas": 1, "maxReplicas": 20},
    }


@pytest.fixture
def sources(cluster: KubernetesClient) -> Iterator[DemandSources]:
    created = DemandSources(cluster)
    created.start()
    yield created
    created.stop()


def a_pool(serves: str) -> PoolResource:
    demand = DemandSource(DemandSourceKind.DEPLOYMENTS, selector={"serves": serves})
    return PoolResource(Pool("serving", PoolKind.INFERENCE), "uid-1", {"role": "serve"}, demand=demand)


def gpus(reported: PoolReadings) -> list[float]:
    return [command.body.gpus for command in reported.commands if isinstance(command.body, ReportDemand)]


def reason(reported: PoolReadings) -> str:
    (claim,) = reported.conditions["uid-1"]
    return claim.reason


def watchers() -> set[str]:
    names = {thread.name for thread in threading.enumerate()}
    return names & {"watch-deployments", "watch-horizontalpodautoscalers"}


def test_demand_follows_deployments_and_autoscalers(
    cluster: KubernetesClient, namespace: str, sources: DemandSources
) -> None:
    pool = a_pool(namespace)
    cluster.create(DEPLOYMENT, a_deployment("web", namespace, gpus=0, replicas=9, serves=namespace))
    cluster.create(DEPLOYMENT, a_deployment("stranger", namespace, gpus=8, replicas=9, serves="another"))
    eventually(lambda: reason(sources.read([pool], NOW_S)) == "NoDeploymentMatches", what="nothing serves")
    assert sources.read([pool], NOW_S).commands == ()
    cluster.create(DEPLOYMENT, a_deployment("chat", namespace, gpus=2, replicas=3, serves=namespace))
    cluster.create(DEPLOYMENT, a_deployment("draw", namespace, gpus=1, replicas=1, serves=namespace))
    eventually(lambda: gpus(sources.read([pool], NOW_S)) == [7.0], what="3 x 2 + 1 GPUs")
    cluster.create(AUTOSCALER, an_autoscaler("chat", namespace))
    status = {"status": {"desiredReplicas": 10, "currentReplicas": 3}}
    cluster.patch_status(AUTOSCALER, "chat", namespace, change=status)
    eventually(lambda: gpus(sources.read([pool], NOW_S)) == [21.0], what="10 x 2 + 1 GPUs")
    cluster.patch(DEPLOYMENT, "draw", namespace, change={"spec": {"replicas": 0}})
    eventually(lambda: gpus(sources.read([pool], NOW_S)) == [20.0], what="10 x 2 GPUs")
    cluster.delete(AUTOSCALER, "chat", namespace)
    eventually(lambda: gpus(sources.read([pool], NOW_S)) == [6.0], what="3 x 2 GPUs")
    for name in ("chat", "draw"):
        cluster.delete(DEPLOYMENT, name, namespace)
    eventually(lambda: reason(sources.read([pool], NOW_S)) == "NoDeploymentMatches", what="nothing serves any more")


def test_deployments_are_watched_only_while_a_pool_needs_them(sources: DemandSources, namespace: str) -> None:
    sources.read([], NOW_S)
    assert watchers() == set()
    eventually(lambda: reason(sources.read([a_pool(namespace)], NOW_S)) == "NoDeploymentMatches", what="listed")
    assert len(watchers()) == 2
    sources.read([], NOW_S)
    eventually(lambda: not watchers(), what="nobody watches")
    eventually(lambda: reason(sources.read([a_pool(namespace)], NOW_S)) == "NoDeploymentMatches", what="listed anew")
