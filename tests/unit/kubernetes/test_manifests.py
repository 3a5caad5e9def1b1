"""What every agent pod needs, whatever its job is called and whatever its template says."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from scheduler.documents.job import parse_job
from scheduler.domain.job_state import Allocation
from scheduler.kubernetes.api_objects import NODE_LABEL
from scheduler.kubernetes.manifests import ManifestContext, build_agent_pod, build_service, job_object_name
from scheduler.kubernetes.pod_changes import PodToCreate, plan_pod_changes
from scheduler.kubernetes.pod_view import parse_pod_view
from scheduler.kubernetes.resources.elastic_job import NAME_MAX_LENGTH
from tests.builders import a_job

DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
SITE = ManifestContext("harbour", 1, "http://ebbtide:8787", "ebbtide/worker")
LONGEST = f"a{'-' * (NAME_MAX_LENGTH - 2)}b-k3f9q1"


def test_a_service_and_a_hostname_of_the_longest_name_are_labels() -> None:
    parse_job({"name": LONGEST[:NAME_MAX_LENGTH], "gpus": {"min": 1, "max": 1}})
    job = replace(a_job(LONGEST, 1, 8), allocation=Allocation(generation=1000, target={"t0": (0,)}))
    (new,) = plan_pod_changes(job, [], 0.0).create
    pod = build_agent_pod(job, new, SITE)
    assert DNS_LABEL.fullmatch(build_service(job, SITE)["metadata"]["name"])
    assert DNS_LABEL.fullmatch(pod["spec"]["hostname"])
    assert pod["spec"]["subdomain"] == build_service(job, SITE)["metadata"]["name"]


def test_names_that_begin_alike_stay_apart() -> None:
    assert job_object_name(LONGEST) != job_object_name(LONGEST.replace("k3f9q1", "k3f9q2"))


def test_a_name_that_is_short_enough_stays_as_it_is() -> None:
    assert job_object_name("llama-k3f9q1") == "ebbtide-llama-k3f9q1"


def test_a_node_may_have_a_longer_name_than_a_label_takes() -> None:
    node = f"gpu-{'x' * 60}.cluster.internal"
    job = a_job("llama-k3f9q1", 1, 8)
    pod = build_agent_pod(job, PodToCreate(job.id, f"{job.id}-g1-0", node, 8), SITE)
    assert len(pod["metadata"]["labels"][NODE_LABEL]) <= 63
    assert parse_pod_view(pod).target_node == node


def container_of(**named: Any) -> dict[str, Any]:
    """The container of a pod of a job that is named so."""
    job = a_job("llama-k3f9q1", 1, 8, **named)
    container: dict[str, Any] = build_agent_pod(job, PodToCreate(job.id, f"{job.id}-g1-0", "t0", 8), SITE)["spec"][
        "containers"
    ][0]
    return container


def values_of(container: dict[str, Any], name: str) -> list[str]:
    return [each["value"] for each in container["env"] if each["name"] == name]


def a_template(*, env: list[dict[str, str]] | None = None, **spec: Any) -> str:
    return json.dumps({"spec": {**spec, "containers": [{"image": "x", "env": env or []}]}})


def test_there_is_a_folder_for_temporary_files_where_the_root_cannot_be_written() -> None:
    container = container_of()
    (folder,) = values_of(container, "TMPDIR")
    assert folder in {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}


def test_a_folder_for_temporary_files_that_somebody_names_stays() -> None:
    template = a_template(env=[{"name": "TMPDIR", "value": "/fast"}])
    assert values_of(container_of(template_json=template), "TMPDIR") == ["/fast"]
    assert values_of(container_of(env=(("TMPDIR", "/fast"),)), "TMPDIR") == ["/fast"]


@pytest.mark.parametrize(("spec", "grace_s"), [({}, "60"), ({"terminationGracePeriodSeconds": 600}, "600")])
def test_an_agent_knows_how_long_its_pod_may_take_to_end(spec: dict[str, Any], grace_s: str) -> None:
    assert values_of(container_of(template_json=a_template(**spec)), "EBBTIDE_GRACE_S") == [grace_s]
