"""Kubernetes Secrets that a job names, as parts of its pods. The kubelet reads them; the operator never does. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from scheduler.domain.job import Job
from scheduler.domain.secret_reference import KUBERNETES_SECRETS_DIR, KubernetesSecretKey, SecretReference

_VOLUME = "ebbtide-secrets"


def build_secret_variables(job: Job) -> list[dict[str, Any]]:
    """Return the environment variables of the container that hold keys of Kubernetes Secrets."""
    return [
        {"name": reference.env, "valueFrom": {"secretKeyRef": {"name": kubernetes.name, "key": kubernetes.key}}}
        for reference, kubernetes in _list_kubernetes(job)
        if reference.env
    ]


def build_secret_mounts(job: Job) -> list[dict[str, Any]]:
    """Return the mount with the files of Kubernetes Secrets, if the job has any."""
    has_files = any(reference.file for reference, _ in _list_kubernetes(job))
    return [{"name": _VOLUME, "mountPath": KUBERNETES_SECRETS_DIR, "readOnly": True}] if has_files else []


def build_secret_volumes(job: Job) -> list[dict[str, Any]]:
    """Return the volume with the files of Kubernetes Secrets, if the job has any."""
    sources = [
        {"secret": {"name": kubernetes.name, "items": [{"key": kubernetes.key, "path": reference.file}]}}
        for reference, kubernetes in _list_kubernetes(job)
        if reference.file
    ]
    # World-readable in the pod, because the template can run it as any user. The agent's copies have mode 0400.
    return [{"name": _VOLUME, "projected": {"sources": sources, "defaultMode": 0o444}}] if sources else []


def _list_kubernetes(job: Job) -> Iterator[tuple[SecretReference, KubernetesSecretKey]]:
    for reference in job.spec.program.secrets:
        if reference.kubernetes is not None:
            yield reference, reference.kubernetes
