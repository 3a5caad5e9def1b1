"""Processes of a run that its supervisor has left behind, where no PID namespace ends them with it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

RUN_DIR_VARIABLE = "EBBTIDE_RUN_DIR"
"""Variable of all processes of a run: the supervisor gets it, and ranks and their children inherit it."""


def find_processes(run_dir: Path) -> list[int]:
    """Return the ids of processes that were started with the folder of this run in their environment."""
    mark = f"{RUN_DIR_VARIABLE}={run_dir}".encode()
    return [pid for pid in _list_pids() if mark in _read_environment(pid)]


def kill_processes(run_dir: Path) -> int:
    """Kill the processes of a run, and return how many there were."""
    pids = find_processes(run_dir)
    for pid in pids:
        with suppress(ProcessLookupError):
            descriptor = os.pidfd_open(pid)
            try:
                if pid in find_processes(run_dir):  # else the id belongs to another process by now
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            finally:
                os.close(descriptor)
    return len(pids)


def _list_pids() -> Iterator[int]:
    own = os.getpid()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != own:
            yield int(entry.name)


def _read_environment(pid: int) -> list[bytes]:
    """Return the variables that a live process was started with; none if they cannot be read."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return []
