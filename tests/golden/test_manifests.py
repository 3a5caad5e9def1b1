"""Golden manifests: what a job becomes at the API server, written out.

Rewrite them after an intended change with EBBTIDE_GOLDEN=write, and read the diff.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from scheduler.domain.checkpoints import CheckpointSpec, CheckpointVolume
from scheduler.domain.job import Job
from scheduler.domain.job_state import JobState
from scheduler.kubernetes.agent_injection import AgentDelivery, AgentImage
from scheduler.kubernetes.manifests import (
    Manifest,
    ManifestContext,
    build_agent_pod,
    build_plan_config_map,
    build_service,
    build_token_secret,
)
from scheduler.kubernetes.node_view import Toleration
from scheduler.kubernetes.pod_changes import plan_pod_changes
from tests.builders import a_job

FOLDER = Path(__file__).parent / "manifests"
SITE = ManifestContext(
    "harbour",
    7,
    "http://ebbtide.ebbtide.svc:8787",
    "ebbtide/worker:0.1.0",
    AgentImage("ebbtide/agent:0.1.0"),
    resource_name="llama",
    owner_uid="1a2b",
    tolerations={"i4": (Toleration("dedicated", "serving", "NoSchedule"), Toleration("zone"))},
)
TEMPLATE = {
    "metadata": {"labels": {"team": "harbour"}, "annotations": {"cost-center": "7"}},
    "spec": {
        "serviceAccountName": "trainer",
        "nodeSelector": {"zone": "a"},
        "tolerations": [{"key": "team", "operator": "Exists"}],
        "affinity": {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [
                        {"matchExpressions": [{"key": "disk", "operator": "In", "values": ["ssd"]}]},
                        {"matchExpressions": [{"key": "disk", "operator": "In", "values": ["nvme"]}]},
                    ]
                }
            }
        },
        "containers": [
            {
                "name": "train",
                "image": "harbour/train:4",
                "command": ["python", "train.py"],
                "env": [{"name": "SEED", "value": "3"}, {"name": "EBBTIDE_TOKEN_FILE", "value": "theirs"}],
                "resources": {"requests": {"cpu": "8", "memory": "64Gi", "rdma/hca": "1"}, "limits": {"rdma/hca": "1"}},
                "volumeMounts": [{"name": "data", "mountPath": "/data"}, {"name": "big", "mountPath": "/dev/shm"}],
            },
            {"name": "log-shipper", "image": "harbour/logs:1"},
        ],
        "volumes": [
            {"name": "data", "persistentVolumeClaim": {"claimName": "corpus"}},
            {"name": "big", "emptyDir": {"medium": "Memory", "sizeLimit": "32Gi"}},
        ],
    },
}


def plain_job() -> Job:
    return a_job("llama-k3f9q1", 1, 8, state=JobState.STARTING, on={"t0": (0, 1, 2, 3), "i4": (0, 1)})


def job_with_template() -> Job:
    job = plain_job()
    spec = replace(job.spec, template_json=json.dumps(TEMPLATE), checkpoint=CheckpointSpec(dir="/data/checkpoints"))
    return replace(job, spec=replace(spec, image="harbour/train:5"))


def job_with_volume() -> Job:
    job = plain_job()
    return replace(job, spec=replace(job.spec, checkpoint=CheckpointSpec("/saved", volume=CheckpointVolume("shared"))))


def pods(job: Job) -> list[Manifest]:
    return [build_agent_pod(job, new, SITE) for new in plan_pod_changes(job, [], 0.0).create]


def objects() -> list[Manifest]:
    job = plain_job()
    return [build_service(job, SITE), build_plan_config_map(job, SITE), build_token_secret(job, SITE, "ebta_secret")]


def pods_with_an_image_volume() -> list[Manifest]:
    site = replace(SITE, agent=replace(SITE.agent, delivery=AgentDelivery.IMAGE_VOLUME))
    return [build_agent_pod(plain_job(), new, site) for new in plan_pod_changes(plain_job(), [], 0.0).create[:1]]


CASES: dict[str, Callable[[], list[Manifest]]] = {
    "pods_of_a_plain_job": lambda: pods(plain_job()),
    "pods_from_a_template": lambda: pods(job_with_template())[:1],
    "pods_with_a_checkpoint_volume": lambda: pods(job_with_volume()),
    "pods_with_an_image_volume": pods_with_an_image_volume,
    "objects_of_a_job": objects,
}


@pytest.mark.parametrize("name", CASES)
def test_manifests_are_as_written(name: str) -> None:
    made = CASES[name]()
    path = FOLDER / f"{name}.yaml"
    text = yaml.safe_dump_all(made, sort_keys=False, width=120)
    if os.environ.get("EBBTIDE_GOLDEN") == "write":
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert list(yaml.safe_load_all(path.read_text())) == made


@pytest.mark.parametrize("name", CASES)
def test_kubernetes_would_take_them(name: str) -> None:
    for manifest in CASES[name]():
        kubernetes_validate.validate(manifest, "1.33", strict=True)


def test_without_a_resource_nobody_owns_them() -> None:
    (first, *_) = [build_service(plain_job(), replace(SITE, owner_uid=""))]
    assert "ownerReferences" not in first["metadata"]
