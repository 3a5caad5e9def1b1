"""Queue documents, derived from the declared quota fields."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from scheduler.documents.document import InvalidDocumentError, parse_document
from scheduler.documents.queue import (
    QueueDocument,
    QuotaDocument,
    apply_queue_change,
    build_queue_spec_properties,
    queue_from_spec,
    to_job_queue,
)
from scheduler.domain.job_queue import QUOTA_FIELDS, JobQueue

QUEUE_CRD = Path(__file__).parents[3] / "helm" / "ebbtide" / "crd-bases" / "queues.yaml"


def test_rest_document_has_every_quota_field() -> None:
    assert list(QuotaDocument.model_fields) == list(QUOTA_FIELDS)
    assert to_job_queue(parse_document(QueueDocument, {"name": "q"})) == JobQueue("q")


def test_custom_resource_definition_matches_the_declared_fields() -> None:
    (version,) = yaml.safe_load(QUEUE_CRD.read_text(encoding="utf-8"))["spec"]["versions"]
    spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    assert spec["properties"] == build_queue_spec_properties()


def test_spec_of_a_custom_resource_is_a_queue() -> None:
    spec = {"guaranteed": 8, "limit": 16, "weight": 2, "userLimit": 4}
    assert queue_from_spec("research", spec) == JobQueue("research", 8, 16, 2.0, 4)


def test_change_keeps_omitted_fields() -> None:
    change = parse_document(QuotaDocument, {"limit_gpus": 3})
    assert apply_queue_change(JobQueue("q", 2, 4, user_jobs_max=1), change) == JobQueue("q", 2, 3, user_jobs_max=1)


def test_change_below_the_guarantee_is_rejected() -> None:
    with pytest.raises(InvalidDocumentError) as caught:
        apply_queue_change(JobQueue("q", 2), parse_document(QuotaDocument, {"limit_gpus": 1}))
    assert [invalid.field for invalid in caught.value.invalid_fields] == ["limit_gpus"]


@pytest.mark.parametrize(
    ("field", "spec"),
    [
        ("limit", {"guaranteed": 3, "limit": 2}),
        ("weight", {"weight": 0}),
        ("guaranteed", {"guaranteed": 1.5}),
        ("guaranteed", {"guaranteed": 10**400}),
        ("user_jobs_max", {"user_jobs_max": 1}),
        ("document", None),
    ],
)
def test_invalid_spec_is_rejected_with_the_name_of_its_field(field: str, spec: Any) -> None:
    with pytest.raises(InvalidDocumentError) as caught:
        queue_from_spec("research", spec)
    assert [invalid.field for invalid in caught.value.invalid_fields] == [field]
