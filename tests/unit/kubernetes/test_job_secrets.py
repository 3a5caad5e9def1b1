"""Kubernetes Secrets of a job become references in its pods."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import kubernetes_validate

from scheduler.domain.program import Program
from scheduler.domain.secret_reference import KUBERNETES_SECRETS_DIR, KubernetesSecretKey, SecretReference
from tests.golden.test_manifests import plain_job, pods

REFERENCES = (
    SecretReference("hf-token", env="HF_TOKEN"),
    SecretReference(kubernetes=KubernetesSecretKey("wandb", "api-key"), env="WANDB_API_KEY"),
    SecretReference(kubernetes=KubernetesSecretKey("git", "ssh"), file="id_ed25519"),
)


def test_pods_refer_to_kubernetes_secrets_and_hold_no_others() -> None:
    job = plain_job()
    job = replace(job, spec=replace(job.spec, program=Program(secrets=REFERENCES)))
    for pod in pods(job):
        kubernetes_validate.validate(pod, "1.33", strict=True)
        spec: dict[str, Any] = pod["spec"]
        container = spec["containers"][0]
        variables = {each["name"]: each for each in container["env"]}
        assert variables["WANDB_API_KEY"]["valueFrom"] == {"secretKeyRef": {"name": "wandb", "key": "api-key"}}
        assert "HF_TOKEN" not in variables
        [volume] = [each for each in spec["volumes"] if each["name"] == "ebbtide-secrets"]
        assert volume["projected"]["sources"] == [
            {"secret": {"name": "git", "items": [{"key": "ssh", "path": "id_ed25519"}]}}
        ]
        [mount] = [each for each in container["volumeMounts"] if each["name"] == "ebbtide-secrets"]
        assert (mount["mountPath"], mount["readOnly"]) == (KUBERNETES_SECRETS_DIR, True)


def test_pods_without_kubernetes_secrets_are_unchanged() -> None:
    job = plain_job()
    with_own = replace(job, spec=replace(job.spec, program=Program(secrets=REFERENCES[:1])))
    assert pods(with_own) == pods(job)
