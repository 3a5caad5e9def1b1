"""Notices: the control plane asks a running job to save or to leave at a step boundary.

Each rank may receive a notice at another time, so the ranks agree on the step boundary at which all of them act on it.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

logger = logging.getLogger(__name__)

_NO_DEADLINE_MS = -(2**62)
_AGREEMENT_PERIOD_S, _BOUNDARIES_MAX = 0.5, 25
FILE_PERIOD_S = 0.05  # a system call after each short step would be most of what the session costs


class NoticeAction(str, Enum):
    """The actions that a notice can request, from the least to the most urgent."""

    CHECKPOINT = "checkpoint"
    REPLAN = "replan"
    LEAVE = "leave"

    __str__ = str.__str__


@dataclass(frozen=True)
class Notice:
    """A request to save or to leave.

    Attributes:
        step: act on the notice after this many steps; None means the next step boundary.
        seconds_left: time until the deadline, None without one.
        request_id: distinguishes requests, so that each is acted on once.
        received_at_s: when it was written or received, on this process's monotonic clock.
    """

    action: NoticeAction
    step: int | None = None
    seconds_left: float | None = None
    request_id: str = ""
    received_at_s: float | None = field(default=None, compare=False)

    @property
    def requires_exit(self) -> bool:
        """Whether the ranks save and exit. Otherwise they save and continue."""
        return self.action is not NoticeAction.CHECKPOINT

    def is_due(self, step: int) -> bool:
        """Return whether to act on the notice after `step` completed steps."""
        return self.step is None or self.step <= step


class NoticeSource(Protocol):
    """A source of notices."""

    def poll(self) -> Notice | None:
        """Return the present notice without waiting, or None."""
        ...


def parse_notice(document: object, *, request_id: str = "") -> Notice:
    """Return the notice of the JSON object `{"action", "step", "seconds_left"}`.

    Raises:
        ValueError: a field is missing or malformed; the message names it.
    """
    if not isinstance(document, Mapping):
        raise ValueError(f"notice: expected a JSON object, got {type(document).__name__}.")
    action = document.get("action")
    if action not in list(NoticeAction):
        raise ValueError(f"notice: `action` is {action!r}. Accepted values: {', '.join(NoticeAction)}.")
    step = document.get("step")
    if step is not None and (isinstance(step, bool) or not isinstance(step, int)):
        raise ValueError(f"notice: `step` is {step!r}. Use an integer or null.")
    return Notice(NoticeAction(action), step, _parse_seconds_left(document), request_id)


def select_most_urgent(notices: Iterable[Notice]) -> Notice | None:
    """Return the notice with the most urgent action; among equals, the one with the earliest deadline."""
    order = list(NoticeAction)
    return max(notices, key=lambda notice: (order.index(notice.action), -_remaining_s(notice)), default=None)


class NoticeFile:
    """The file `notice.json` in the run directory, which its writer replaces as a whole.

    The file is looked at once per `FILE_PERIOD_S` at most. `received_at_s` follows from the age of the file, but is
    never before the last look that did not find it. If the clock of the file system is off, the error is therefore at
    most the time between two looks.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._name = str(path)
        self._checked_at_s = time.monotonic()
        self._next_check_s = self._checked_at_s
        self._version = ""
        self._notice: Notice | None = None

    def poll(self) -> Notice | None:
        now_s = time.monotonic()
        if now_s < self._next_check_s:
            return self._notice
        self._next_check_s = now_s + FILE_PERIOD_S
        previous_check_s, self._checked_at_s = self._checked_at_s, now_s
        if not os.access(self._name, os.F_OK):  # cheaper than an exception
            self._version, self._notice = "", None
            return None
        try:
            stat = self._path.stat()
        except FileNotFoundError:
            self._version, self._notice = "", None
            return None
        version = f"file:{stat.st_ino}:{stat.st_mtime_ns}:{stat.st_size}"
        if version != self._version:
            self._version, notice = version, self._read(version)
            age_s = max(0.0, time.time() - stat.st_mtime)
            received_at_s = max(previous_check_s, self._checked_at_s - age_s)
            self._notice = None if notice is None else replace(notice, received_at_s=received_at_s)
        return self._notice

    def _read(self, version: str) -> Notice | None:
        try:
            return parse_notice(json.loads(self._path.read_text(encoding="utf-8")), request_id=version)
        except FileNotFoundError:
            return None
        except ValueError as error:
            # A malformed notice must not end the training that it was meant to save.
            logger.error("Ignoring %s: %s", self._path, error)
            return None


class TerminationSignal:
    """SIGTERM as a request to leave.

    The handler only records the signal. Training stops at a step boundary, never inside a collective.
    """

    def __init__(self) -> None:
        self._received_at_s: float | None = None
        self._previous_handler = signal.signal(signal.SIGTERM, self._record)

    def poll(self) -> Notice | None:
        if self._received_at_s is None:
            return None
        return Notice(NoticeAction.LEAVE, request_id="signal", received_at_s=self._received_at_s)

    def close(self) -> None:
        signal.signal(signal.SIGTERM, self._previous_handler)

    def _record(self, _number: int, _frame: FrameType | None) -> None:
        self._received_at_s = time.monotonic() if self._received_at_s is None else self._received_at_s


class CheckpointInterval:
    """Request a checkpoint once per interval, counted from the last checkpoint."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._started_at_s = time.monotonic()

    def restart(self) -> None:
        """Start a new interval after a save."""
        self._started_at_s = time.monotonic()

    def poll(self) -> Notice | None:
        elapsed = int((time.monotonic() - self._started_at_s) / self._interval_s)
        if not elapsed:
            return None
        return Notice(NoticeAction.CHECKPOINT, request_id=f"interval:{self._started_at_s}:{elapsed}")


class NoticeMonitor:
    """Combine the notices of all sources. A checkpoint request is acted on once; a request to leave persists."""

    def __init__(self, sources: Iterable[NoticeSource]) -> None:
        self._sources = tuple(sources)
        self._acknowledged: set[str] = set()

    def next_due(self, step: int) -> Notice | None:
        """Return the most urgent notice that is due after `step` steps, or None."""
        due = self._find_due(step)
        return select_most_urgent(due) if due else None

    def acknowledge(self, step: int) -> None:
        """Mark the due checkpoint requests as done, including those that only other ranks had received."""
        self._acknowledged.update(notice.request_id for notice in self._find_due(step) if not notice.requires_exit)

    def _find_due(self, step: int) -> list[Notice]:
        due = []
        for source in self._sources:
            notice = source.poll()
            if notice is not None and notice.is_due(step) and notice.request_id not in self._acknowledged:
                due.append(notice)
        return due


def _parse_seconds_left(document: Mapping[str, Any]) -> float | None:
    seconds = document.get("seconds_left")
    if seconds is None:
        return None
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or seconds != seconds:
        raise ValueError(f"notice: `seconds_left` is {seconds!r}. Use a number or null.")
    return float(seconds)


def _remaining_s(notice: Notice) -> float:
    return float("inf") if notice.seconds_left is None else notice.seconds_left


@dataclass(frozen=True)
class Agreement:
    """What the ranks agreed on at a step boundary.

    Attributes:
        notice: the most urgent action that any rank knew, with the least time left.
        wants_probe: whether any rank wanted a speed probe.
        boundaries: after how many more step boundaries the ranks agree again.
    """

    notice: Notice | None
    wants_probe: bool
    boundaries: int


class AgreementPace:
    """How often the ranks agree: about every 0.5 s, because each agreement waits for all ranks and costs 1 ms of CPU.

    25 boundaries are the most, so that a training whose steps become slower notices that soon.
    """

    def __init__(self) -> None:
        self._agreed_at_s = time.monotonic()
        self._interval = self._left = 1

    def is_due(self) -> bool:
        """Count a step boundary, and return whether the ranks agree at it. The same on all ranks."""
        self._left -= 1
        return self._left <= 0

    def propose(self) -> int:
        """Return the next interval in step boundaries, from the time of the last one on this rank."""
        now_s = time.monotonic()
        boundary_s = (now_s - self._agreed_at_s) / self._interval
        self._agreed_at_s = now_s
        return max(1, min(_BOUNDARIES_MAX, int(_AGREEMENT_PERIOD_S / max(boundary_s, 1e-9))))

    def restart(self, boundaries: int) -> None:
        """Begin the interval that the ranks agreed on."""
        self._interval = self._left = boundaries


def build_notice_group() -> ProcessGroup | None:
    """Return the process group in which the ranks agree on notices; None is the default group. Collective.

    The group exchanges messages on the CPU. On the GPU each poll would wait for all kernels that the step has launched.

    Raises:
        ValueError: there is no process group yet.
    """
    import torch.distributed as dist

    if not dist.is_initialized():
        raise ValueError("Ranks cannot agree on a notice without a process group. Call init_process_group() first.")
    # The configuration is such as "cpu:gloo,cuda:nccl".
    return None if "cpu:" in dist.get_backend_config() else dist.new_group(backend="gloo")


def agree_on_notice(
    notice: Notice | None, *, group: ProcessGroup | None, wants_probe: bool, boundaries: int = 1
) -> Agreement:
    """Return what the ranks agree on.

    Collective: every rank must call it. One all-reduce (MAX) of four integers gives the same result on every rank.

    Args:
        group: the group of `build_notice_group`.
        boundaries: proposed number of step boundaries until the next agreement. The largest proposal counts.
    """
    import torch
    import torch.distributed as dist

    actions = list(NoticeAction)
    # A rank without a notice contributes 0. The time is negated, so that the maximum is the shortest time.
    urgency = 0 if notice is None else 1 + actions.index(notice.action)
    proposal = [urgency, _encode_deadline_ms(notice), int(wants_probe), boundaries]
    values = torch.tensor(proposal, dtype=torch.int64)
    dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)
    urgency, negative_ms, probes, boundaries = (int(value) for value in values.tolist())
    agreed = None
    if urgency:
        seconds_left = None if negative_ms == _NO_DEADLINE_MS else -negative_ms / 1000
        agreed = Notice(actions[urgency - 1], seconds_left=seconds_left)
    return Agreement(agreed, bool(probes), boundaries)


def _encode_deadline_ms(notice: Notice | None) -> int:
    if notice is None or notice.seconds_left is None:
        return _NO_DEADLINE_MS
    return -round(min(notice.seconds_left, 1e9) * 1000)
