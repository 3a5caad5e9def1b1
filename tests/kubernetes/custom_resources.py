"""The definitions of the custom resources as the chart has them, and what a test does with them."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from scheduler.k8s.api_error import ApiError
from scheduler.k8s.client import Cluster
from scheduler.k8s.kinds import ELASTIC_JOB, LOAN, POOL, QUEUE, Kind
from scheduler.k8s.steps import Create, Delete, Patch, Steps

FOLDER = Path(__file__).parents[2] / "helm" / "ebbtide" / "crd-bases"
DEFINITION = Kind(
    "apiextensions.k8s.io", "v1", "CustomResourceDefinition", "customresourcedefinitions", namespaced=False
)
OURS = (ELASTIC_JOB, POOL, QUEUE, LOAN)


def definitions() -> dict[str, dict[str, Any]]:
    """By the kind that they define."""
    read = (yaml.safe_load(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.yaml")))
    return {each["spec"]["names"]["kind"]: each for each in read}


def install(cluster: Cluster, *, within_s: float = 60.0) -> None:
    """Have all kinds of ours served."""
    for definition in definitions().values():
        cluster.apply(DEFINITION, definition)
    end_s = time.monotonic() + within_s
    while True:
        try:
            for kind in OURS:
                cluster.list(kind)
            return
        except ApiError as error:
            if not error.is_missing or time.monotonic() > end_s:
                raise
            time.sleep(0.1)


def carry_out(cluster: Cluster, every: Iterable[Steps]) -> None:
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
