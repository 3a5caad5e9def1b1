"""Notice: the control plane asks a running job to save or to leave, at a step boundary."""

from __future__ import annotations

import json
import logging
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

logger = logging.getLogger(__name__)


class Action(StrEnum):
    """From the least to the most urgent."""

    CHECKPOINT = "checkpoint"
    REPLAN = "replan"
    LEAVE = "leave"


@dataclass(frozen=True, slots=True)
class Notice:
    """`step`: follow it once this many steps are done (None: at the next boundary).

    `request` tells one request from the next, so that each is followed once. `since_s`: when it was written or heard,
    on the monotonic clock of this process.
    """

    action: Action
    step: int | None = None
    seconds_left: float | None = None
    request: str = ""
    since_s: float | None = field(default=None, compare=False)

    @property
    def leaves(self) -> bool:
        """Whether the job saves and its ranks exit; otherwise it saves and goes on."""
        return self.action is not Action.CHECKPOINT

    def is_due(self, step: int) -> bool:
        return self.step is None or self.step <= step


class NoticeSource(Protocol):
    """Somewhere a notice may come from."""

    def pending(self) -> Notice | None: ...


def notice_from_json(document: object, *, request: str = "") -> Notice:
    """The inverse of the wire form `{"action", "step", "seconds_left"}`.

    Raises:
        ValueError: a field is missing or not what it may be; the message names it.
    """
    if not isinstance(document, Mapping):
        raise ValueError(f"notice: an object is needed, got {type(document).__name__}")
    action = document.get("action")
    if action not in list(Action):
        raise ValueError(f"notice: action is {action!r}, allowed are {', '.join(Action)}")
    step = document.get("step")
    if step is not None and (isinstance(step, bool) or not isinstance(step, int)):
        raise ValueError(f"notice: step is {step!r}, it must be a whole number or null")
    return Notice(Action(action), step, _seconds(document), request)


def most_urgent(notices: Iterable[Notice]) -> Notice | None:
    """The one that asks for most; of two that ask for the same, the one that leaves less time."""
    order = list(Action)
    return max(notices, key=lambda notice: (order.index(notice.action), -_time_left(notice)), default=None)


class NoticeFile:
    """`notice.json` in the run directory; its writer replaces it as a whole, so each has an inode and a time.

    Since when a notice waits is told by the age of the file, but never as before the last look that did not find it:
    a clock that differs from the file system's errs by no more than the time between two looks.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._looked_s = time.monotonic()
        self._version = ""
        self._notice: Notice | None = None

    def pending(self) -> Notice | None:
        looked_before_s, self._looked_s = self._looked_s, time.monotonic()
        try:
            facts = self._path.stat()
        except FileNotFoundError:
            self._version, self._notice = "", None
            return None
        version = f"file:{facts.st_ino}:{facts.st_mtime_ns}:{facts.st_size}"
        if version != self._version:
            self._version, notice = version, self._read(version)
            age_s = max(0.0, time.time() - facts.st_mtime)
            since_s = max(looked_before_s, self._looked_s - age_s)
            self._notice = None if notice is None else replace(notice, since_s=since_s)
        return self._notice

    def _read(self, version: str) -> Notice | None:
        try:
            return notice_from_json(json.loads(self._path.read_text(encoding="utf-8")), request=version)
        except FileNotFoundError:
            return None
        except ValueError as wrong:
            # A mistyped notice must not end the training that it was meant to save.
            logger.error("%s is not followed: %s", self._path, wrong)
            return None


class TerminationSignal:
    """SIGTERM means leave. The handler only notes it: training stops at a step boundary, never inside a collective."""

    def __init__(self) -> None:
        self._told_s: float | None = None
        self._before = signal.signal(signal.SIGTERM, self._note)

    def pending(self) -> Notice | None:
        return None if self._told_s is None else Notice(Action.LEAVE, request="signal", since_s=self._told_s)

    def close(self) -> None:
        signal.signal(signal.SIGTERM, self._before)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self._told_s = time.monotonic() if self._told_s is None else self._told_s


class SaveInterval:
    """A checkpoint is due whenever the last one is so old: asked for once in each interval, followed or not."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._since_s = time.monotonic()

    def begin(self) -> None:
        """All that was done is safe now."""
        self._since_s = time.monotonic()

    def pending(self) -> Notice | None:
        passed = int((time.monotonic() - self._since_s) / self._interval_s)
        return Notice(Action.CHECKPOINT, request=f"interval:{self._since_s}:{passed}") if passed else None


class NoticeBoard:
    """What all sources say together. A request to checkpoint is followed once, a request to leave stands."""

    def __init__(self, sources: Iterable[NoticeSource]) -> None:
        self._sources = tuple(sources)
        self._settled: set[str] = set()

    def due(self, step: int) -> Notice | None:
        """The most urgent notice to follow now that `step` steps are done."""
        return most_urgent(self._all_due(step))

    def settle(self, step: int) -> None:
        """Marks the due checkpoint requests as followed, those included that only other ranks had seen."""
        self._settled.update(notice.request for notice in self._all_due(step) if not notice.leaves)

    def _all_due(self, step: int) -> list[Notice]:
        heard = [source.pending() for source in self._sources]
        return [n for n in heard if n is not None and n.is_due(step) and n.request not in self._settled]


def _seconds(document: Mapping[str, Any]) -> float | None:
    seconds = document.get("seconds_left")
    if seconds is None:
        return None
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or seconds != seconds:
        raise ValueError(f"notice: seconds_left is {seconds!r}, it must be a number or null")
    return float(seconds)


def _time_left(notice: Notice) -> float:
    return float("inf") if notice.seconds_left is None else notice.seconds_left
