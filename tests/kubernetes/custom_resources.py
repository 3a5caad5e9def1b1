"""Installing the chart's custom resource definitions, and writing to them."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from scheduler.kubernetes.api_error import ApiError
from scheduler.kubernetes.api_objects import ELASTIC_JOB, GPU_PROFILE, LOAN, POOL, QUEUE, ResourceKind
from scheduler.kubernetes.client import KubernetesClient
from scheduler.kubernetes.resource_writes import Create, Delete, Patch, Writes

FOLDER = Path(__file__).parents[2] / "helm" / "ebbtide" / "crd-bases"
DEFINITION = ResourceKind(
    "apiextensions.k8s.io", "v1", "CustomResourceDefinition", "customresourcedefinitions", is_namespaced=False
)
OURS = (ELASTIC_JOB, POOL, QUEUE, GPU_PROFILE, LOAN)


def definitions() -> dict[str, dict[str, Any]]:
    """Return the definitions by kind."""
    read = (yaml.safe_load(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.yaml")))
    return {each["spec"]["names"]["kind"]: each for each in read}


def install(cluster: KubernetesClient, *, within_s: float = 60.0) -> None:
    """Install the definitions and wait until all kinds are served."""
    for definition in definitions().values():
        cluster.apply(DEFINITION, definition)
    end_s = time.monotonic() + within_s
    while True:
        try:
            for kind in OURS:
                cluster.list(kind)
            return
        except ApiError as error:
            if not error.is_not_found or time.monotonic() > end_s:
                raise
            time.sleep(0.1)


def carry_out(cluster: KubernetesClient, every: Iterable[Writes]) -> None:
    for steps in every:
        for step in steps:
            match step:
                case Create(kind=kind, body=body):
                    cluster.create(kind, body)
                case Patch() as patch:
                    cluster.patch(
                        patch.kind,
                        patch.name,
                        patch.namespace,
                        change=patch.change,
                        resource_version=patch.resource_version,
                        subresource="status" if patch.status else "",
                    )
                case Delete(kind=kind, namespace=namespace, name=name, uid=uid):
                    cluster.delete(kind, name, namespace, uid=uid)
