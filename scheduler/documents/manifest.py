"""The manifest of an ElasticJob as a job document, so that one file serves `kubectl apply` and `ebbtide submit`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scheduler.documents.refusal import Refusal, RefusedError, shown

KIND = "ElasticJob"
API_VERSION = "ebbtide.dev/v1alpha1"


def is_manifest(document: Mapping[str, Any]) -> bool:
    return "apiVersion" in document or "kind" in document


def job_of_manifest(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The job document that an ElasticJob holds; name and namespace are its metadata's.

    Raises:
        RefusedError: it is no ElasticJob, or asks for what only the operator can do.
    """
    for field, expected in (("apiVersion", API_VERSION), ("kind", KIND)):
        if manifest.get(field) != expected:
            raise RefusedError(Refusal(field, shown(manifest.get(field)), f"{expected}, or a plain job document"))
    spec, metadata = _part(manifest, "spec"), _part(manifest, "metadata")
    if spec.get("suspend"):
        raise RefusedError(Refusal("spec.suspend", "true", "false: submit the job, then `ebbtide suspend` it"))
    if spec.get("managedBy"):
        raise RefusedError(Refusal("spec.managedBy", shown(spec["managedBy"]), "nothing outside Kubernetes"))
    named = {field: metadata[field] for field in ("name", "namespace") if field in metadata}
    return {**named, **{field: value for field, value in spec.items() if field not in ("suspend", "managedBy")}}


def _part(manifest: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = manifest.get(name, {})
    if not isinstance(part, Mapping):
        raise RefusedError(Refusal(name, shown(part), "an object"))
    return part
