"""The processes of a run as the kernel describes them below /proc, from the machine's process namespace."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_LAUNCHERS = frozenset({
    "torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate", "accelerate.commands.launch",
    "deepspeed",
})  # fmt: skip
_LAUNCHER_WORDS = 5
_CPU_FIELDS = slice(11, 15)
"""Own and reaped children's user and system time, among the fields of `stat` after the name (proc_pid_stat(5))."""


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """What a process has used: CPU time in seconds, that of its reaped children included, and bytes of files."""

    cpu_s: float
    io_bytes: int


def list_descendants(pid: int) -> list[int]:
    """Return the living descendants of a process, parents before their children."""
    found = [pid]
    for parent in found:
        found.extend(_list_children(parent))
    return found[1:]


def read_use(pid: int) -> ProcessUse | None:
    """Return what a process has used, None if it has ended. I/O of another user's process may be unreadable: 0."""
    try:
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    io_bytes = 0
    with suppress(OSError):
        counts = dict(line.split(": ") for line in (_PROC / str(pid) / "io").read_text().splitlines())
        io_bytes = int(counts["rchar"]) + int(counts["wchar"])
    return ProcessUse(sum(map(int, fields[_CPU_FIELDS])) / _TICKS_PER_S, io_bytes)


def find_namespaced_pid(pid: int) -> int:
    """Return the process's id in its innermost process namespace, 0 if it has ended."""
    return int((_read_status(pid, "NSpid") or "0").split()[-1])


def handles_signal(pid: int, number: int) -> bool:
    """Return whether the process has a handler for a signal, so that its default action is not taken."""
    return bool(int(_read_status(pid, "SigCgt") or "0", 16) >> (number - 1) & 1)


def signal_handlers(roots: Iterator[int] | list[int], number: int, *, passes_launchers: bool = False) -> list[int]:
    """Send a signal to the topmost processes of each tree that handle it, and return them.

    A wrapper such as a shell has no handler, and its child does. Workers that a rank has forked share its handler, and
    are left out.

    Args:
        passes_launchers: leave out torchrun and similar launchers, which would end their ranks.
    """
    reached = []
    for root in roots:
        if not handles_signal(root, number) or (passes_launchers and _is_launcher(root)):
            reached += signal_handlers(_list_children(root), number, passes_launchers=passes_launchers)
        elif _send(root, number):
            reached.append(root)
    return reached


def _is_launcher(pid: int) -> bool:
    """Return whether the process is a launcher of ranks, by the first words of its command line."""
    with suppress(OSError):
        words = (_PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")[:_LAUNCHER_WORDS]
        return any(word.rpartition("/")[2] in _LAUNCHERS for word in words)
    return False


def _send(pid: int, number: int) -> bool:
    """Signal a process that handles it. The descriptor keeps another process from getting the same id meanwhile."""
    with suppress(ProcessLookupError, PermissionError):
        descriptor = os.pidfd_open(pid)
        try:
            if handles_signal(pid, number):
                signal.pidfd_send_signal(descriptor, number)
                return True
        finally:
            os.close(descriptor)
    return False


def _list_children(pid: int) -> list[int]:
    """Return the children of all threads of a process."""
    children: list[int] = []
    with suppress(OSError):
        for task in (_PROC / str(pid) / "task").iterdir():
            with suppress(OSError):
                children += map(int, (task / "children").read_text().split())
    return children


def _read_status(pid: int, field: str) -> str:
    with suppress(OSError):
        for line in (_PROC / str(pid) / "status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == field:
                return value.strip()
    return ""
