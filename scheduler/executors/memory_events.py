"""How many processes of a control group the kernel has killed for memory, by the group's own file."""

from __future__ import annotations

from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def oom_kills(path: str, *, below: Path = _CGROUPS) -> int | None:
    """The `oom_kill` count in memory.events (cgroup v2) or memory.oom_control (v1); None where it cannot be read.

    `path` comes from a worker, so nothing outside `below` is opened. The kernel counts before the process is gone.
    """
    if not path or not Path(path).resolve().is_relative_to(below):
        return None
    try:
        lines = Path(path).read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    counts = dict(line.split()[:2] for line in lines if len(line.split()) > 1)
    text = counts.get("oom_kill", "")
    return int(text) if text.isdigit() else None
