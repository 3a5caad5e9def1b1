"""Checkpoints on a volume claim that all pods of a job mount."""

from __future__ import annotations

from typing import Any

from scheduler.domain.checkpoints import CheckpointSpec, CheckpointVolume
from scheduler.domain.commands import Command, SubmitJob
from scheduler.domain.job_spec import JobSpec
from scheduler.kubernetes.api_objects import JOB_LABEL, VOLUME_CLAIM, Object
from tests.kubernetes.operated import Operated
from tests.kubernetes.waiting import eventually

COMMAND = ["python", "train.py"]
VOLUME = {"persistentVolumeClaim": {"claimName": "shared"}}


def add_claim(operated: Operated, *, phase: str = "Bound") -> None:
    """Create the claim `shared` with the status that a provisioner would set."""
    wants = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Ti"}}}
    operated.cluster.create(
        VOLUME_CLAIM, {"metadata": {"name": "shared", "namespace": operated.namespace}, "spec": wants}
    )
    bind(operated, phase)


def bind(operated: Operated, phase: str = "Bound") -> None:
    operated.cluster.patch_status(VOLUME_CLAIM, "shared", operated.namespace, change={"status": {"phase": phase}})


def mounted(pod: Object, path: str) -> tuple[str, str]:
    """Return the claim and the subdirectory that the pod's first container mounts at `path`."""
    (mount,) = [each for each in pod["spec"]["containers"][0]["volumeMounts"] if each["mountPath"] == path]
    (volume,) = [each for each in pod["spec"]["volumes"] if each["name"] == mount["name"]]
    return volume["persistentVolumeClaim"]["claimName"], mount["subPath"]


def told(operated: Operated, name: str) -> tuple[str, str]:
    found = operated.job(name).get("status", {}).get("conditions", [])
    return next(((each["status"], each["reason"]) for each in found if each["type"] == "CheckpointsShared"), ("", ""))


def test_all_pods_mount_the_claim_in_the_jobs_directory(operated: Operated) -> None:
    operated.add_nodes(2)
    add_claim(operated)
    operated.start_operator()
    spec: dict[str, Any] = {"gpus": {"min": 12, "max": 12}, "command": COMMAND, "checkpoint": {"volume": VOLUME}}
    operated.apply_job("llama", spec)
    operated.until_phase("llama", "Running")
    job_id = operated.job("llama")["status"]["jobId"]
    assert [mounted(pod, "/checkpoints") for pod in operated.pods()] == [("shared", job_id)] * 2
    assert told(operated, "llama") == ("True", "ClaimMounted")


def test_volume_of_an_http_job_is_in_its_resource(operated: Operated) -> None:
    operated.add_nodes(1)
    add_claim(operated)
    operated.start_operator()
    checkpoint = CheckpointSpec("/saved", volume=CheckpointVolume("shared", "runs/hello"))
    spec = JobSpec("hello", 4, 4, steps=10**9, command=tuple(COMMAND), checkpoint=checkpoint)
    operated.store.send(Command("from-http", 0.0, SubmitJob("hello-k3f9q1", spec)))
    eventually(lambda: operated.find("hello-k3f9q1"), what="it has an ElasticJob")
    operated.until_phase("hello-k3f9q1", "Running")
    assert operated.job("hello-k3f9q1")["spec"]["checkpoint"]["volume"] == {**VOLUME, "subPath": "runs/hello"}
    (pod,) = operated.pods()
    assert mounted(pod, "/saved") == ("shared", "runs/hello")


def test_unshared_checkpoints_set_the_condition(operated: Operated) -> None:
    operated.add_nodes(1)
    operated.start_operator()
    operated.submit("llama", 4, 8)
    operated.until_phase("llama", "Running")
    assert told(operated, "llama") == ("False", "InPodsOnly")


def test_pods_wait_for_a_mountable_claim(operated: Operated) -> None:
    operated.add_nodes(1)
    operated.start_operator()
    spec = {"gpus": {"min": 4, "max": 4}, "steps": 10**9, "command": COMMAND, "checkpoint": {"volume": VOLUME}}
    operated.apply_job("llama", spec)
    eventually(lambda: operated.condition("llama", "VolumesReady") == "False", what="the claim is missing")
    operated.submit("sound", 4, 4)
    operated.until_phase("sound", "Running")
    add_claim(operated, phase="Pending")
    operated.submit("later", 4, 4)
    operated.until_phase("later", "Running")
    assert all("llama" not in pod["metadata"]["name"] for pod in operated.pods())
    operated.agents.finish(operated.job("later")["metadata"]["labels"][JOB_LABEL])
    bind(operated)
    operated.until_phase("llama", "Running")
