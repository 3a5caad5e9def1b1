"""Cluster: what one can ask of a Kubernetes API server, in raw JSON objects. What is repeated: see `calls`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from random import Random

from scheduler.k8s import calls
from scheduler.k8s.api_error import ApiError
from scheduler.k8s.asking import Asked, Asker, Limits
from scheduler.k8s.calls import Call
from scheduler.k8s.connection import Connection, configuration_of
from scheduler.k8s.kinds import POD, Kind
from scheduler.k8s.objects import Object, name_of, namespace_of, uid_of
from scheduler.k8s.watch_stream import Watch

PAGE_ITEMS = 500
LIST_RESTARTS_MAX = 3


@dataclass(frozen=True, slots=True)
class Listed:
    items: tuple[Object, ...]
    resource_version: str


class Eviction(Enum):
    DONE = "done"
    REFUSED = "refused"
    """A PodDisruptionBudget does not allow it now."""
    MISSING = "missing"
    """The pod is gone, or another one has its name."""


class Cluster:
    """Thread-safe. Every method raises ApiError where its docstring does not say otherwise."""

    def __init__(self, asker: Asker, *, host: str) -> None:
        self._asker = asker
        self.host = host

    def close(self) -> None:
        """Wake whoever waits between two attempts, and drop the connections."""
        self._asker.close()

    def get(self, kind: Kind, name: str, namespace: str = "") -> Object:
        found: Object = self._asker.ask(calls.getting(kind, name, namespace))
        return found

    def find(self, kind: Kind, name: str, namespace: str = "") -> Object | None:
        """None where there is none."""
        try:
            return self.get(kind, name, namespace)
        except ApiError as error:
            if error.is_missing:
                return None
            raise

    def list(
        self,
        kind: Kind,
        *,
        namespace: str = "",
        labels: str = "",
        fields: str = "",
        page_items: int = PAGE_ITEMS,
        patience_s: float | None = None,
    ) -> Listed:
        """All objects that match, in all namespaces where none is named, with the version that the list is of.
        A list whose pages outlive what the server keeps begins again."""
        first = calls.listing(kind, namespace=namespace, labels=labels, fields=fields, page_items=page_items)
        restarts = 0
        while True:
            try:
                return self._pages(kind, first, patience_s)
            except ApiError as error:
                restarts += 1
                if not error.is_gone or restarts > LIST_RESTARTS_MAX:
                    raise

    def watch(
        self,
        kind: Kind,
        *,
        since: str,
        namespace: str = "",
        labels: str = "",
        fields: str = "",
        timeout_s: float = 300.0,
        silence_s: float = 90.0,
    ) -> Watch:
        """Changes after the version `since`, with bookmarks, until the server ends it after about `timeout_s`. Never
        repeated: raises ApiError now or while it is read, when nothing came for `silence_s`, and one that `is_gone`
        where `since` is too old."""
        call = calls.watching(kind, namespace=namespace, labels=labels, fields=fields, since=since, timeout_s=timeout_s)
        return Watch(self._asker.stream(call, silence_s=silence_s))

    def create(self, kind: Kind, item: Object) -> Object:
        """The object as the server made it; the error `exists_already` where somebody else made one of that name."""
        try:
            made: Object = self._asker.ask(calls.creating(kind, item))
        except ApiError as error:
            if not (error.exists_already and error.in_doubt):
                raise
            found = self.find(kind, name_of(item), namespace_of(item))
            if found is None or not calls.is_made_by(item, found):
                raise
            return found
        return made

    def request(self, kind: Kind, name: str, namespace: str = "", *, subresource: str, body: Object) -> Object:
        """Post to a subresource that makes no object, such as a ServiceAccount's `token`. Never repeated in doubt."""
        answer: Object = self._asker.ask(calls.requesting(kind, name, namespace, subresource, body))
        return answer

    def apply(self, kind: Kind, item: Object, *, force: bool = True, subresource: str = "") -> Object:
        """Server-side apply: makes the object, or makes these fields so. A metadata.resourceVersion in it is a
        precondition. Without `force`, fields that another manager owns are a conflict."""
        applied: Object = self._asker.ask(calls.applying(kind, item, force=force, subresource=subresource))
        return applied

    def patch(
        self,
        kind: Kind,
        name: str,
        namespace: str = "",
        *,
        change: Object | Sequence[Object],
        resource_version: str = "",
        subresource: str = "",
    ) -> Object:
        """A merge patch (a dict) or a JSON patch (a sequence of operations). A conflict where `resource_version` is
        given and the object has changed since."""
        path = calls.path_of(kind, namespace, name, subresource)
        if isinstance(change, dict):
            call = calls.merging(kind, path, change, resource_version)
        else:
            call = calls.editing(kind, path, change, resource_version)
        patched: Object = self._asker.ask(call)
        return patched

    def patch_status(
        self, kind: Kind, name: str, namespace: str = "", *, change: Object, resource_version: str = ""
    ) -> Object:
        return self.patch(kind, name, namespace, change=change, resource_version=resource_version, subresource="status")

    def replace(self, kind: Kind, item: Object, *, subresource: str = "", patience_s: float | None = None) -> Object:
        """Put the whole object in place of the version that it names; a conflict if that is no longer the newest."""
        call = calls.replacing(kind, item, subresource=subresource)
        replaced: Object = self._asker.ask(call, patience_s=patience_s)
        return replaced

    def delete(
        self,
        kind: Kind,
        name: str,
        namespace: str = "",
        *,
        uid: str | None = None,
        resource_version: str | None = None,
        grace_s: int | None = None,
    ) -> Object | None:
        """The object if it still has to end (grace, finalizers); None if it is gone: also where it was gone before,
        or where another one than `uid` has its name. A conflict where it changed since `resource_version`."""
        path = calls.path_of(kind, namespace, name)
        try:
            left: Object = self._asker.ask(
                calls.deleting(kind, path, uid=uid, resource_version=resource_version, grace_s=grace_s)
            )
        except ApiError as error:
            if error.is_missing or (error.is_conflict and uid and self._is_replaced(kind, name, namespace, uid)):
                return None
            raise
        return left if calls.is_ending(left) else None

    def bind(self, pod: Object, node: str) -> None:
        """Give this very pod (its uid) its node. Nothing is to do where it has it; a conflict where it has another."""
        try:
            self._asker.ask(calls.binding(pod, node))
        except ApiError as error:
            if not error.is_conflict:
                raise
            found = self.find(POD, name_of(pod), namespace_of(pod))
            if found is None or uid_of(found) != uid_of(pod) or found["spec"].get("nodeName") != node:
                raise

    def evict(self, pod: Object, *, grace_s: int | None = None) -> Eviction:
        """Ask this very pod (its uid) to leave, as its PodDisruptionBudgets allow. Where another pod has its name, the
        API server takes 10 s to say so (it repeats the attempt in vain)."""
        try:
            self._asker.ask(calls.evicting(pod, grace_s=grace_s))
        except ApiError as error:
            if error.is_budget_refusal:
                return Eviction.REFUSED
            named = name_of(pod), namespace_of(pod)
            if error.is_missing or (error.is_conflict and self._is_replaced(POD, *named, uid_of(pod))):
                return Eviction.MISSING
            raise
        return Eviction.DONE

    def _pages(self, kind: Kind, first: Call, patience_s: float | None) -> Listed:
        items: list[Object] = []
        call = first
        while True:
            page = self._asker.ask(call, patience_s=patience_s)
            items.extend(calls.typed(kind, item) for item in page.get("items") or ())
            following = page["metadata"].get("continue", "")
            if not following:
                return Listed(tuple(items), str(page["metadata"]["resourceVersion"]))
            call = calls.next_page(first, following)

    def _is_replaced(self, kind: Kind, name: str, namespace: str, uid: str) -> bool:
        found = self.find(kind, name, namespace)
        return found is None or uid_of(found) != uid


def connect(
    kubeconfig: str | Path = "",
    *,
    limits: Limits | None = None,
    on_asked: Callable[[Asked], None] = lambda asked: None,
    may_write: Callable[[], bool] = lambda: True,
    rng: Random | None = None,
) -> Cluster:
    """The cluster of `kubeconfig`, else of KUBECONFIG, else the one that this pod runs in. Once `may_write` says no,
    every call that would change something raises FencedError. Raises NoClusterError."""
    limits = limits or Limits()
    connection = Connection(configuration_of(kubeconfig), connect_s=limits.connect_s, read_s=limits.read_s)
    asker = Asker(connection, limits=limits, on_asked=on_asked, may_write=may_write, rng=rng or Random())
    return Cluster(asker, host=connection.host)
