"""TaskRunner: plays simulations that were handed in, each in a process of its own, beside an API.

It says of each at every look that it is still played, and how far it is; whoever finds a task of which nobody says so
any more begins it again. A task that is cancelled stops being its player's, whose process is then killed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from threading import Event as Flag

from scheduler.domain.simulation_task import SimulationTask
from scheduler.executors.signal_names import signal_name
from scheduler.executors.whole_file import write_whole
from scheduler.runtime.clock import Clock
from scheduler.simulator.task import FAILURE, PROGRESS, REPORT, TASK
from scheduler.simulator.task_files import write_files
from scheduler.store.protocol import UnavailableError
from scheduler.store.sql_simulations import SqlSimulations

log = logging.getLogger(__name__)

TRIES_MAX = 3
TIDY_S = 3600.0


@dataclass(frozen=True, slots=True)
class Terms:
    """`at_once` simulations are played at once, each with so much memory and processor time. A player that is silent
    for `claim_s` is taken for gone. What ended is forgotten after `kept_s`."""

    at_once: int
    memory_bytes: int
    cpu_s: int
    kept_s: float
    look_s: float = 1.0
    claim_s: float = 30.0


@dataclass(frozen=True, slots=True)
class _Played:
    task: SimulationTask
    folder: Path
    process: subprocess.Popen[bytes]

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None, "it is a pipe, whose end tells the process that we are gone"
        self.process.stdin.close()
        shutil.rmtree(self.folder, ignore_errors=True)  # the process may have begun to do it itself

    def progress(self) -> tuple[str, int]:
        try:
            told = json.loads((self.folder / PROGRESS).read_text())
        except FileNotFoundError:
            return "", 0  # it is only starting
        return told["playing"], told["jobs_done"]


class TaskRunner:
    """`holder` is a name that no other process has."""

    def __init__(self, kept: SqlSimulations, terms: Terms, *, holder: str, clock: Clock) -> None:
        self._kept = kept
        self._terms = terms
        self._holder = holder
        self._clock = clock
        self._played: list[_Played] = []
        self._tidied_at_s = 0.0

    def run(self, stop: Flag) -> None:
        """Play until `stop` is set. What is not done then waits again."""
        try:
            while not stop.is_set():
                try:
                    self._look()
                except UnavailableError as failed:
                    log.warning("simulations wait for the database: %s", failed)
                except Exception:
                    log.exception("simulations could not be looked after")
                stop.wait(self._terms.look_s)
        finally:
            for played in self._played:
                played.end()
            with contextlib.suppress(UnavailableError):  # others find out by our silence
                for played in self._played:
                    self._kept.give_back(played.task.id, self._holder, reason="the service was stopped", counts=False)

    def _look(self) -> None:
        for played in list(self._played):
            self._follow(played)
        while len(self._played) < self._terms.at_once and self._begin_next():
            pass
        now_s = self._clock.now_s()
        if now_s - self._tidied_at_s > TIDY_S:
            self._tidied_at_s = now_s
            self._kept.forget(before_s=now_s - self._terms.kept_s)

    def _begin_next(self) -> bool:
        now_s = self._clock.now_s()
        task = self._kept.claim(self._holder, now_s=now_s, until_s=now_s + self._terms.claim_s)
        if task is None:
            return False
        if task.tries > TRIES_MAX:
            why = task.reason or "each time the service ended while it was played"
            reason = f"it was begun {TRIES_MAX} times and never came to its end: {why}"
            self._fail(task, reason, tries=TRIES_MAX)
        else:
            self._begin(task)
        return True

    def _begin(self, task: SimulationTask) -> None:
        files = self._kept.files(task.id)
        assert files is not None, "files are kept for as long as the task"
        folder = Path(tempfile.mkdtemp(prefix="ebbtide-simulation-"))
        write_files(files, folder)
        bounds = {"memory_bytes": self._terms.memory_bytes, "cpu_s": self._terms.cpu_s}
        write_whole(folder / TASK, {"policies": task.policies, "seed": task.seed, **bounds})
        command = [sys.executable, "-m", "scheduler.simulator.task", str(folder)]
        with (folder / "stderr.txt").open("wb") as errors:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            )
        self._played.append(_Played(task, folder, process))

    def _follow(self, played: _Played) -> None:
        now_s = self._clock.now_s()
        code = played.process.poll()
        playing, done = played.progress()
        until_s = now_s + self._terms.claim_s
        is_ours = self._kept.renew(played.task.id, self._holder, until_s=until_s, playing=playing, jobs_done=done)
        if is_ours and code is None:
            return
        if is_ours and code is not None:
            self._settle(played, code, now_s)
        self._played.remove(played)
        played.end()

    def _settle(self, played: _Played, code: int, now_s: float) -> None:
        task, folder = played.task, played.folder
        if code == 0:
            self._kept.finish(task.id, self._holder, json.loads((folder / REPORT).read_text()), now_s=now_s)
        elif (folder / FAILURE).exists():
            self._fail(task, (folder / FAILURE).read_text(), tries=task.tries)
        elif code == -signal.SIGXCPU:
            reason = f"it needs more processor time than the {self._terms.cpu_s} s that it may have"
            self._fail(task, reason, tries=task.tries)
        else:
            said = (folder / "stderr.txt").read_text(errors="replace")[-2000:]
            how = signal_name(-code) if code < 0 else f"exit code {code}"
            log.error("the process of simulation %s ended with %s: %s", task.id, how, said)
            self._kept.give_back(task.id, self._holder, reason=f"its process ended with {how}", counts=True)

    def _fail(self, task: SimulationTask, reason: str, *, tries: int) -> None:
        self._kept.fail(task.id, self._holder, now_s=self._clock.now_s(), reason=reason, tries=tries)
