"""Parsing of rank statuses, from files and from agent reports."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from scheduler.domain.job_records import LoadTraffic, ReplanPhase
from scheduler.domain.observation import FailureCause, RankPhase, RankStatus

_COUNT_MAX = 2**63 - 1
_NUMBER_MAX = sys.float_info.max
_SHOWN_MAX_LENGTH = 60


def read_rank_status(path: Path) -> RankStatus | None:
    """Read a status file. None if it does not exist.

    Raises:
        ValueError: the file is invalid; the message names file and field.
    """
    try:
        with path.open(encoding="utf-8") as file:
            written_at_ns = os.fstat(file.fileno()).st_mtime_ns
            document = json.load(file)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(document, Mapping):
        raise ValueError(f"{path}: got {type(document).__name__}; a JSON object is required")
    try:
        return parse_rank_status(document, written_at_ns)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def parse_rank_status(document: Mapping[str, Any], written_at_ns: int) -> RankStatus:
    """Parse a status document that was written at `written_at_ns`.

    Raises:
        ValueError: the document is invalid; the message names the field.
    """
    phase = document.get("phase")
    if phase not in list(RankPhase):
        raise ValueError(f"phase is {phase!r}; it must be one of {', '.join(RankPhase)}")
    cause = document.get("cause") or None
    if cause is not None and cause not in list(FailureCause):
        raise ValueError(f"cause is {cause!r}; it must be one of {', '.join(FailureCause)}")
    return RankStatus(
        phase=RankPhase(phase),
        step=_parse_count(document, "step") or 0,
        checkpoint_step=_parse_count(document, "checkpoint_step"),
        loss=_parse_number(document, "loss"),
        reason=to_plain_text(document.get("reason") or ""),
        written_at_ns=min(max(written_at_ns, 0), _COUNT_MAX),  # the owner of a file can set any time
        cause=None if cause is None else FailureCause(cause),
        samples_per_s=_parse_number(document, "samples_per_s"),
        peak_bytes=_parse_count(document, "peak_bytes"),
        phases_s=_parse_phases_s(document),
        memory_events=to_plain_text(document.get("memory_events") or ""),
        oom_kills=_parse_count(document, "oom_kills", minimum=-_COUNT_MAX),  # only compared with a later value
        frozen_layers=_parse_count(document, "frozen_layers"),
        traffic=_parse_traffic(document),
        probe_s=_parse_number(document, "probe_s"),
        awaits_exit_code=document.get("awaits_exit_code") is True,
    )


def to_plain_text(value: object) -> str:
    """Return text that a rank has written, without characters that paths, databases or UTF-8 do not admit."""
    return str(value).replace("\0", "\ufffd").encode("utf-8", "replace").decode("utf-8")


def _parse_phases_s(document: Mapping[str, Any]) -> Mapping[str, float]:
    phases_s = document.get("phases_s") or {}
    if not isinstance(phases_s, Mapping) or not phases_s.keys() <= set(ReplanPhase):
        raise ValueError(f"phases_s is {phases_s!r}; it must map {', '.join(ReplanPhase)} to seconds")
    return {phase: _parse_number(phases_s, phase) or 0.0 for phase in phases_s}


def _parse_traffic(document: Mapping[str, Any]) -> LoadTraffic | None:
    counts = document.get("traffic")
    if counts is None:
        return None
    names = [field.name for field in fields(LoadTraffic)]
    if not isinstance(counts, Mapping) or not counts.keys() <= set(names):
        raise ValueError(f"traffic is {counts!r}; it must map {', '.join(names)} to bytes")
    return LoadTraffic(**{name: _parse_count(counts, name) or 0 for name in names})


def _parse_count(document: Mapping[str, Any], name: str, *, minimum: int = 0) -> int | None:
    value = document.get(name)
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and minimum <= value <= _COUNT_MAX):
        return value
    allowed = f"a whole number from {minimum} to {_COUNT_MAX}, or null"
    raise ValueError(f"{name} is {value!r:.{_SHOWN_MAX_LENGTH}}; it must be {allowed}")


def _parse_number(document: Mapping[str, Any], name: str) -> float | None:
    value = document.get(name)
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _NUMBER_MAX):
        return None if value is None else float(value)
    raise ValueError(f"{name} is {value!r:.{_SHOWN_MAX_LENGTH}}; it must be a finite number or null")
