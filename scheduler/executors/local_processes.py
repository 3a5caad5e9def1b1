"""The processes of a local executor: started in groups of their own, marked, reaped, and found again by the mark."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from scheduler.executors.render import RUN_DIR_VARIABLE, RUN_ROOT_VARIABLE, RankPlace

_LOOK_PERIOD_S = 0.02


class RankProcess:
    """One rank as a process that leads its own group, so that whatever it starts can be ended with it."""

    def __init__(self, place: RankPlace, process: subprocess.Popen[bytes]) -> None:
        self.place = place
        self._process = process
        self._exit_code: int | None = None

    @classmethod
    def spawn(cls, place: RankPlace, argv: Sequence[str], *, env: Mapping[str, str], log: Path) -> RankProcess:
        """Start the rank; all it prints goes to the end of `log`.

        Raises:
            OSError: there is no such program, or it cannot be executed.
            ValueError: an argument or a variable holds something that no program can be given.
        """
        with log.open("ab") as file:
            process = subprocess.Popen(
                argv,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return cls(place, process)

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """The exit code (minus the signal's number where one ended it), None while it lives.

        What the rank leaves behind in its group is ended before the rank is reaped: until then no other process
        can have the group's number.
        """
        if self._exit_code is None:
            seen = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if seen is not None:
                self.send(signal.SIGKILL)
                self._exit_code = self._process.wait()
        return self._exit_code

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the whole group, once reaped to nobody."""
        if self._exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)


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
