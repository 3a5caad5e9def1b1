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
from scheduler.executors.disk_writes import write_json_atomically
from scheduler.executors.run_outcome import signal_name
from scheduler.runtime.clock import Clock
from scheduler.simulator.simulation_process import (
    FAILURE_FILE,
    PROGRESS_FILE,
    REPORT_FILE,
    TASK_FILE,
    write_input_files,
)
from scheduler.store.protocol import UnavailableError
from scheduler.store.sql_simulations import SqlSimulations

log = logging.getLogger(__name__)

TRIES_MAX = 3
CLEANUP_INTERVAL_S = 3600.0


@dataclass(frozen=True, slots=True)
class RunnerLimits:
    """`at_once` simulations are played at once, each with so much memory and processor time. A player that is silent
    for `claim_s` is taken for gone. What ended is forgotten after `kept_s`."""

    concurrent_max: int
    memory_bytes: int
    cpu_s: int
    retention_s: float
    poll_s: float = 1.0
    claim_s: float = 30.0


@dataclass(frozen=True, slots=True)
class _RunningSimulation:
    task: SimulationTask
    folder: Path
    process: subprocess.Popen[bytes]

    def terminate(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None, "it is a pipe, whose end tells the process that we are gone"
        self.process.stdin.close()
        shutil.rmtree(self.folder, ignore_errors=True)  # the process may have begun to do it itself

    def read_progress(self) -> tuple[str, int]:
        try:
            told = json.loads((self.folder / PROGRESS_FILE).read_text())
        except FileNotFoundError:
            return "", 0  # it is only starting
        return told["playing"], told["jobs_done"]


class SimulationRunner:
    """`holder` is a name that no other process has."""

    def __init__(self, simulations: SqlSimulations, limits: RunnerLimits, *, holder: str, clock: Clock) -> None:
        self._simulations = simulations
        self._limits = limits
        self._holder = holder
        self._clock = clock
        self._running: list[_RunningSimulation] = []
        self._cleaned_up_at_s = 0.0

    def run(self, stop: Flag) -> None:
        """Play until `stop` is set. What is not done then waits again."""
        try:
            while not stop.is_set():
                try:
                    self._poll()
                except UnavailableError as failed:
                    log.warning("simulations wait for the database: %s", failed)
                except Exception:
                    log.exception("simulations could not be looked after")
                stop.wait(self._limits.poll_s)
        finally:
            for played in self._running:
                played.terminate()
            with contextlib.suppress(UnavailableError):  # others find out by our silence
                for played in self._running:
                    self._simulations.requeue(
                        played.task.id, self._holder, reason="the service was stopped", counts_as_try=False
                    )

    def _poll(self) -> None:
        for played in list(self._running):
            self._check_progress(played)
        while len(self._running) < self._limits.concurrent_max and self._start_next():
            pass
        now_s = self._clock.now_s()
        if now_s - self._cleaned_up_at_s > CLEANUP_INTERVAL_S:
            self._cleaned_up_at_s = now_s
            self._simulations.delete_ended(before_s=now_s - self._limits.retention_s)

    def _start_next(self) -> bool:
        now_s = self._clock.now_s()
        task = self._simulations.claim(self._holder, now_s=now_s, until_s=now_s + self._limits.claim_s)
        if task is None:
            return False
        if task.tries > TRIES_MAX:
            why = task.reason or "each time the service ended while it was played"
            reason = f"it was begun {TRIES_MAX} times and never came to its end: {why}"
            self._fail(task, reason, tries=TRIES_MAX)
        else:
            self._start(task)
        return True

    def _start(self, task: SimulationTask) -> None:
        files = self._simulations.get_files(task.id)
        assert files is not None, "files are kept for as long as the task"
        folder = Path(tempfile.mkdtemp(prefix="ebbtide-simulation-"))
        write_input_files(files, folder)
        bounds = {"memory_bytes": self._limits.memory_bytes, "cpu_s": self._limits.cpu_s}
        write_json_atomically(folder / TASK_FILE, {"policies": task.policies, "seed": task.seed, **bounds})
        command = [sys.executable, "-m", "scheduler.simulator.simulation_process", str(folder)]
        with (folder / "stderr.txt").open("wb") as errors:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            )
        self._running.append(_RunningSimulation(task, folder, process))

    def _check_progress(self, running: _RunningSimulation) -> None:
        now_s = self._clock.now_s()
        code = running.process.poll()
        playing, done = running.read_progress()
        until_s = now_s + self._limits.claim_s
        is_ours = self._simulations.renew_claim(
            running.task.id, self._holder, until_s=until_s, playing=playing, jobs_done=done
        )
        if is_ours and code is None:
            return
        if is_ours and code is not None:
            self._record_outcome(running, code, now_s)
        self._running.remove(running)
        running.terminate()

    def _record_outcome(self, running: _RunningSimulation, code: int, now_s: float) -> None:
        task, folder = running.task, running.folder
        if code == 0:
            self._simulations.finish(task.id, self._holder, json.loads((folder / REPORT_FILE).read_text()), now_s=now_s)
        elif (folder / FAILURE_FILE).exists():
            self._fail(task, (folder / FAILURE_FILE).read_text(), tries=task.tries)
        elif code == -signal.SIGXCPU:
            reason = f"it needs more processor time than the {self._limits.cpu_s} s that it may have"
            self._fail(task, reason, tries=task.tries)
        else:
            said = (folder / "stderr.txt").read_text(errors="replace")[-2000:]
            how = signal_name(-code) if code < 0 else f"exit code {code}"
            log.error("the process of simulation %s ended with %s: %s", task.id, how, said)
            self._simulations.requeue(task.id, self._holder, reason=f"its process ended with {how}", counts_as_try=True)

    def _fail(self, task: SimulationTask, reason: str, *, tries: int) -> None:
        self._simulations.fail(task.id, self._holder, now_s=self._clock.now_s(), reason=reason, tries=tries)
