"""Watch: the changes of one kind as the API server tells them, line by line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from scheduler.k8s.api_error import NO_ANSWER, ApiError, error_of_status
from scheduler.k8s.objects import Object

ADDED, MODIFIED, DELETED, BOOKMARK = "ADDED", "MODIFIED", "DELETED", "BOOKMARK"


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """`object` is as it is after the change; of a deleted one its last state, with the version of its deletion. Of a
    bookmark only metadata.resourceVersion counts: all changes up to it have been told."""

    type: str
    object: Object


class Closeable(Protocol):
    def __iter__(self) -> Iterator[bytes]: ...

    def close(self) -> None: ...


class Watch:
    """Iterate in one thread; `close` from any thread ends that."""

    def __init__(self, lines: Closeable) -> None:
        self._lines = lines
        self._events = _events(lines)

    def __iter__(self) -> Iterator[WatchEvent]:
        return self._events

    def close(self) -> None:
        self._lines.close()


def _events(lines: Iterable[bytes]) -> Iterator[WatchEvent]:
    for line in lines:
        try:
            said = json.loads(line)
        except ValueError as error:
            raise ApiError(NO_ANSWER, type(error).__name__, f"not a line of a watch: {line[:80]!r}") from error
        if said["type"] == "ERROR":
            raise error_of_status(said["object"])
        yield WatchEvent(said["type"], said["object"])
