"""One file serves `kubectl apply` and `ebbtide submit`."""

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


def test_the_spec_is_the_job_document_and_metadata_names_it() -> None:
    assert is_manifest(a_manifest())
    assert not is_manifest({"name": "train", **SPEC})
    assert manifest_to_job_document(a_manifest()) == {"name": "train", **SPEC}
    elsewhere = a_manifest(metadata={"name": "train", "namespace": "research", "labels": {"team": "a"}})
    assert parse_job(manifest_to_job_document(elsewhere)).namespace == "research"
    assert manifest_to_job_document(a_manifest(spec={**SPEC, "suspend": False, "managedBy": ""})) == {
        "name": "train",
        **SPEC,
    }


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"kind": "Deployment"}, 'kind: got "Deployment"; allowed: ElasticJob, or a plain job document'),
        ({"apiVersion": "ebbtide.dev/v2"}, "apiVersion: "),
        ({"spec": {**SPEC, "suspend": True}}, "then `ebbtide suspend` it"),
        ({"spec": {**SPEC, "managedBy": "kueue.x-k8s.io/multikueue"}}, "spec.managedBy: "),
        ({"spec": ["gpus"]}, "spec: "),
    ],
)
def test_what_is_no_job_of_ours_is_told(changed: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidDocumentError) as refused:
        manifest_to_job_document(a_manifest(**changed))
    assert told in str(refused.value)
