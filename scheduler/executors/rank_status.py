"""RankStatus: what one rank says of itself in its status file, as the executor reads it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from scheduler.domain.observation import FailureCause
from scheduler.domain.replan import LoadTraffic, ReplanPhase


class RankPhase(StrEnum):
    STARTING = "starting"
    RUNNING = "running"
    SAVING = "saving"
    LEFT = "left"
    SUCCEEDED = "succeeded"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class RankStatus:
    """`written_at_ns` is the file's own time, good for telling which of two ranks spoke first. `memory_events` is the
    file in which the kernel counts whom it kills for memory in this rank's control group, `oom_kills` that count when
    the rank last wrote. `frozen_layers` is None where the script says nothing of them, `traffic` where it says
    nothing of what it read of a checkpoint."""

    phase: RankPhase
    step: int = 0
    checkpoint_step: int | None = None
    loss: float | None = None
    reason: str = ""
    written_at_ns: int = 0
    cause: FailureCause | None = None
    samples_per_s: float | None = None
    peak_bytes: int | None = None
    phases_s: Mapping[str, float] = field(default_factory=dict)
    memory_events: str = ""
    oom_kills: int | None = None
    frozen_layers: int | None = None
    traffic: LoadTraffic | None = None

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
    cause = document.get("cause") or None
    if cause is not None and cause not in list(FailureCause):
        raise ValueError(f"cause is {cause!r}, allowed are {', '.join(FailureCause)}")
    return RankStatus(
        phase=RankPhase(phase),
        step=_number(document, "step", int) or 0,
        checkpoint_step=_number(document, "checkpoint_step", int),
        loss=_number(document, "loss", int, float),
        reason=str(document.get("reason") or ""),
        written_at_ns=written_at_ns,
        cause=None if cause is None else FailureCause(cause),
        samples_per_s=_number(document, "samples_per_s", int, float),
        peak_bytes=_number(document, "peak_bytes", int),
        phases_s=_phases_s(document),
        memory_events=str(document.get("memory_events") or ""),
        oom_kills=_number(document, "oom_kills", int),
        frozen_layers=_number(document, "frozen_layers", int),
        traffic=_traffic(document),
    )


def _phases_s(document: Mapping[str, Any]) -> Mapping[str, float]:
    phases_s = document.get("phases_s") or {}
    if not isinstance(phases_s, Mapping) or not phases_s.keys() <= set(ReplanPhase):
        raise ValueError(f"phases_s is {phases_s!r}, allowed are seconds by {', '.join(ReplanPhase)}")
    return {phase: float(_number(phases_s, phase, int, float) or 0.0) for phase in phases_s}


def _traffic(document: Mapping[str, Any]) -> LoadTraffic | None:
    counts = document.get("traffic")
    if counts is None:
        return None
    names = [field.name for field in fields(LoadTraffic)]
    if not isinstance(counts, Mapping) or not counts.keys() <= set(names):
        raise ValueError(f"traffic is {counts!r}, allowed are bytes by {', '.join(names)}")
    return LoadTraffic(**{name: _number(counts, name, int) or 0 for name in names})


def _number(document: Mapping[str, Any], name: str, *kinds: type) -> Any:
    value = document.get(name)
    if value is None or (isinstance(value, kinds) and not isinstance(value, bool) and value == value):
        return value
    raise ValueError(f"{name} is {value!r}, it must be a number or null")
