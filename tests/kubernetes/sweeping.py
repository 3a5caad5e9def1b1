"""Leaving a control plane as it was found: operators see the whole cluster, so each test needs it to itself."""

from __future__ import annotations

from scheduler.k8s.api_error import ApiError
from scheduler.k8s.client import Cluster
from scheduler.k8s.kinds import AUTOSCALER, DEPLOYMENT, ELASTIC_JOB, LOAN, NODE, POD, POOL, QUEUE, Kind
from scheduler.k8s.objects import Object, name_of, namespace_of

SWEPT = (ELASTIC_JOB, POOL, QUEUE, LOAN, DEPLOYMENT, AUTOSCALER, POD, NODE)


def sweep(cluster: Cluster) -> None:
    """Remove everything, in all namespaces, that an operator would see."""
    for kind in SWEPT:
        for item in _all(cluster, kind):
            _remove(cluster, kind, item)


def _all(cluster: Cluster, kind: Kind) -> tuple[Object, ...]:
    try:
        return tuple(cluster.list(kind).items)
    except ApiError as error:
        if not error.is_missing:
            raise
        return ()  # a kind of ours that no test has defined yet


def _remove(cluster: Cluster, kind: Kind, item: Object) -> None:
    name, namespace = name_of(item), namespace_of(item)
    if item["metadata"].get("finalizers"):
        try:
            cluster.patch(kind, name, namespace, change={"metadata": {"finalizers": None}})
        except ApiError as error:
            if not error.is_missing:  # it was on its way out already
                raise
    cluster.delete(kind, name, namespace, grace_s=0)
