"""Watch: the changes of one kind as the API server tells them, line by line.

Cluster: what one can ask of a Kubernetes API server, in raw JSON objects. What is repeated: see `calls`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from random import Random
from typing import Protocol

from scheduler.kubernetes import api_requests
from scheduler.kubernetes.api_error import NO_RESPONSE, ApiError, parse_status_error
from scheduler.kubernetes.api_objects import POD, Object, ResourceKind, name_of, namespace_of, uid_of
from scheduler.kubernetes.api_requests import ApiRequest
from scheduler.kubernetes.connection import Connection, load_configuration
from scheduler.kubernetes.flow_control import ClientLimits, RequestRecord, RequestSender

ADDED, MODIFIED, DELETED, BOOKMARK = "ADDED", "MODIFIED", "DELETED", "BOOKMARK"


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """`object` is as it is after the change; of a deleted one its last state, with the version of its deletion. Of a
    bookmark only metadata.resourceVersion counts: all changes up to it have been told."""

    type: str
    object: Object


class LineStream(Protocol):
    def __iter__(self) -> Iterator[bytes]: ...

    def close(self) -> None: ...


class WatchStream:
    """Iterate in one thread; `close` from any thread ends that."""

    def __init__(self, lines: LineStream) -> None:
        self._lines = lines
        self._events = _parse_events(lines)

    def __iter__(self) -> Iterator[WatchEvent]:
        return self._events

    def close(self) -> None:
        self._lines.close()


def _parse_events(lines: Iterable[bytes]) -> Iterator[WatchEvent]:
    for line in lines:
        try:
            said = json.loads(line)
        except ValueError as error:
            raise ApiError(NO_RESPONSE, type(error).__name__, f"not a line of a watch: {line[:80]!r}") from error
        if said["type"] == "ERROR":
            raise parse_status_error(said["object"])
        yield WatchEvent(said["type"], said["object"])


PAGE_SIZE = 500
LIST_RESTARTS_MAX = 3


@dataclass(frozen=True, slots=True)
class ObjectList:
    items: tuple[Object, ...]
    resource_version: str


class EvictionResult(Enum):
    EVICTED = "done"
    BLOCKED = "refused"
    """A PodDisruptionBudget does not allow it now."""
    NOT_FOUND = "missing"
    """The pod is gone, or another one has its name."""


class KubernetesClient:
    """Thread-safe. Every method raises ApiError where its docstring does not say otherwise."""

    def __init__(self, sender: RequestSender, *, host: str) -> None:
        self._asker = sender
        self.host = host

    def close(self) -> None:
        """Wake whoever waits between two attempts, and drop the connections."""
        self._asker.close()

    def get(self, kind: ResourceKind, name: str, namespace: str = "") -> Object:
        found: Object = self._asker.send(api_requests.build_get(kind, name, namespace))
        return found

    def get_or_none(self, kind: ResourceKind, name: str, namespace: str = "") -> Object | None:
        """None where there is none."""
        try:
            return self.get(kind, name, namespace)
        except ApiError as error:
            if error.is_not_found:
                return None
            raise

    def list(
        self,
        kind: ResourceKind,
        *,
        namespace: str = "",
        label_selector: str = "",
        field_selector: str = "",
        page_size: int = PAGE_SIZE,
        retry_timeout_s: float | None = None,
    ) -> ObjectList:
        """All objects that match, in all namespaces where none is named, with the version that the list is of.
        A list whose pages outlive what the server keeps begins again."""
        first = api_requests.build_list(
            kind, namespace=namespace, label_selector=label_selector, field_selector=field_selector, page_size=page_size
        )
        restarts = 0
        while True:
            try:
                return self._list_pages(kind, first, retry_timeout_s)
            except ApiError as error:
                restarts += 1
                if not error.is_gone or restarts > LIST_RESTARTS_MAX:
                    raise

    def watch(
        self,
        kind: ResourceKind,
        *,
        resource_version: str,
        namespace: str = "",
        label_selector: str = "",
        field_selector: str = "",
        timeout_s: float = 300.0,
        idle_timeout_s: float = 90.0,
    ) -> WatchStream:
        """Changes after the version `since`, with bookmarks, until the server ends it after about `timeout_s`. Never
        repeated: raises ApiError now or while it is read, when nothing came for `silence_s`, and one that `is_gone`
        where `since` is too old."""
        call = api_requests.build_watch(
            kind,
            namespace=namespace,
            label_selector=label_selector,
            field_selector=field_selector,
            resource_version=resource_version,
            timeout_s=timeout_s,
        )
        return WatchStream(self._asker.stream(call, idle_timeout_s=idle_timeout_s))

    def create(self, kind: ResourceKind, item: Object) -> Object:
        """The object as the server made it; the error `exists_already` where somebody else made one of that name."""
        try:
            made: Object = self._asker.send(api_requests.build_create(kind, item))
        except ApiError as error:
            if not (error.is_already_exists and error.had_ambiguous_attempt):
                raise
            found = self.get_or_none(kind, name_of(item), namespace_of(item))
            if found is None or not api_requests.was_created_from(item, found):
                raise
            return found
        return made

    def post_subresource(
        self, kind: ResourceKind, name: str, namespace: str = "", *, subresource: str, body: Object
    ) -> Object:
        """Post to a subresource that makes no object, such as a ServiceAccount's `token`. Never repeated in doubt."""
        answer: Object = self._asker.send(api_requests.build_subresource_post(kind, name, namespace, subresource, body))
        return answer

    def apply(self, kind: ResourceKind, item: Object, *, force: bool = True, subresource: str = "") -> Object:
        """Server-side apply: makes the object, or makes these fields so. A metadata.resourceVersion in it is a
        precondition. Without `force`, fields that another manager owns are a conflict."""
        applied: Object = self._asker.send(api_requests.build_apply(kind, item, force=force, subresource=subresource))
        return applied

    def patch(
        self,
        kind: ResourceKind,
        name: str,
        namespace: str = "",
        *,
        change: Object | Sequence[Object],
        resource_version: str = "",
        subresource: str = "",
    ) -> Object:
        """A merge patch (a dict) or a JSON patch (a sequence of operations). A conflict where `resource_version` is
        given and the object has changed since."""
        path = api_requests.build_path(kind, namespace, name, subresource)
        if isinstance(change, dict):
            call = api_requests.build_merge_patch(kind, path, change, resource_version)
        else:
            call = api_requests.build_json_patch(kind, path, change, resource_version)
        patched: Object = self._asker.send(call)
        return patched

    def patch_status(
        self, kind: ResourceKind, name: str, namespace: str = "", *, change: Object, resource_version: str = ""
    ) -> Object:
        return self.patch(kind, name, namespace, change=change, resource_version=resource_version, subresource="status")

    def replace(
        self, kind: ResourceKind, item: Object, *, subresource: str = "", retry_timeout_s: float | None = None
    ) -> Object:
        """Put the whole object in place of the version that it names; a conflict if that is no longer the newest."""
        call = api_requests.build_replace(kind, item, subresource=subresource)
        replaced: Object = self._asker.send(call, retry_timeout_s=retry_timeout_s)
        return replaced

    def delete(
        self,
        kind: ResourceKind,
        name: str,
        namespace: str = "",
        *,
        uid: str | None = None,
        resource_version: str | None = None,
        grace_period_s: int | None = None,
    ) -> Object | None:
        """The object if it still has to end (grace, finalizers); None if it is gone: also where it was gone before,
        or where another one than `uid` has its name. A conflict where it changed since `resource_version`."""
        path = api_requests.build_path(kind, namespace, name)
        try:
            left: Object = self._asker.send(
                api_requests.build_delete(
                    kind, path, uid=uid, resource_version=resource_version, grace_period_s=grace_period_s
                )
            )
        except ApiError as error:
            if error.is_not_found or (
                error.is_conflict and uid and self._is_absent_or_replaced(kind, name, namespace, uid)
            ):
                return None
            raise
        return left if api_requests.is_still_terminating(left) else None

    def bind(self, pod: Object, node: str) -> None:
        """Give this very pod (its uid) its node. Nothing is to do where it has it; a conflict where it has another."""
        try:
            self._asker.send(api_requests.build_bind(pod, node))
        except ApiError as error:
            if not error.is_conflict:
                raise
            found = self.get_or_none(POD, name_of(pod), namespace_of(pod))
            if found is None or uid_of(found) != uid_of(pod) or found["spec"].get("nodeName") != node:
                raise

    def evict(self, pod: Object, *, grace_period_s: int | None = None) -> EvictionResult:
        """Ask this very pod (its uid) to leave, as its PodDisruptionBudgets allow. Where another pod has its name, the
        API server takes 10 s to say so (it repeats the attempt in vain)."""
        try:
            self._asker.send(api_requests.build_evict(pod, grace_period_s=grace_period_s))
        except ApiError as error:
            if error.is_blocked_by_budget:
                return EvictionResult.BLOCKED
            named = name_of(pod), namespace_of(pod)
            if error.is_not_found or (error.is_conflict and self._is_absent_or_replaced(POD, *named, uid_of(pod))):
                return EvictionResult.NOT_FOUND
            raise
        return EvictionResult.EVICTED

    def _list_pages(self, kind: ResourceKind, first: ApiRequest, retry_timeout_s: float | None) -> ObjectList:
        items: list[Object] = []
        call = first
        while True:
            page = self._asker.send(call, retry_timeout_s=retry_timeout_s)
            items.extend(api_requests.with_type_meta(kind, item) for item in page.get("items") or ())
            following = page["metadata"].get("continue", "")
            if not following:
                return ObjectList(tuple(items), str(page["metadata"]["resourceVersion"]))
            call = api_requests.build_next_page(first, following)

    def _is_absent_or_replaced(self, kind: ResourceKind, name: str, namespace: str, uid: str) -> bool:
        found = self.get_or_none(kind, name, namespace)
        return found is None or uid_of(found) != uid


def connect(
    kubeconfig: str | Path = "",
    *,
    limits: ClientLimits | None = None,
    on_request: Callable[[RequestRecord], None] = lambda asked: None,
    may_write: Callable[[], bool] = lambda: True,
    rng: Random | None = None,
) -> KubernetesClient:
    """The cluster of `kubeconfig`, else of KUBECONFIG, else the one that this pod runs in. Once `may_write` says no,
    every call that would change something raises FencedError. Raises NoClusterError."""
    limits = limits or ClientLimits()
    connection = Connection(
        load_configuration(kubeconfig), connect_timeout_s=limits.connect_timeout_s, read_timeout_s=limits.read_timeout_s
    )
    asker = RequestSender(connection, limits=limits, on_request=on_request, may_write=may_write, rng=rng or Random())
    return KubernetesClient(asker, host=connection.host)
