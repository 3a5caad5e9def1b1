"""Builders of API objects for tests."""

from __future__ import annotations

from scheduler.kubernetes.api_objects import GPU_RESOURCE, Object, ResourceKind

NAMESPACE = ResourceKind("", "v1", "Namespace", "namespaces", is_namespaced=False)
BUDGET = ResourceKind("policy", "v1", "PodDisruptionBudget", "poddisruptionbudgets")


def build_config_map(name: str, namespace: str, *, labels: dict[str, str] | None = None, **data: str) -> Object:
    return {"metadata": {"name": name, "namespace": namespace, "labels": labels or {}}, "data": data}


def build_pod(
    name: str, namespace: str, *, gpus: int = 0, labels: dict[str, str] | None = None, grace_s: int = 30
) -> Object:
    """Build a pod that no scheduler handles. Tests bind it."""
    resources = {"limits": {GPU_RESOURCE: str(gpus)}, "requests": {GPU_RESOURCE: str(gpus)}} if gpus else {}
    return {
        "metadata": {"name": name, "namespace": namespace, "labels": labels or {}},
        "spec": {
            "schedulerName": "nobody",
            "terminationGracePeriodSeconds": grace_s,
            "containers": [{"name": "main", "image": "none", "resources": resources}],
        },
    }
