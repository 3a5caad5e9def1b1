"""Notice: the control plane asks a running job to save or to leave, at a step boundary.

All ranks follow a notice at the same step, though each may hear of it at another time.
"""

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


class NoticeAction(StrEnum):
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

    action: NoticeAction
    step: int | None = None
    seconds_left: float | None = None
    request_id: str = ""
    received_at_s: float | None = field(default=None, compare=False)

    @property
    def requires_exit(self) -> bool:
        """Whether the job saves and its ranks exit; otherwise it saves and goes on."""
        return self.action is not NoticeAction.CHECKPOINT

    def is_due(self, step: int) -> bool:
        return self.step is None or self.step <= step


class NoticeSource(Protocol):
    """Somewhere a notice may come from."""

    def poll(self) -> Notice | None: ...


def parse_notice(document: object, *, request_id: str = "") -> Notice:
    """The inverse of the wire form `{"action", "step", "seconds_left"}`.

    Raises:
        ValueError: a field is missing or not what it may be; the message names it.
    """
    if not isinstance(document, Mapping):
        raise ValueError(f"notice: an object is needed, got {type(document).__name__}")
    action = document.get("action")
    if action not in list(NoticeAction):
        raise ValueError(f"notice: action is {action!r}, allowed are {', '.join(NoticeAction)}")
    step = document.get("step")
    if step is not None and (isinstance(step, bool) or not isinstance(step, int)):
        raise ValueError(f"notice: step is {step!r}, it must be a whole number or null")
    return Notice(NoticeAction(action), step, _parse_seconds_left(document), request_id)


def select_most_urgent(notices: Iterable[Notice]) -> Notice | None:
    """The one that asks for most; of two that ask for the same, the one that leaves less time."""
    order = list(NoticeAction)
    return max(notices, key=lambda notice: (order.index(notice.action), -_remaining_s(notice)), default=None)


class NoticeFile:
    """`notice.json` in the run directory; its writer replaces it as a whole, so each has an inode and a time.

    Since when a notice waits is told by the age of the file, but never as before the last look that did not find it:
    a clock that differs from the file system's errs by no more than the time between two looks.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._checked_at_s = time.monotonic()
        self._version = ""
        self._notice: Notice | None = None

    def poll(self) -> Notice | None:
        looked_before_s, self._checked_at_s = self._checked_at_s, time.monotonic()
        try:
            facts = self._path.stat()
        except FileNotFoundError:
            self._version, self._notice = "", None
            return None
        version = f"file:{facts.st_ino}:{facts.st_mtime_ns}:{facts.st_size}"
        if version != self._version:
            self._version, notice = version, self._read(version)
            age_s = max(0.0, time.time() - facts.st_mtime)
            since_s = max(looked_before_s, self._checked_at_s - age_s)
            self._notice = None if notice is None else replace(notice, received_at_s=since_s)
        return self._notice

    def _read(self, version: str) -> Notice | None:
        try:
            return parse_notice(json.loads(self._path.read_text(encoding="utf-8")), request_id=version)
        except FileNotFoundError:
            return None
        except ValueError as wrong:
            # A mistyped notice must not end the training that it was meant to save.
            logger.error("%s is not followed: %s", self._path, wrong)
            return None


class TerminationSignal:
    """SIGTERM means leave. The handler only notes it: training stops at a step boundary, never inside a collective."""

    def __init__(self) -> None:
        self._received_at_s: float | None = None
        self._previous_handler = signal.signal(signal.SIGTERM, self._record)

    def poll(self) -> Notice | None:
        return (
            None
            if self._received_at_s is None
            else Notice(NoticeAction.LEAVE, request_id="signal", received_at_s=self._received_at_s)
        )

    def close(self) -> None:
        signal.signal(signal.SIGTERM, self._previous_handler)

    def _record(self, _number: int, _frame: FrameType | None) -> None:
        self._received_at_s = time.monotonic() if self._received_at_s is None else self._received_at_s


class CheckpointInterval:
    """A checkpoint is due whenever the last one is so old: asked for once in each interval, followed or not."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._started_at_s = time.monotonic()

    def restart(self) -> None:
        """All that was done is safe now."""
        self._started_at_s = time.monotonic()

    def poll(self) -> Notice | None:
        passed = int((time.monotonic() - self._started_at_s) / self._interval_s)
        return Notice(NoticeAction.CHECKPOINT, request_id=f"interval:{self._started_at_s}:{passed}") if passed else None


class NoticeMonitor:
    """What all sources say together. A request to checkpoint is followed once, a request to leave stands."""

    def __init__(self, sources: Iterable[NoticeSource]) -> None:
        self._sources = tuple(sources)
        self._acknowledged: set[str] = set()

    def next_due(self, step: int) -> Notice | None:
        """The most urgent notice to follow now that `step` steps are done."""
        return select_most_urgent(self._find_due(step))

    def acknowledge(self, step: int) -> None:
        """Marks the due checkpoint requests as followed, those included that only other ranks had seen."""
        self._acknowledged.update(notice.request_id for notice in self._find_due(step) if not notice.requires_exit)

    def _find_due(self, step: int) -> list[Notice]:
        heard = [source.poll() for source in self._sources]
        return [n for n in heard if n is not None and n.is_due(step) and n.request_id not in self._acknowledged]


def _parse_seconds_left(document: Mapping[str, Any]) -> float | None:
    seconds = document.get("seconds_left")
    if seconds is None:
        return None
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or seconds != seconds:
        raise ValueError(f"notice: seconds_left is {seconds!r}, it must be a number or null")
    return float(seconds)


def _remaining_s(notice: Notice) -> float:
    return float("inf") if notice.seconds_left is None else notice.seconds_left


_NO_DEADLINE_MS = -(2**62)


def agree_on_notice(notice: Notice | None, *, device: str) -> Notice | None:
    """The most urgent action that any rank knows, with the shortest time left. Collective: every rank calls it.

    Two integers per rank go through one all-reduce (MAX), so the answer is the same on every rank.

    Raises:
        ValueError: there is no process group yet.
    """
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        raise ValueError("the ranks cannot agree on a notice before init_process_group()")
    actions = list(NoticeAction)
    # A rank without a notice offers 0; the time is negated, so that the maximum is the shortest.
    urgency = 0 if notice is None else 1 + actions.index(notice.action)
    known = torch.tensor([urgency, _encode_deadline_ms(notice)], dtype=torch.int64, device=device)
    dist.all_reduce(known, op=dist.ReduceOp.MAX)
    urgency, negative_ms = (int(value) for value in known.tolist())
    if urgency == 0:
        return None
    return Notice(actions[urgency - 1], seconds_left=None if negative_ms == _NO_DEADLINE_MS else -negative_ms / 1000)


def _encode_deadline_ms(notice: Notice | None) -> int:
    if notice is None or notice.seconds_left is None:
        return _NO_DEADLINE_MS
    return -round(min(notice.seconds_left, 1e9) * 1000)
