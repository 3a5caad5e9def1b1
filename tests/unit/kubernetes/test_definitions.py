"""The custom resource definitions match the documents and the objects that Ebbtide writes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from scheduler.documents.custom_resource import LendingSpec, NetworkSpec, PoolSpec, TolerationSpec
from scheduler.documents.document import Document
from scheduler.documents.job import JobDocument
from scheduler.documents.queue import QueueSpec
from scheduler.kubernetes.api_objects import ELASTIC_JOB, GPU_PROFILE, LOAN, POOL, QUEUE, ResourceKind
from scheduler.kubernetes.resources.gpu_profile import PROFILE_FIELDS
from scheduler.solver.profiles.gpu_document import GPU_REQUIRED_FIELDS
from tests.kubernetes.custom_resources import definitions

EVERY = definitions()


def schema(kind: str) -> dict[str, Any]:
    found: dict[str, Any] = EVERY[kind]["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    return found


def fields(form: type[Document]) -> set[str]:
    return {info.alias or name for name, info in form.model_fields.items()}


def nulls(value: object, path: str = "") -> Iterator[str]:
    if value is None:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in items:
        yield from nulls(inner, f"{path}/{name}")


@pytest.mark.parametrize("kind", [ELASTIC_JOB, POOL, QUEUE, GPU_PROFILE, LOAN])
def test_definitions_match_the_resource_kinds(kind: ResourceKind) -> None:
    spec = EVERY[kind.name]["spec"]
    assert (spec["group"], spec["names"]["plural"], spec["scope"] == "Namespaced") == (
        kind.group,
        kind.plural,
        kind.is_namespaced,
    )
    assert [version["name"] for version in spec["versions"]] == [kind.version]
    assert list(nulls(EVERY[kind.name])) == []


def test_elastic_job_has_the_fields_of_the_job_document() -> None:
    given = set(schema("ElasticJob")["spec"]["properties"])
    assert given == (fields(JobDocument) - {"namespace", "labels"}) | {"suspend", "managedBy"}


def test_only_gpus_and_suspend_are_mutable() -> None:
    rules = schema("ElasticJob")["spec"]["x-kubernetes-validations"]
    fixed = {rule["fieldPath"].removeprefix(".") for rule in rules if "oldSelf" in rule["rule"]}
    assert fixed == set(schema("ElasticJob")["spec"]["properties"]) - {"gpus", "suspend"}


def test_pools_and_queues_have_the_fields_of_their_documents() -> None:
    assert set(schema("Pool")["spec"]["properties"]) == fields(PoolSpec)
    assert set(schema("Pool")["spec"]["properties"]["lending"]["properties"]) == fields(LendingSpec)
    assert set(schema("Pool")["spec"]["properties"]["network"]["properties"]) == fields(NetworkSpec)
    tolerations = schema("Pool")["spec"]["properties"]["tolerations"]
    assert set(tolerations["items"]["properties"]) == fields(TolerationSpec)
    assert set(schema("Queue")["spec"]["properties"]) == fields(QueueSpec)


def test_gpu_profiles_have_the_fields_of_the_profile() -> None:
    spec = schema("GpuProfile")["spec"]
    assert set(spec["properties"]) == set(PROFILE_FIELDS)
    assert {PROFILE_FIELDS[field] for field in spec["required"]} == set(GPU_REQUIRED_FIELDS) - {"gpu"}
