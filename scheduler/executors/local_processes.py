"""The processes of a local executor, wherever they come from: found by the marks they bear, and ended."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import psutil

from scheduler.executors.render import RUN_DIR_VARIABLE, RUN_ROOT_VARIABLE

_LOOK_PERIOD_S = 0.02


def marked_processes(folder: Path, *, variable: str = RUN_ROOT_VARIABLE) -> list[psutil.Process]:
    """Living processes that were started with `variable` naming `folder`: all of a run root, or with RUN_DIR_VARIABLE
    all of one generation. This process and those that it descends from are never among them."""
    ours = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    found = []
    for process in psutil.process_iter():
        # A process that ends meanwhile, or that belongs to another user, is none of ours.
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.pid not in ours and process.environ().get(variable) == str(folder):
                found.append(process)
    return found


def kill_strays(run_dir: Path) -> int:
    """Kill what the ranks of a generation have started in groups of their own; how many still lived."""
    strays = marked_processes(run_dir, variable=RUN_DIR_VARIABLE)
    for process in strays:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    return len(strays)


def end_marked(run_root: Path, *, within_s: float) -> int:
    """Kill every process that bears the mark and wait until all are gone; how many there were.

    Raises:
        TimeoutError: one is still there after `within_s` seconds, so nothing may be started yet.
    """
    limit_s = time.monotonic() + within_s
    doomed: dict[int, psutil.Process] = {}
    while True:
        fresh = marked_processes(run_root)
        doomed.update((process.pid, process) for process in fresh)
        alive = [process for process in doomed.values() if _lives(process)]
        if not alive and not fresh:
            return len(doomed)
        if time.monotonic() > limit_s:
            pids = ", ".join(str(process.pid) for process in alive)
            raise TimeoutError(f"processes {pids} of {run_root} were killed and are still there after {within_s:g} s")
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(_LOOK_PERIOD_S)


def _lives(process: psutil.Process) -> bool:
    """A process that has ended and that nobody reaps (in a container without init) is gone all the same."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
