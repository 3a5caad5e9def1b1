"""SimulationRunner: runs submitted simulations, each in its own process, next to an API.

At each poll it renews the claim on each simulation and records its progress. If a claim expires, any runner may start
the simulation again. Cancelling a simulation ends the claim, and the runner then kills the process.
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
from scheduler.store.simulations import SimulationStore

log = logging.getLogger(__name__)

TRIES_MAX = 3
CLEANUP_INTERVAL_S = 3600.0


@dataclass(frozen=True, slots=True)
class RunnerLimits:
    """Limits of a runner.

    Args:
        concurrent_max: simulations that run at the same time.
        memory_bytes: memory of each simulation; `cpu_s` is its CPU time.
        retention_s: time after which ended simulations are deleted.
        claim_s: time after which a claim expires that is not renewed.
    """

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
        assert self.process.stdin is not None, "standard input is a pipe"
        self.process.stdin.close()
        shutil.rmtree(self.folder, ignore_errors=True)  # the process may delete it, too

    def read_progress(self) -> tuple[str, int]:
        try:
            progress = json.loads((self.folder / PROGRESS_FILE).read_text())
        except FileNotFoundError:
            return "", 0  # the process is starting
        return progress["playing"], progress["jobs_done"]


class SimulationRunner:
    """Runner of queued simulations. `holder` is a name that no other process uses."""

    def __init__(self, simulations: SimulationStore, limits: RunnerLimits, *, holder: str, clock: Clock) -> None:
        self._simulations = simulations
        self._limits = limits
        self._holder = holder
        self._clock = clock
        self._running: list[_RunningSimulation] = []
        self._cleaned_up_at_s = 0.0

    def run(self, stop: Flag) -> None:
        """Run until `stop` is set. Unfinished simulations go back to the queue."""
        try:
            while not stop.is_set():
                try:
                    self._poll()
                except UnavailableError as error:
                    log.warning("simulations wait for the database: %s", error)
                except Exception:
                    log.exception("polling simulations failed")
                stop.wait(self._limits.poll_s)
        finally:
            for running in self._running:
                running.terminate()
            with contextlib.suppress(UnavailableError):  # the claims expire
                for running in self._running:
                    self._simulations.requeue(
                        running.task.id, self._holder, reason="the service stopped", counts_as_try=False
                    )

    def _poll(self) -> None:
        for running in list(self._running):
            self._check_progress(running)
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
            last_reason = task.reason or "the service ended each time"
            reason = f"all {TRIES_MAX} tries ended early; the last one because: {last_reason}"
            self._fail(task, reason, tries=TRIES_MAX)
        else:
            self._start(task)
        return True

    def _start(self, task: SimulationTask) -> None:
        files = self._simulations.get_files(task.id)
        assert files is not None, "files are stored as long as the simulation"
        folder = Path(tempfile.mkdtemp(prefix="ebbtide-simulation-"))
        write_input_files(files, folder)
        limits = {"memory_bytes": self._limits.memory_bytes, "cpu_s": self._limits.cpu_s}
        write_json_atomically(folder / TASK_FILE, {"policies": task.policies, "seed": task.seed, **limits})
        command = [sys.executable, "-P", "-m", "scheduler.simulator.simulation_process", str(folder)]
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
        has_claim = self._simulations.renew_claim(
            running.task.id, self._holder, until_s=until_s, playing=playing, jobs_done=done
        )
        if has_claim and code is None:
            return
        if has_claim and code is not None:
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
            reason = f"it exceeds the CPU time limit of {self._limits.cpu_s} s"
            self._fail(task, reason, tries=task.tries)
        else:
            stderr = (folder / "stderr.txt").read_text(errors="replace")[-2000:]
            how = signal_name(-code) if code < 0 else f"exit code {code}"
            log.error("the process of simulation %s ended with %s: %s", task.id, how, stderr)
            self._simulations.requeue(task.id, self._holder, reason=f"its process ended with {how}", counts_as_try=True)

    def _fail(self, task: SimulationTask, reason: str, *, tries: int) -> None:
        self._simulations.fail(task.id, self._holder, now_s=self._clock.now_s(), reason=reason, tries=tries)
