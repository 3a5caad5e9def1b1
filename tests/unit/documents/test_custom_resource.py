"""ElasticJob manifests as job documents, so that one file serves `kubectl apply` and `ebbtide submit`."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.documents.custom_resource import is_manifest, manifest_to_job_document
from scheduler.documents.document import InvalidDocumentError
from scheduler.documents.job import parse_job

SPEC = {"gpus": {"min": 1, "max": 2}, "steps": 5, "command": ["python", "train.py"]}


def a_manifest(**changed: Any) -> dict[str, Any]:
    head = {"apiVersion": "ebbtide.dev/v1alpha1", "kind": "ElasticJob", "metadata": {"name": "train"}}
    return {**head, "spec": SPEC, **changed}


def test_spec_is_the_job_document_and_metadata_names_the_job() -> None:
    assert is_manifest(a_manifest())
    assert not is_manifest({"name": "train", **SPEC})
    assert manifest_to_job_document(a_manifest()) == {"name": "train", **SPEC}
    with_namespace = a_manifest(metadata={"name": "train", "namespace": "research", "labels": {"team": "a"}})
    job = parse_job(manifest_to_job_document(with_namespace))
    assert (job.namespace, job.labels) == ("research", {"team": "a"})
    assert manifest_to_job_document(a_manifest(spec={**SPEC, "suspend": False, "managedBy": ""})) == {
        "name": "train",
        **SPEC,
    }


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"kind": "Deployment"}, "kind"),
        ({"apiVersion": "ebbtide.dev/v2"}, "apiVersion"),
        ({"spec": {**SPEC, "suspend": True}}, "spec.suspend"),
        ({"spec": {**SPEC, "managedBy": "kueue.x-k8s.io/multikueue"}}, "spec.managedBy"),
        ({"spec": ["gpus"]}, "spec"),
        ({"spec": {**SPEC, "labels": {"team": "a"}}}, "spec.labels"),
    ],
)
def test_unsupported_manifest_is_rejected_by_field(changed: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidDocumentError) as caught:
        manifest_to_job_document(a_manifest(**changed))
    assert [invalid.field for invalid in caught.value.invalid_fields] == [field]
