"""KubernetesClient: typed verbs on raw JSON objects, with retries. `api_requests` describes the retries."""

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
    """One change. `object` is the new state; for a deletion, the last state with the version of the deletion.

    A bookmark carries only metadata.resourceVersion: all changes up to it were delivered.
    """

    type: str
    object: Object


class LineStream(Protocol):
    def __iter__(self) -> Iterator[bytes]: ...

    def close(self) -> None: ...


class WatchStream:
    """The events of one watch. One thread iterates; any thread can call `close`, which ends the iteration."""

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
            event = json.loads(line)
        except ValueError as error:
            raise ApiError(
                NO_RESPONSE, type(error).__name__, f"watch returned an invalid line: {line[:80]!r}"
            ) from error
        if event["type"] == "ERROR":
            raise parse_status_error(event["object"])
        yield WatchEvent(event["type"], event["object"])


PAGE_SIZE = 500
LIST_RESTARTS_MAX = 3


@dataclass(frozen=True, slots=True)
class ObjectList:
    items: tuple[Object, ...]
    resource_version: str


class EvictionResult(Enum):
    EVICTED = "done"
    BLOCKED = "refused"
    """A PodDisruptionBudget does not allow the eviction now."""
    NOT_FOUND = "missing"
    """The pod is gone, or another pod has its name."""


class KubernetesClient:
    """Client of one API server. Thread-safe. Every method raises ApiError unless its docstring says otherwise."""

    def __init__(self, sender: RequestSender, *, host: str) -> None:
        self._sender = sender
        self.host = host

    def close(self) -> None:
        """Cancel retries that are waiting, and close all connections."""
        self._sender.close()

    def count_available_requests(self) -> float:
        """Return how many requests can be sent now without waiting for the rate limit."""
        return self._sender.count_available_requests()

    def get(self, kind: ResourceKind, name: str, namespace: str = "", *, subresource: str = "") -> Object:
        found: Object = self._sender.send(api_requests.build_get(kind, name, namespace, subresource))
        return found

    def get_or_none(self, kind: ResourceKind, name: str, namespace: str = "") -> Object | None:
        """Return the object, or None if it does not exist."""
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
        """Return all matching objects and the resourceVersion of the list. An empty namespace selects all namespaces.

        If the continue token expires, the list starts again, at most `LIST_RESTARTS_MAX` times.
        """
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
        """Stream changes after `resource_version`, with bookmarks.

        The server ends the watch after about `timeout_s`.

        Watches are not retried. The call or the iteration raises ApiError after `idle_timeout_s` without data, and with
        `is_gone` if `resource_version` has expired.
        """
        call = api_requests.build_watch(
            kind,
            namespace=namespace,
            label_selector=label_selector,
            field_selector=field_selector,
            resource_version=resource_version,
            timeout_s=timeout_s,
        )
        return WatchStream(self._sender.stream(call, idle_timeout_s=idle_timeout_s))

    def create(self, kind: ResourceKind, item: Object) -> Object:
        """Create the object and return it. Raises ApiError with `is_already_exists` if the name is taken."""
        try:
            created: Object = self._sender.send(api_requests.build_create(kind, item))
        except ApiError as error:
            if not (error.is_already_exists and error.had_ambiguous_attempt):
                raise
            found = self.get_or_none(kind, name_of(item), namespace_of(item))
            if found is None or not api_requests.was_created_from(item, found):
                raise
            return found
        return created

    def create_dry(self, kind: ResourceKind, item: Object) -> Object:
        """Return the object as the API server would create it. Nothing is stored. Not retried."""
        admitted: Object = self._sender.send(api_requests.build_create(kind, item, is_dry=True), retry_timeout_s=0.0)
        return admitted

    def post_subresource(
        self, kind: ResourceKind, name: str, namespace: str = "", *, subresource: str, body: Object
    ) -> Object:
        """Post to a subresource that creates no object, such as a ServiceAccount's `token`.

        Not retried after ambiguous failures.
        """
        response: Object = self._sender.send(
            api_requests.build_subresource_post(kind, name, namespace, subresource, body)
        )
        return response

    def apply(self, kind: ResourceKind, item: Object, *, force: bool = True, subresource: str = "") -> Object:
        """Create or update the object by server-side apply.

        A metadata.resourceVersion is a precondition. Without `force`, fields owned by another manager are a conflict.
        """
        applied: Object = self._sender.send(api_requests.build_apply(kind, item, force=force, subresource=subresource))
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
        """Apply a merge patch (a dict) or a JSON patch (a sequence of operations).

        With `resource_version`, raises a conflict if the object has changed since.
        """
        path = api_requests.build_path(kind, namespace, name, subresource)
        if isinstance(change, dict):
            call = api_requests.build_merge_patch(kind, path, change, resource_version)
        else:
            call = api_requests.build_json_patch(kind, path, change, resource_version)
        patched: Object = self._sender.send(call)
        return patched

    def patch_status(
        self, kind: ResourceKind, name: str, namespace: str = "", *, change: Object, resource_version: str = ""
    ) -> Object:
        return self.patch(kind, name, namespace, change=change, resource_version=resource_version, subresource="status")

    def replace(
        self, kind: ResourceKind, item: Object, *, subresource: str = "", retry_timeout_s: float | None = None
    ) -> Object:
        """Replace the object. Raises a conflict if its resourceVersion is not the newest."""
        call = api_requests.build_replace(kind, item, subresource=subresource)
        replaced: Object = self._sender.send(call, retry_timeout_s=retry_timeout_s)
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
        """Delete the object. Return it if it is still terminating (grace period, finalizers), None if it is gone.

        It counts as gone if it did not exist, or if its name belongs to another uid. Raises a conflict if it has
        changed since `resource_version`.
        """
        path = api_requests.build_path(kind, namespace, name)
        try:
            deleted: Object = self._sender.send(
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
        return deleted if api_requests.is_still_terminating(deleted) else None

    def bind(self, pod: Object, node: str) -> None:
        """Bind the pod with this uid to the node.

        Succeeds if it is already bound there; raises a conflict if bound elsewhere.
        """
        try:
            self._sender.send(api_requests.build_bind(pod, node))
        except ApiError as error:
            if not error.is_conflict:
                raise
            found = self.get_or_none(POD, name_of(pod), namespace_of(pod))
            if found is None or uid_of(found) != uid_of(pod) or found["spec"].get("nodeName") != node:
                raise

    def evict(self, pod: Object, *, grace_period_s: int | None = None) -> EvictionResult:
        """Evict the pod with this uid, within its PodDisruptionBudgets.

        If another pod has its name, the API server responds only after 10 s.
        """
        try:
            self._sender.send(api_requests.build_evict(pod, grace_period_s=grace_period_s))
        except ApiError as error:
            if error.is_blocked_by_budget:
                return EvictionResult.BLOCKED
            key = name_of(pod), namespace_of(pod)
            if error.is_not_found or (error.is_conflict and self._is_absent_or_replaced(POD, *key, uid_of(pod))):
                return EvictionResult.NOT_FOUND
            raise
        return EvictionResult.EVICTED

    def _list_pages(self, kind: ResourceKind, first: ApiRequest, retry_timeout_s: float | None) -> ObjectList:
        items: list[Object] = []
        call = first
        while True:
            page = self._sender.send(call, retry_timeout_s=retry_timeout_s)
            items.extend(api_requests.with_type_meta(kind, item) for item in page.get("items") or ())
            continue_token = page["metadata"].get("continue", "")
            if not continue_token:
                return ObjectList(tuple(items), str(page["metadata"]["resourceVersion"]))
            call = api_requests.build_next_page(first, continue_token)

    def _is_absent_or_replaced(self, kind: ResourceKind, name: str, namespace: str, uid: str) -> bool:
        found = self.get_or_none(kind, name, namespace)
        return found is None or uid_of(found) != uid


def connect(
    kubeconfig: str | Path = "",
    *,
    limits: ClientLimits | None = None,
    on_request: Callable[[RequestRecord], None] = lambda record: None,
    may_write: Callable[[], bool] = lambda: True,
    rng: Random | None = None,
) -> KubernetesClient:
    """Return a client for `kubeconfig`, else for KUBECONFIG, else for the cluster of this pod.

    Once `may_write` returns False, every write raises FencedError.

    Raises:
        NoClusterError: no cluster is configured, or the configuration is invalid.
    """
    limits = limits or ClientLimits()
    connection = Connection(
        load_configuration(kubeconfig), connect_timeout_s=limits.connect_timeout_s, read_timeout_s=limits.read_timeout_s
    )
    sender = RequestSender(connection, limits=limits, on_request=on_request, may_write=may_write, rng=rng or Random())
    return KubernetesClient(sender, host=connection.host)
