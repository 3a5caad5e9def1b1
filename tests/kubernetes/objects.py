"""Objects that tests make by hand."""

from __future__ import annotations

from scheduler.k8s.kinds import GPU_RESOURCE, Kind
from scheduler.k8s.objects import Object

NAMESPACE = Kind("", "v1", "Namespace", "namespaces", namespaced=False)
BUDGET = Kind("policy", "v1", "PodDisruptionBudget", "poddisruptionbudgets")


def a_config_map(name: str, namespace: str, *, labels: dict[str, str] | None = None, **data: str) -> Object:
    return {"metadata": {"name": name, "namespace": namespace, "labels": labels or {}}, "data": data}


def a_pod(
    name: str, namespace: str, *, gpus: int = 0, labels: dict[str, str] | None = None, grace_s: int = 30
) -> Object:
    """A pod that no scheduler takes up: tests bind it."""
    resources = {"limits": {GPU_RESOURCE: str(gpus)}, "requests": {GPU_RESOURCE: str(gpus)}} if gpus else {}
    return {
        "metadata": {"name": name, "namespace": namespace, "labels": labels or {}},
        "spec": {
            "schedulerName": "nobody",
            "terminationGracePeriodSeconds": grace_s,
            "containers": [{"name": "main", "image": "none", "resources": resources}],
        },
    }
