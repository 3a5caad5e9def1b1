"""RankStatus: what one rank says of itself in its status file, as the executor reads it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any


class RankPhase(StrEnum):
    STARTING = "starting"
    RUNNING = "running"
    SAVING = "saving"
    LEFT = "left"
    SUCCEEDED = "succeeded"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class RankStatus:
    """`written_at_ns` is the file's own time, good for telling which of two ranks spoke first."""

    phase: RankPhase
    step: int = 0
    checkpoint_step: int | None = None
    loss: float | None = None
    reason: str = ""
    written_at_ns: int = 0

    @property
    def is_good_end(self) -> bool:
        return self.phase in (RankPhase.LEFT, RankPhase.SUCCEEDED)

    @property
    def is_end(self) -> bool:
        return self.is_good_end or self.phase is RankPhase.FAILED

    @property
    def has_begun(self) -> bool:
        """Its step is a measurement: the state was in place."""
        return self.phase not in (RankPhase.STARTING, RankPhase.FAILED) or self.step > 0


def read_rank_status(path: Path) -> RankStatus | None:
    """The status in a file; None where there is none.

    Raises:
        ValueError: the file is not what a status may be; the message names the file and the field.
    """
    try:
        with path.open(encoding="utf-8") as file:
            written_at_ns = os.fstat(file.fileno()).st_mtime_ns
            document = json.load(file)
    except FileNotFoundError:
        return None
    except ValueError as wrong:
        raise ValueError(f"{path}: {wrong}") from None
    if not isinstance(document, Mapping):
        raise ValueError(f"{path}: an object is needed, got {type(document).__name__}")
    try:
        return _status(document, written_at_ns)
    except ValueError as wrong:
        raise ValueError(f"{path}: {wrong}") from None


def _status(document: Mapping[str, Any], written_at_ns: int) -> RankStatus:
    phase = document.get("phase")
    if phase not in list(RankPhase):
        raise ValueError(f"phase is {phase!r}, allowed are {', '.join(RankPhase)}")
    return RankStatus(
        phase=RankPhase(phase),
        step=_number(document, "step", int) or 0,
        checkpoint_step=_number(document, "checkpoint_step", int),
        loss=_number(document, "loss", int, float),
        reason=str(document.get("reason") or ""),
        written_at_ns=written_at_ns,
    )


def _number(document: Mapping[str, Any], name: str, *kinds: type) -> Any:
    value = document.get(name)
    if value is None or (isinstance(value, kinds) and not isinstance(value, bool) and value == value):
        return value
    raise ValueError(f"{name} is {value!r}, it must be a number or null")
