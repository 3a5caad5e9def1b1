"""Requests to the API server as values: path, query, body, and whether a retry after an ambiguous failure is safe.

A request that was never sent, or was rejected with 429, can always be retried. If the server may have executed it (no
response, or 5xx), a retry depends on the verb:

* get, list and watch change nothing.
* apply, merge patch and delete are idempotent. With a resourceVersion precondition the retry may conflict with the
  first
  attempt, and the caller reads again as for any conflict. A delayed first attempt can still arrive later; the next
  reconciliation repairs that.
* create with a name: the retry fails with AlreadyExists. If the existing object has our labels, annotations and field
  manager, the create counts as successful.
* bind: the retry fails because the pod is bound. If pod uid and node match, the bind counts as successful.
* JSON patches, generated names, tokens and evictions are not idempotent and are not retried.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from scheduler.kubernetes.api_objects import (
    FIELD_MANAGER,
    POD,
    Object,
    ResourceKind,
    annotations_of,
    is_terminating,
    labels_of,
    name_of,
    namespace_of,
    uid_of,
)

JSON = "application/json"
APPLY_PATCH = "application/apply-patch+yaml"
MERGE_PATCH = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"
FIELD_MANAGER_QUERY = {"fieldManager": FIELD_MANAGER}


@dataclass(frozen=True, slots=True)
class ApiRequest:
    """One HTTP request. `verb` and `resource` are metric labels."""

    verb: str
    resource: str
    method: str
    path: str
    query: Mapping[str, str]
    body: Any = None
    content_type: str = JSON
    is_idempotent: bool = True


def build_path(kind: ResourceKind, namespace: str = "", name: str = "", subresource: str = "") -> str:
    """Return the URL path. Names are DNS names, so no quoting is needed."""
    root = f"/apis/{kind.api_version}" if kind.group else f"/api/{kind.version}"
    scope = f"/namespaces/{namespace}" if kind.is_namespaced and namespace else ""
    assert namespace or not (kind.is_namespaced and name), f"{kind.name} is namespaced: a namespace is required"
    return root + scope + "".join(f"/{part}" for part in (kind.plural, name, subresource) if part)


def with_type_meta(kind: ResourceKind, item: Object) -> Object:
    """Return the object with apiVersion and kind, which items of a list lack."""
    return {"apiVersion": kind.api_version, "kind": kind.name, **item}


def build_get(kind: ResourceKind, name: str, namespace: str, subresource: str = "") -> ApiRequest:
    return ApiRequest("get", kind.plural, "GET", build_path(kind, namespace, name, subresource), {})


def build_list(
    kind: ResourceKind, *, namespace: str, label_selector: str, field_selector: str, page_size: int
) -> ApiRequest:
    selection = {"labelSelector": label_selector, "fieldSelector": field_selector, "limit": str(page_size)}
    return ApiRequest("list", kind.plural, "GET", build_path(kind, namespace), _drop_empty(selection))


def build_next_page(request: ApiRequest, continue_token: str) -> ApiRequest:
    return replace(request, query={**request.query, "continue": continue_token})


def build_watch(
    kind: ResourceKind,
    *,
    namespace: str,
    label_selector: str,
    field_selector: str,
    resource_version: str,
    timeout_s: float,
) -> ApiRequest:
    query = {
        "labelSelector": label_selector,
        "fieldSelector": field_selector,
        "watch": "true",
        "allowWatchBookmarks": "true",
        "resourceVersion": resource_version,
        "timeoutSeconds": str(max(1, int(timeout_s))),
    }
    return ApiRequest("watch", kind.plural, "GET", build_path(kind, namespace), _drop_empty(query))


def build_create(kind: ResourceKind, item: Object, *, is_dry: bool = False) -> ApiRequest:
    path = build_path(kind, namespace_of(item))
    return ApiRequest(
        "create",
        kind.plural,
        "POST",
        path,
        {**FIELD_MANAGER_QUERY, **({"dryRun": "All"} if is_dry else {})},
        with_type_meta(kind, item),
        is_idempotent="name" in item["metadata"],
    )


def build_subresource_post(kind: ResourceKind, name: str, namespace: str, subresource: str, body: Object) -> ApiRequest:
    return ApiRequest(
        "create", kind.plural, "POST", build_path(kind, namespace, name, subresource), {}, body, is_idempotent=False
    )


def build_apply(kind: ResourceKind, item: Object, *, force: bool, subresource: str) -> ApiRequest:
    path = build_path(kind, namespace_of(item), name_of(item), subresource)
    query = {**FIELD_MANAGER_QUERY, "force": "true" if force else "false"}
    return ApiRequest("apply", kind.plural, "PATCH", path, query, with_type_meta(kind, item), APPLY_PATCH)


def build_merge_patch(kind: ResourceKind, path: str, change: Object, resource_version: str) -> ApiRequest:
    if resource_version:
        change = {**change, "metadata": {**change.get("metadata", {}), "resourceVersion": resource_version}}
    return ApiRequest("patch", kind.plural, "PATCH", path, FIELD_MANAGER_QUERY, change, MERGE_PATCH)


def build_json_patch(kind: ResourceKind, path: str, operations: Sequence[Object], resource_version: str) -> ApiRequest:
    """Build a JSON patch.

    The patch replaces resourceVersion, so that the server reports a stale version as a conflict. A failing `test`
    operation would be reported as an invalid request.
    """
    guard = {"op": "replace", "path": "/metadata/resourceVersion", "value": resource_version}
    body = [guard, *operations] if resource_version else list(operations)
    return ApiRequest(
        "patch", kind.plural, "PATCH", path, FIELD_MANAGER_QUERY, body, JSON_PATCH, is_idempotent=bool(resource_version)
    )


def build_replace(kind: ResourceKind, item: Object, *, subresource: str) -> ApiRequest:
    assert item["metadata"].get("resourceVersion"), "a replacement names the version that it replaces"
    path = build_path(kind, namespace_of(item), name_of(item), subresource)
    return ApiRequest("replace", kind.plural, "PUT", path, FIELD_MANAGER_QUERY, with_type_meta(kind, item))


def build_delete(
    kind: ResourceKind, path: str, *, uid: str | None, resource_version: str | None, grace_period_s: int | None
) -> ApiRequest:
    body: Object = {
        "apiVersion": "v1",
        "kind": "DeleteOptions",
        "propagationPolicy": "Background",
        "preconditions": _drop_none({"uid": uid, "resourceVersion": resource_version}),
        **_drop_none({"gracePeriodSeconds": grace_period_s}),
    }
    return ApiRequest("delete", kind.plural, "DELETE", path, {}, body)


def build_bind(pod: Object, node: str) -> ApiRequest:
    name, namespace = name_of(pod), namespace_of(pod)
    body = {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": name, "namespace": namespace, "uid": uid_of(pod)},
        "target": {"apiVersion": "v1", "kind": "Node", "name": node},
    }
    return ApiRequest(
        "bind", POD.plural, "POST", build_path(POD, namespace, name, "binding"), FIELD_MANAGER_QUERY, body
    )


def build_evict(pod: Object, *, grace_period_s: int | None) -> ApiRequest:
    name, namespace = name_of(pod), namespace_of(pod)
    body = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": name, "namespace": namespace},
        "deleteOptions": {"preconditions": {"uid": uid_of(pod)}, **_drop_none({"gracePeriodSeconds": grace_period_s})},
    }
    return ApiRequest(
        "evict", POD.plural, "POST", build_path(POD, namespace, name, "eviction"), {}, body, is_idempotent=False
    )


def was_created_from(sent: Object, found: Object) -> bool:
    """Return whether the existing object is the one that we sent."""
    managers = {entry.get("manager") for entry in found["metadata"].get("managedFields") or ()}
    return (
        FIELD_MANAGER in managers
        and not is_terminating(found)
        and labels_of(sent).items() <= labels_of(found).items()
        and annotations_of(sent).items() <= annotations_of(found).items()
    )


def is_still_terminating(response: Object) -> bool:
    """Return whether the deleted object still exists.

    For an object that is gone, the server returns a Status, or the last state without finalizers and grace period.
    """
    if response.get("kind") == "Status":
        return False
    metadata = response["metadata"]
    return bool(metadata.get("finalizers")) or metadata.get("deletionGracePeriodSeconds", 0) > 0


def _drop_empty(query: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in query.items() if value}


def _drop_none(options: Mapping[str, Any]) -> Object:
    return {key: value for key, value in options.items() if value is not None}
