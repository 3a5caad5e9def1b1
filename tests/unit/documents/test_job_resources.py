"""Memory and cores of a job: the document, limits on machines, and the container on Kubernetes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from scheduler.documents.document import InvalidDocumentError
from scheduler.documents.job import parse_job, to_job_document
from scheduler.domain.quantities import CPU
from scheduler.domain.run_document import ResourceLimits

GIB = 2**30


def document(**fields: Any) -> dict[str, Any]:
    return {"name": "a", "gpus": {"min": 1, "max": 8}, "command": ["train"], **fields}


def template(**resources: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"image": "i", "resources": resources}]}}


@pytest.mark.parametrize(
    ("memory", "expected"), [("64Gi", 64 * GIB), ("64GiB", 64 * GIB), ("2G", 2 * 10**9), (1 << 30, GIB)]
)
def test_memory_is_a_quantity_or_a_size(memory: object, expected: int) -> None:
    spec = parse_job(document(resources={"memory": memory, "cpu": "1500m"}))
    assert (spec.resources.memory_bytes, spec.resources.cpus) == (expected, 1.5)
    assert parse_job(to_job_document(spec)) == spec


@pytest.mark.parametrize(
    ("field", "value"),
    [("memory", 64), ("memory", "much"), ("memory", "-1Gi"), ("memory", True), ("cpu", 0), ("cpu", "all"), ("disk", 1)],
)
def test_invalid_amount_is_refused_with_its_field(field: str, value: object) -> None:
    with pytest.raises(InvalidDocumentError, match=rf"resources\.{field}"):
        parse_job(document(resources={field: value}))


def test_limits_of_a_node_follow_from_its_gpus() -> None:
    stated = {"memory": "10Gi", "cpu": 4}
    assert parse_job(document(resources=stated)).limit_node(3) == ResourceLimits(10 * GIB, cpus=4.0)
    per_gpu = parse_job(document(resources=stated, resourcesPer="gpu"))
    assert per_gpu.limit_node(3) == ResourceLimits(30 * GIB, cpus=12.0)
    assert parse_job(document()).limit_node(3) == ResourceLimits()


@pytest.mark.parametrize("has_template", [True, False])
def test_pods_request_the_resources_of_the_job(*, has_template: bool) -> None:
    fields = {"template": template(limits={"rdma/hca": 1})} if has_template else {}
    spec = parse_job(document(resources={"memory": "10Gi", "cpu": 4}, resourcesPer="gpu", **fields))
    requests = spec.pod_requirements.compute_requests(2)
    assert (requests["memory"], requests[CPU]) == (20 * GIB, 8000)
    assert requests.get("rdma/hca") == (2 if has_template else None)
    limits = json.loads(spec.pod_template_json)["spec"]["containers"][0]["resources"]["limits"]
    assert limits == {"memory": str(10 * GIB), "cpu": "4000m"} | ({"rdma/hca": 1} if has_template else {})
    assert parse_job(document(**fields)).pod_template_json == parse_job(document(**fields)).template_json


def test_resource_of_the_template_cannot_be_stated_twice() -> None:
    with pytest.raises(InvalidDocumentError, match=r"resources\.memory"):
        parse_job(document(resources={"memory": "10Gi"}, template=template(requests={"memory": "5Gi"})))
    assert parse_job(document(resources={"memory": "10Gi"}, template=template(requests={"cpu": 1})))
