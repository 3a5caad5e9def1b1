"""What one rank says of itself, as executors read it: its file, or the same document that came over the network."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from scheduler.domain.observation import FailureCause
from scheduler.domain.rank_status import RankPhase, RankStatus
from scheduler.domain.replan import LoadTraffic, ReplanPhase


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
        return rank_status(document, written_at_ns)
    except ValueError as wrong:
        raise ValueError(f"{path}: {wrong}") from None


def rank_status(document: Mapping[str, Any], written_at_ns: int) -> RankStatus:
    """The status in a document that was written then.

    Raises:
        ValueError: it is not what a status may be; the message names the field.
    """
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
