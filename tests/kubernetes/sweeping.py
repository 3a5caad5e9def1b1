"""Cleaning a control plane: operators see the whole cluster, so each test needs it exclusively."""

from __future__ import annotations

from scheduler.kubernetes.api_error import ApiError
from scheduler.kubernetes.api_objects import (
    AUTOSCALER,
    DEPLOYMENT,
    ELASTIC_JOB,
    GPU_PROFILE,
    LOAN,
    NODE,
    POD,
    POOL,
    QUEUE,
    Object,
    ResourceKind,
    name_of,
    namespace_of,
)
from scheduler.kubernetes.client import KubernetesClient

SWEPT = (ELASTIC_JOB, POOL, QUEUE, GPU_PROFILE, LOAN, DEPLOYMENT, AUTOSCALER, POD, NODE)


def sweep(cluster: KubernetesClient) -> None:
    """Remove everything that an operator would see, in all namespaces."""
    for kind in SWEPT:
        for item in _all(cluster, kind):
            _remove(cluster, kind, item)


def _all(cluster: KubernetesClient, kind: ResourceKind) -> tuple[Object, ...]:
    try:
        return tuple(cluster.list(kind).items)
    except ApiError as error:
        if not error.is_not_found:
            raise
        return ()  # this custom resource definition is not installed yet


def _remove(cluster: KubernetesClient, kind: ResourceKind, item: Object) -> None:
    name, namespace = name_of(item), namespace_of(item)
    if item["metadata"].get("finalizers"):
        try:
            cluster.patch(kind, name, namespace, change={"metadata": {"finalizers": None}})
        except ApiError as error:
            if not error.is_not_found:  # it was already being deleted
                raise
    cluster.delete(kind, name, namespace, grace_period_s=0)
