"""The end of a log, for people."""

from __future__ import annotations

from pathlib import Path

_TAIL_BYTES = 4096
_TAIL_LINES = 5


def tail(log: Path) -> str:
    """The last lines of a log as one line for people; empty where there is nothing."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        lines = file.read().decode("utf-8", "replace").splitlines()
    return " | ".join([line.strip() for line in lines if line.strip()][-_TAIL_LINES:])
