"""Processes that tests have started: found again and killed as the kernel would do it with a container."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from pathlib import Path

import psutil


def find_run_processes(state: Path) -> list[psutil.Process]:
    """Return live processes of runs in the state folder of an agent: supervisors, ranks and what they started."""
    own = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            run_dir = process.environ().get("EBBTIDE_RUN_DIR", "")
            if process.pid not in own and run_dir.startswith(f"{state}/") and is_live(process):
                found.append(process)
    return found


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all its descendants, as when a container is killed."""
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(process.pid)
        root.suspend()  # it must not start a child again
        for child in root.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        root.kill()
    process.wait()


def wait_until_gone(processes: list[psutil.Process], within_s: float) -> None:
    deadline_s = time.monotonic() + within_s
    while left := [process for process in processes if is_live(process)]:
        assert time.monotonic() < deadline_s, left
        time.sleep(0.05)


def is_live(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
