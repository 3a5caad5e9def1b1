"""Construction of API requests, and which of them are idempotent."""

from __future__ import annotations

import pytest

from scheduler.kubernetes import api_requests
from scheduler.kubernetes.api_error import parse_error_response, parse_status_error
from scheduler.kubernetes.api_objects import ELASTIC_JOB, LEASE, NODE, POD, Object

SENT: Object = {
    "metadata": {"name": "p", "namespace": "ns", "labels": {"a": "1"}, "annotations": {"epoch": "4"}},
    "spec": {},
}


def as_found(**changes: object) -> Object:
    metadata = {
        **SENT["metadata"],
        "labels": {"a": "1", "added-by-a-webhook": "x"},
        "managedFields": [{"manager": "ebbtide"}],
        **changes,
    }
    return {"metadata": metadata, "spec": {}}


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (api_requests.build_path(POD), "/api/v1/pods"),
        (api_requests.build_path(POD, "ns", "p", "status"), "/api/v1/namespaces/ns/pods/p/status"),
        (api_requests.build_path(NODE, "", "n"), "/api/v1/nodes/n"),
        (api_requests.build_path(LEASE, "ns"), "/apis/coordination.k8s.io/v1/namespaces/ns/leases"),
        (api_requests.build_path(ELASTIC_JOB, "ns", "j"), "/apis/ebbtide.dev/v1alpha1/namespaces/ns/elasticjobs/j"),
    ],
)
def test_build_path(path: str, expected: str) -> None:
    assert path == expected


def test_merge_patch_with_version_keeps_its_metadata() -> None:
    change = {"metadata": {"labels": {"a": None}}, "spec": {"x": 1}}
    call = api_requests.build_merge_patch(NODE, "/api/v1/nodes/n", change, "7")
    assert call.body == {"metadata": {"labels": {"a": None}, "resourceVersion": "7"}, "spec": {"x": 1}}
    assert change["metadata"] == {"labels": {"a": None}}


def test_only_a_guarded_json_patch_is_idempotent() -> None:
    steps = [{"op": "add", "path": "/spec/taints/-", "value": {}}]
    assert not api_requests.build_json_patch(NODE, "/n", steps, "").is_idempotent
    guarded = api_requests.build_json_patch(NODE, "/n", steps, "7")
    assert guarded.is_idempotent
    assert guarded.body[0] == {"op": "replace", "path": "/metadata/resourceVersion", "value": "7"}


def test_create_with_generated_name_is_not_idempotent() -> None:
    assert api_requests.build_create(POD, SENT).is_idempotent
    assert not api_requests.build_create(POD, {"metadata": {"generateName": "p-", "namespace": "ns"}}).is_idempotent


def test_delete_sends_only_given_preconditions() -> None:
    bare = api_requests.build_delete(POD, "/p", uid=None, resource_version=None, grace_period_s=None).body
    assert bare["preconditions"] == {}
    assert "gracePeriodSeconds" not in bare
    full = api_requests.build_delete(POD, "/p", uid="u", resource_version="7", grace_period_s=0).body
    assert full["preconditions"] == {"uid": "u", "resourceVersion": "7"}
    assert full["gracePeriodSeconds"] == 0


@pytest.mark.parametrize(
    ("found", "is_ours"),
    [
        (as_found(), True),
        (as_found(annotations={"epoch": "5"}), False),
        (as_found(labels={}), False),
        (as_found(managedFields=[{"manager": "kubectl"}]), False),
        (as_found(deletionTimestamp="2026-01-01T00:00:00Z"), False),
    ],
)
def test_was_created_from_compares_labels_annotations_and_manager(found: Object, is_ours: bool) -> None:
    assert api_requests.was_created_from(SENT, found) is is_ours


@pytest.mark.parametrize(
    ("left", "is_terminating"),
    [
        ({"kind": "Status", "status": "Success"}, False),
        ({"metadata": {"deletionGracePeriodSeconds": 0}}, False),
        ({"metadata": {"deletionGracePeriodSeconds": 30}}, True),
        ({"metadata": {"deletionGracePeriodSeconds": 0, "finalizers": ["x"]}}, True),
    ],
)
def test_is_still_terminating(left: Object, is_terminating: bool) -> None:
    assert api_requests.is_still_terminating(left) is is_terminating


def test_budget_block_is_not_transient() -> None:
    refused = parse_status_error(
        {"code": 429, "reason": "TooManyRequests", "details": {"causes": [{"reason": "DisruptionBudget"}]}}
    )
    assert refused.is_blocked_by_budget
    assert not refused.is_transient
    overload = parse_error_response(429, {"Retry-After": "1"}, b"Too many requests, please try again later.\n")
    assert overload.is_transient
    assert not overload.is_ambiguous
    assert overload.retry_after_s == 1.0
    assert overload.message == "Too many requests, please try again later."


def test_rejection_with_500_is_not_ambiguous() -> None:
    crowded = parse_status_error({"code": 500, "message": "This pod has more than one PodDisruptionBudget, which ..."})
    assert crowded.is_blocked_by_budget
    down = parse_status_error({"code": 500, "message": 'Internal error occurred: failed calling webhook "x": timeout'})
    assert down.is_webhook_unavailable
    other = parse_status_error({"code": 500, "message": "Internal error occurred: etcdserver: request timed out"})
    assert [each.is_ambiguous for each in (crowded, down, other)] == [False, False, True]
    assert [each.is_transient for each in (crowded, down, other)] == [False, False, True]


def test_conflict_and_already_exists_are_distinct() -> None:
    exists = parse_status_error({"code": 409, "reason": "AlreadyExists", "message": "pods p already exists"})
    conflict = parse_status_error({"code": 409, "reason": "Conflict"})
    assert (exists.is_already_exists, exists.is_conflict) == (True, False)
    assert (conflict.is_already_exists, conflict.is_conflict) == (False, True)
