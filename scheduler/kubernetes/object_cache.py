"""ObjectCache: a local copy of one resource kind, fed by a watch and by the responses to our own writes.

The watch delivers all changes in order, but late. Responses to our writes arrive at once, but in any order.
`resource_version` is the version up to which the watch has delivered everything. A response that is not newer adds
nothing: if its object is missing here, it was deleted since. A newer response is stored ahead of the watch. Uids of
objects known to be deleted are remembered until the watch confirms the deletion.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from scheduler.kubernetes.api_objects import (
    Object,
    ObjectKey,
    ResourceKind,
    key_of,
    labels_of,
    strip_managed_fields,
    uid_of,
    version_of,
)
from scheduler.kubernetes.client import BOOKMARK, DELETED, ObjectList, WatchEvent


class ObjectCache:
    """A cache of one resource kind, without managedFields. Thread-safe; callers must not modify the objects.

    Args:
        indexed_labels: labels that `list_by_label` supports.
        transform: reduces an object before it is stored, keeping at least name, uid, version and labels. Thousands of
        full
        pods would take hundreds of megabytes.
        on_change: called without the lock, by the thread that brought the change.
    """

    def __init__(
        self,
        kind: ResourceKind,
        *,
        namespace: str = "",
        label_selector: str = "",
        field_selector: str = "",
        indexed_labels: Iterable[str] = (),
        transform: Callable[[Object], Object] = strip_managed_fields,
        on_change: Callable[[ObjectKey], None] = lambda key: None,
    ) -> None:
        self.kind = kind
        self.namespace = namespace
        self.label_selector = label_selector
        self.field_selector = field_selector
        self._transform = transform
        self._on_change = on_change
        self._lock = threading.Lock()
        self._synced = threading.Event()
        self._objects: dict[ObjectKey, Object] = {}
        self._index: dict[str, dict[str, set[ObjectKey]]] = {label: {} for label in indexed_labels}
        self._gone_uids: set[str] = set()
        self._version = 0
        self._changes = 0
        self._snapshot: Mapping[ObjectKey, Object] | None = None

    @property
    def has_synced(self) -> bool:
        """Whether a complete list has been stored."""
        return self._synced.is_set()

    @property
    def resource_version(self) -> int:
        """The version up to which the watch has delivered everything."""
        with self._lock:
            return self._version

    @property
    def change_count(self) -> int:
        """A counter that grows with every change."""
        with self._lock:
            return self._changes

    def wait_for_sync(self, timeout_s: float) -> bool:
        return self._synced.wait(timeout_s)

    def __len__(self) -> int:
        with self._lock:
            return len(self._objects)

    def get(self, name: str, namespace: str = "") -> Object | None:
        with self._lock:
            return self._objects.get((namespace, name))

    def snapshot(self) -> Mapping[ObjectKey, Object]:
        """Return all objects at one moment. The copy is made once per change."""
        with self._lock:
            if self._snapshot is None:
                self._snapshot = MappingProxyType(dict(self._objects))
            return self._snapshot

    def list_by_label(self, label: str, value: str) -> tuple[Object, ...]:
        """Return the objects whose indexed `label` has this value, ordered by key."""
        with self._lock:
            return tuple(self._objects[key] for key in sorted(self._index[label].get(value, ())))

    def replace(self, listed: ObjectList) -> None:
        """Store a complete list. Objects missing in it are removed, unless they were written after the list was made.

        Lists are quorum reads. A list older than known versions means that etcd was restored from a backup.
        """
        version = int(listed.resource_version)
        uids = {uid_of(item) for item in listed.items}
        with self._lock:
            is_restored = version < self._version
            missing = [
                key
                for key, held in self._objects.items()
                if is_restored or (uid_of(held) not in uids and version_of(held) <= version)
            ]
            for key in missing:
                self._remove(key)
            changed = [key_of(item) for item in listed.items if self._store(item)]
            self._version = version
            self._gone_uids &= uids
        self._synced.set()
        self._notify([*missing, *changed])

    def handle_event(self, event: WatchEvent) -> None:
        """Store a change from the watch."""
        version = version_of(event.object)
        key, changed = ("", ""), False
        with self._lock:
            if event.type != BOOKMARK:
                key = key_of(event.object)
                changed = (
                    self._handle_deletion(event.object, version) if event.type == DELETED else self._store(event.object)
                )
            self._version = max(self._version, version)
        if changed:
            self._notify([key])

    def assume(self, item: Object) -> None:
        """Store the response to our own write, so that it is visible at once."""
        with self._lock:
            changed = version_of(item) > self._version and self._store(item)
        if changed:
            self._notify([key_of(item)])

    def assume_deleted(self, item: Object) -> None:
        """Remove the object with this uid, known to be deleted. Late watch events do not bring it back."""
        key, uid = key_of(item), uid_of(item)
        with self._lock:
            held = self._objects.get(key)
            changed = held is not None and uid_of(held) == uid
            if changed:
                self._remove(key)
                self._gone_uids.add(uid)
        if changed:
            self._notify([key])

    def _store(self, item: Object) -> bool:
        key = key_of(item)
        held = self._objects.get(key)
        if uid_of(item) in self._gone_uids or (held is not None and version_of(held) >= version_of(item)):
            return False
        if held is not None:
            self._remove(key)
        self._objects[key] = self._transform(item)
        for label, keys_by_value in self._index.items():
            value = labels_of(item).get(label)
            if value is not None:
                keys_by_value.setdefault(value, set()).add(key)
        self._note_change()
        return True

    def _handle_deletion(self, item: Object, version: int) -> bool:
        """Remove an object that the watch reports as deleted, or as no longer matching the selector."""
        self._gone_uids.discard(uid_of(item))
        held = self._objects.get(key_of(item))
        if held is None or version_of(held) > version:
            return False
        self._remove(key_of(item))
        return True

    def _remove(self, key: ObjectKey) -> None:
        item = self._objects.pop(key)
        for label, keys_by_value in self._index.items():
            value = labels_of(item).get(label)
            if value is not None:
                keys_by_value[value].discard(key)
                if not keys_by_value[value]:
                    del keys_by_value[value]
        self._note_change()

    def _note_change(self) -> None:
        self._changes += 1
        self._snapshot = None

    def _notify(self, keys: Iterable[ObjectKey]) -> None:
        for key in keys:
            self._on_change(key)
