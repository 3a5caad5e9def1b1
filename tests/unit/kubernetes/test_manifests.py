"""Manifests of agent pods for any job name and template."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from scheduler.documents.job import parse_job
from scheduler.domain.checkpoints import CheckpointSpec
from scheduler.domain.job_state import Allocation
from scheduler.domain.pod_requirements import PER_GPU, compute_pod_requests
from scheduler.kubernetes.agent_injection import AgentImage
from scheduler.kubernetes.api_objects import NODE_LABEL
from scheduler.kubernetes.manifests import ManifestContext, build_agent_pod, build_service, job_object_name
from scheduler.kubernetes.pod_changes import PodToCreate, plan_pod_changes
from scheduler.kubernetes.pod_view import parse_pod_view
from scheduler.kubernetes.resources.elastic_job import NAME_MAX_LENGTH
from tests.builders import a_job

DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
SITE = ManifestContext("harbour", 1, "http://ebbtide:8787", "ebbtide/worker", AgentImage("ebbtide/agent"))
LONGEST = f"a{'-' * (NAME_MAX_LENGTH - 2)}b-k3f9q1"


def test_longest_names_are_valid_labels() -> None:
    parse_job({"name": LONGEST[:NAME_MAX_LENGTH], "gpus": {"min": 1, "max": 1}})
    job = replace(a_job(LONGEST, 1, 8), allocation=Allocation(generation=1000, target={"t0": (0,)}))
    (new,) = plan_pod_changes(job, [], 0.0).create
    pod = build_agent_pod(job, new, SITE)
    assert DNS_LABEL.fullmatch(build_service(job, SITE)["metadata"]["name"])
    assert DNS_LABEL.fullmatch(pod["spec"]["hostname"])
    assert pod["spec"]["subdomain"] == build_service(job, SITE)["metadata"]["name"]


def test_truncated_names_are_distinct() -> None:
    assert job_object_name(LONGEST) != job_object_name(LONGEST.replace("k3f9q1", "k3f9q2"))


def test_short_name_is_unchanged() -> None:
    assert job_object_name("llama-k3f9q1") == "ebbtide-llama-k3f9q1"


def test_long_node_name_is_truncated_in_the_label() -> None:
    node = f"gpu-{'x' * 60}.cluster.internal"
    job = a_job("llama-k3f9q1", 1, 8)
    pod = build_agent_pod(job, PodToCreate(job.id, f"{job.id}-g1-0", node, 8), SITE)
    assert len(pod["metadata"]["labels"][NODE_LABEL]) <= 63
    assert parse_pod_view(pod).target_node == node


def container_of(**named: Any) -> dict[str, Any]:
    """Return the container of an agent pod for a job with this name."""
    job = a_job("llama-k3f9q1", 1, 8, **named)
    container: dict[str, Any] = build_agent_pod(job, PodToCreate(job.id, f"{job.id}-g1-0", "t0", 8), SITE)["spec"][
        "containers"
    ][0]
    return container


def values_of(container: dict[str, Any], name: str) -> list[str]:
    return [each["value"] for each in container["env"] if each["name"] == name]


def build_template(*, env: list[dict[str, str]] | None = None, **spec: Any) -> str:
    return json.dumps({"spec": {**spec, "containers": [{"image": "x", "env": env or []}]}})


def test_tmpdir_is_set() -> None:
    container = container_of()
    (folder,) = values_of(container, "TMPDIR")
    assert folder in {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}


def test_given_tmpdir_is_kept() -> None:
    template = build_template(env=[{"name": "TMPDIR", "value": "/fast"}])
    assert values_of(container_of(template_json=template), "TMPDIR") == ["/fast"]
    assert values_of(container_of(env=(("TMPDIR", "/fast"),)), "TMPDIR") == ["/fast"]


@pytest.mark.parametrize(("spec", "grace_s"), [({}, "60"), ({"terminationGracePeriodSeconds": 600}, "600")])
def test_agent_gets_its_grace_period(spec: dict[str, Any], grace_s: str) -> None:
    assert values_of(container_of(template_json=build_template(**spec)), "EBBTIDE_GRACE_S") == [grace_s]


def test_copying_the_agent_changes_no_request_of_the_pod() -> None:
    resources = {"requests": {"cpu": "8", "memory": "64Gi"}, "limits": {"memory": "64Gi", "rdma/hca": "1"}}
    sidecar = {"name": "proxy", "restartPolicy": "Always", "resources": {"requests": {"cpu": "1"}}}
    spec = {"containers": [{"name": "train", "resources": resources}], "initContainers": [sidecar]}
    job = a_job("llama-k3f9q1", 1, 8, template_json=json.dumps({"spec": spec}), resources_per=PER_GPU)
    made = build_agent_pod(job, PodToCreate(job.id, f"{job.id}-g1-0", "t0", 2), SITE)["spec"]
    without = {**made, "initContainers": made["initContainers"][1:]}
    assert compute_pod_requests(made) == compute_pod_requests(without)
    assert dict(compute_pod_requests(made)) == job.spec.pod_requirements.compute_requests(2) | {"nvidia.com/gpu": 2}
    assert made["initContainers"][0]["resources"]["limits"].keys() == {"memory"}, "a device is not copied"


def test_pull_secrets_of_the_settings_join_those_of_the_template() -> None:
    template = build_template(imagePullSecrets=[{"name": "own"}, {"name": "shared"}])
    new = PodToCreate("llama-k3f9q1", "llama-k3f9q1-g1-0", "t0", 2)
    for own, expected in ((template, ["own", "shared", "registry"]), (build_template(), ["shared", "registry"])):
        job = a_job("llama-k3f9q1", 1, 8, template_json=own)
        made = build_agent_pod(job, new, replace(SITE, pull_secrets=("shared", "registry")))["spec"]
        assert [each["name"] for each in made["imagePullSecrets"]] == expected
    assert "imagePullSecrets" not in build_agent_pod(a_job("llama-k3f9q1", 1, 8), new, SITE)["spec"]


@pytest.mark.parametrize(("user", "is_non_root"), [(None, True), (1000, True), (0, False)])
def test_copying_the_agent_meets_the_restricted_standard_unless_the_pod_runs_as_root(
    user: int | None, is_non_root: bool
) -> None:
    security = {} if user is None else {"runAsUser": user}
    job = a_job("llama-k3f9q1", 1, 8, template_json=build_template(securityContext=security))
    (copying,) = build_agent_pod(job, PodToCreate(job.id, f"{job.id}-g1-0", "t0", 2), SITE)["spec"]["initContainers"]
    assert copying["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": is_non_root,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


@pytest.mark.parametrize(
    ("init", "first", "error"),
    [
        (
            {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}},
            {"waiting": {"reason": "PodInitializing"}},
            "ImagePullBackOff: init container ebbtide-agent: no such image",
        ),
        (
            {"terminated": {"reason": "Error", "exitCode": 1}},
            {"waiting": {"reason": "PodInitializing"}},
            "Error: init container ebbtide-agent",
        ),
        (
            {"terminated": {"reason": "Completed", "exitCode": 0}},
            {"waiting": {"reason": "ErrImagePull", "message": "no such image"}},
            "ErrImagePull: no such image",
        ),
        ({"running": {}}, {"waiting": {"reason": "PodInitializing"}}, ""),
    ],
)
def test_container_that_cannot_copy_the_agent_is_named(init: dict[str, Any], first: dict[str, Any], error: str) -> None:
    job = a_job("llama-k3f9q1", 1, 8)
    pod = build_agent_pod(job, PodToCreate(job.id, f"{job.id}-g1-0", "t0", 8), SITE)
    statuses = {
        "initContainerStatuses": [{"name": "ebbtide-agent", "state": init}],
        "containerStatuses": [{"name": "worker", "state": first}],
    }
    assert parse_pod_view({**pod, "status": {"phase": "Pending", **statuses}}).error == error


def test_object_store_reaches_the_agent_and_needs_no_volume() -> None:
    container = container_of(checkpoint=CheckpointSpec("s3://runs/llama"))
    assert values_of(container, "EBBTIDE_CHECKPOINT_DIR") == ["s3://runs/llama"]
    assert not [mount for mount in container["volumeMounts"] if "s3" in mount["mountPath"]]
    assert "ebbtide-checkpoints" not in {mount["name"] for mount in container["volumeMounts"]}
