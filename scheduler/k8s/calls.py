"""The requests that we make of an API server, as values: path, query, body, and whether one may be repeated in doubt.

A request that never left, or that was turned away with 429, may always be made again. Where the server may have carried
it out (no answer, 5xx), it depends on what a second time would do:

* get, list, watch change nothing.
* apply, a merge patch and delete come to the same end twice. With a resourceVersion as precondition the second time
  may conflict with our own first: the caller reads anew, as it does at any conflict. A replacement always has one.
  (A first attempt that got stuck on its way may arrive after all, even after what we did next. An apply without a
  resourceVersion could then bring back what was deleted meanwhile; the next look at the whole takes it away again.)
* create with a name: the second time the object exists already. If it bears all labels and annotations that we sent
  (they name job, generation and epoch) and our field manager wrote it, it is ours, and counts as made.
* bind: the second time the pod is bound already; if it is this pod (uid) and this node, it counts as bound.
* a JSON patch may append twice, a generated name or a token would be made twice, and an eviction might be answered for
  what became of the first: these are never repeated in doubt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from scheduler.k8s.kinds import FIELD_MANAGER, POD, Kind
from scheduler.k8s.objects import Object, annotations_of, is_terminating, labels_of, name_of, namespace_of, uid_of

JSON = "application/json"
APPLY_PATCH = "application/apply-patch+yaml"
MERGE_PATCH = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"
OURS = {"fieldManager": FIELD_MANAGER}


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request. `verb` and `resource` are for counting."""

    verb: str
    resource: str
    method: str
    path: str
    query: Mapping[str, str]
    body: Any = None
    content_type: str = JSON
    repeatable: bool = True


def path_of(kind: Kind, namespace: str = "", name: str = "", subresource: str = "") -> str:
    """Names are DNS names, so nothing needs quoting."""
    root = f"/apis/{kind.api_version}" if kind.group else f"/api/{kind.version}"
    scope = f"/namespaces/{namespace}" if kind.namespaced and namespace else ""
    assert namespace or not (kind.namespaced and name), f"a {kind.name} has a namespace"
    return root + scope + "".join(f"/{part}" for part in (kind.plural, name, subresource) if part)


def typed(kind: Kind, item: Object) -> Object:
    """With apiVersion and kind, which the items of a list lack."""
    return {"apiVersion": kind.api_version, "kind": kind.name, **item}


def getting(kind: Kind, name: str, namespace: str) -> Call:
    return Call("get", kind.plural, "GET", path_of(kind, namespace, name), {})


def listing(kind: Kind, *, namespace: str, labels: str, fields: str, page_items: int) -> Call:
    selection = {"labelSelector": labels, "fieldSelector": fields, "limit": str(page_items)}
    return Call("list", kind.plural, "GET", path_of(kind, namespace), _said(selection))


def next_page(page: Call, following: str) -> Call:
    return replace(page, query={**page.query, "continue": following})


def watching(kind: Kind, *, namespace: str, labels: str, fields: str, since: str, timeout_s: float) -> Call:
    query = {
        "labelSelector": labels,
        "fieldSelector": fields,
        "watch": "true",
        "allowWatchBookmarks": "true",
        "resourceVersion": since,
        "timeoutSeconds": str(max(1, int(timeout_s))),
    }
    return Call("watch", kind.plural, "GET", path_of(kind, namespace), _said(query))


def creating(kind: Kind, item: Object) -> Call:
    path = path_of(kind, namespace_of(item))
    return Call("create", kind.plural, "POST", path, OURS, typed(kind, item), repeatable="name" in item["metadata"])


def requesting(kind: Kind, name: str, namespace: str, subresource: str, body: Object) -> Call:
    return Call("create", kind.plural, "POST", path_of(kind, namespace, name, subresource), {}, body, repeatable=False)


def applying(kind: Kind, item: Object, *, force: bool, subresource: str) -> Call:
    path = path_of(kind, namespace_of(item), name_of(item), subresource)
    query = {**OURS, "force": "true" if force else "false"}
    return Call("apply", kind.plural, "PATCH", path, query, typed(kind, item), APPLY_PATCH)


def merging(kind: Kind, path: str, change: Object, resource_version: str) -> Call:
    if resource_version:
        change = {**change, "metadata": {**change.get("metadata", {}), "resourceVersion": resource_version}}
    return Call("patch", kind.plural, "PATCH", path, OURS, change, MERGE_PATCH)


def editing(kind: Kind, path: str, steps: Sequence[Object], resource_version: str) -> Call:
    """A JSON patch. Writing the version makes the server compare it and answer with a conflict, where a `test` that
    fails would be answered like a malformed request."""
    guard = {"op": "replace", "path": "/metadata/resourceVersion", "value": resource_version}
    body = [guard, *steps] if resource_version else list(steps)
    return Call("patch", kind.plural, "PATCH", path, OURS, body, JSON_PATCH, repeatable=bool(resource_version))


def replacing(kind: Kind, item: Object, *, subresource: str) -> Call:
    assert item["metadata"].get("resourceVersion"), "a replacement names the version that it replaces"
    path = path_of(kind, namespace_of(item), name_of(item), subresource)
    return Call("replace", kind.plural, "PUT", path, OURS, typed(kind, item))


def deleting(kind: Kind, path: str, *, uid: str | None, resource_version: str | None, grace_s: int | None) -> Call:
    body: Object = {
        "apiVersion": "v1",
        "kind": "DeleteOptions",
        "propagationPolicy": "Background",
        "preconditions": _given({"uid": uid, "resourceVersion": resource_version}),
        **_given({"gracePeriodSeconds": grace_s}),
    }
    return Call("delete", kind.plural, "DELETE", path, {}, body)


def binding(pod: Object, node: str) -> Call:
    name, namespace = name_of(pod), namespace_of(pod)
    body = {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": name, "namespace": namespace, "uid": uid_of(pod)},
        "target": {"apiVersion": "v1", "kind": "Node", "name": node},
    }
    return Call("bind", POD.plural, "POST", path_of(POD, namespace, name, "binding"), OURS, body)


def evicting(pod: Object, *, grace_s: int | None) -> Call:
    name, namespace = name_of(pod), namespace_of(pod)
    body = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": name, "namespace": namespace},
        "deleteOptions": {"preconditions": {"uid": uid_of(pod)}, **_given({"gracePeriodSeconds": grace_s})},
    }
    return Call("evict", POD.plural, "POST", path_of(POD, namespace, name, "eviction"), {}, body, repeatable=False)


def is_made_by(sent: Object, found: Object) -> bool:
    """Whether what exists is what we sent, although no answer said so."""
    managers = {entry.get("manager") for entry in found["metadata"].get("managedFields") or ()}
    return (
        FIELD_MANAGER in managers
        and not is_terminating(found)
        and labels_of(sent).items() <= labels_of(found).items()
        and annotations_of(sent).items() <= annotations_of(found).items()
    )


def is_ending(left: Object) -> bool:
    """Whether a deletion's answer tells of an object that is still there. An object that is gone is answered with a
    Status, or with its last state: no grace left and no finalizer."""
    if left.get("kind") == "Status":
        return False
    metadata = left["metadata"]
    return bool(metadata.get("finalizers")) or metadata.get("deletionGracePeriodSeconds", 0) > 0


def _said(query: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in query.items() if value}


def _given(options: Mapping[str, Any]) -> Object:
    return {key: value for key, value in options.items() if value is not None}
