"""A training under a real controller whose processes can be killed. Tests observe it through its files."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from scheduler.domain.commands import AddNode, Command, CommandBody, CreatePool, ScaleJob, SubmitJob
from scheduler.domain.fleet import Pool, PoolKind
from scheduler.domain.job import Job, JobSpec
from scheduler.executors.local_run import find_marked_processes
from scheduler.store.schema_migration import migrate
from scheduler.store.sql_store import SqlStore
from scheduler.trainer.checkpoint_manifest import (
    MANIFEST_NAME,
    checkpoint_path,
    find_latest_manifest,
    list_checkpoint_steps,
)
from tests.builders import a_node
from tests.e2e.killable_controller import settings

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 240.0
_POLL_PERIOD_S = 0.001
_CHECK_PERIOD_S = 0.1


class TrainingHarness:
    """A job `train` on two nodes with two slots and one slot.

    Attributes:
        resumed_from: the complete checkpoint step that each generation must start from. Filled while `wait` runs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ledger = folder / "ledger"
        self.checkpoints = folder / "run/jobs/train/checkpoints"
        self.resumed_from: dict[int, int] = {}
        self._born: dict[int, psutil.Process] = {}
        url = settings(folder).database_url
        migrate(url)
        self.store = SqlStore(url)
        self.start_controller()

    def open(self, spec: JobSpec) -> None:
        self.send(CreatePool(Pool("training", PoolKind.TRAINING)))
        self.send(AddNode(a_node("t0", gpus=2, gpu="cpu")))
        self.send(AddNode(a_node("t1", gpus=1, gpu="cpu")))
        self.send(SubmitJob("train", spec))
        self.wait(lambda: self._job() is not None)

    def send(self, body: CommandBody) -> None:
        self.store.send(Command(f"test-{time.time_ns()}", time.time(), body))

    def resize(self, gpus: int) -> None:
        self.send(ScaleJob("train", gpus, gpus))

    def job(self) -> Job:
        job = self._job()
        assert job is not None, "call open() first"
        return job

    def wait(self, reached: Callable[[], bool], *, nudge: Callable[[], None] = lambda: None) -> None:
        """Poll `reached` every millisecond until it is true. `nudge` is called every 0.1 s."""
        deadline_s = time.monotonic() + TIMEOUT_S
        check_at_s = 0.0
        while not reached():
            self._note_generation()
            if time.monotonic() >= check_at_s:
                self._check(deadline_s)
                nudge()
                check_at_s = time.monotonic() + _CHECK_PERIOD_S
            time.sleep(_POLL_PERIOD_S)

    def generation(self) -> int:
        """Return the newest generation; 0 before the first."""
        return max(self._generations(), default=0)

    def generation_before(self, generation: int) -> int:
        """Return the previous generation; 0 if there is none."""
        return max((one for one in self._generations() if one < generation), default=0)

    def run_dir(self, generation: int) -> Path:
        return self.folder / f"run/jobs/train/gen-{generation}"

    def gpus(self, generation: int) -> dict[str, list[int]]:
        """Return the slots of a generation by node."""
        gpus: dict[str, list[int]] = json.loads((self.run_dir(generation) / "started.json").read_text())["gpus"]
        return gpus

    def status(self, generation: int, rank: int = 0) -> dict[str, Any]:
        """Return the status of a rank. Its phase is empty if it has written none."""
        path = self.run_dir(generation) / f"status-{rank}.json"
        status: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"phase": ""}
        return status

    def steps_made(self, generation: int) -> int:
        path = self.ledger / f"losses-g{generation}.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def is_noticed(self, generation: int) -> bool:
        return (self.run_dir(generation) / "notice.json").exists()

    def is_loading(self, generation: int) -> bool:
        """Return whether a checkpoint exists and a rank has checked that the directory is writable, which it does
        before loading.
        """
        begun_ns = (self.run_dir(generation) / "started.json").stat().st_mtime_ns
        touched = self.checkpoints.stat().st_mtime_ns > begun_ns
        return touched and self.status(generation)["phase"] == "starting" and bool(self.resumed_from.get(generation))

    def is_saving(self, generation: int) -> bool:
        return has_unfinished_checkpoint(self.checkpoints, newer_than=self.run_dir(generation) / "started.json")

    def losses(self) -> dict[int, float]:
        """Return the loss of each step. For a repeated step, the later generation counts."""
        return losses(self.ledger)

    def digests(self, event: str) -> dict[tuple[int, int], str]:
        """Return the digests of all "saved" or "loaded" states by generation and step."""
        return {
            (generation, line["step"]): line["digest"]
            for generation, line in lines(self.ledger, "states-g*.jsonl")
            if line["event"] == event
        }

    def kill_rank(self, rank: int) -> bool:
        """Kill a rank of the newest generation. Return whether it existed."""
        pid = self.status(self.generation(), rank).get("pid")
        if pid is None:
            return False
        self._remember()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            return True
        return False

    def kill_agent(self, node: str) -> bool:
        """Kill the agent of a node. Return whether it existed."""
        self._remember()
        for process in psutil.Process(self.controller.pid).children():
            with contextlib.suppress(OSError, psutil.NoSuchProcess):
                if Path(f"/proc/{process.pid}/fd/2").readlink().name == f"agent-{node}.log":
                    process.kill()
                    return True
        return False

    def kill_controller(self) -> bool:
        """Kill the controller and start the next one."""
        self._remember()
        self.controller.kill()
        self.controller.wait()
        self.start_controller()
        return True

    def start_controller(self) -> None:
        command = [sys.executable, "-m", "tests.e2e.killable_controller", str(self.folder), "never", "1", "60"]
        with (self.folder / "controller.log").open("ab") as log:
            self.controller = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)

    def end(self) -> None:
        """Stop the controller and check that no process that descended from any controller is left."""
        self._remember()
        self.controller.send_signal(signal.SIGTERM)
        assert self.controller.wait(TIMEOUT_S) == 0
        deadline_s = time.monotonic() + TIMEOUT_S
        while left := [process for process in self._born.values() if _lives(process)]:
            assert time.monotonic() < deadline_s, left
            time.sleep(_CHECK_PERIOD_S)
        assert not find_marked_processes(self.folder / "run")

    def close(self) -> None:
        self._remember()
        self.controller.kill()
        self.controller.wait()
        for left in (*self._born.values(), *find_marked_processes(self.folder / "run")):
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()
        self.store.close()

    def _generations(self) -> list[int]:
        return [int(path.name.removeprefix("gen-")) for path in self.folder.glob("run/jobs/train/gen-*")]

    def _job(self) -> Job | None:
        return self.store.load().snapshot.jobs.get("train") or self.store.get_ended_job("train")

    def _check(self, deadline_s: float) -> None:
        assert self.controller.poll() is None, self._log()
        assert time.monotonic() < deadline_s, self._log()

    def _note_generation(self) -> None:
        """Record the checkpoint that a new generation starts from.

        When a generation begins, earlier ones have ended, and it saves nothing for some steps.
        """
        generation = self.generation()
        if generation and generation not in self.resumed_from:
            manifest = find_latest_manifest(self.checkpoints)
            self.resumed_from[generation] = manifest.position.step if manifest else 0

    def _remember(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.controller.pid).children(recursive=True):
                self._born.setdefault(process.pid, process)

    def _log(self) -> str:
        return (self.folder / "controller.log").read_text()[-5000:]


def has_unfinished_checkpoint(root: Path, *, newer_than: Path) -> bool:
    """Return whether the newest checkpoint was begun after that file was written and is not complete."""
    newest = next(iter(list_checkpoint_steps(root)), 0)
    directory = checkpoint_path(root, newest)
    with contextlib.suppress(FileNotFoundError):
        if newest and directory.stat().st_mtime_ns > newer_than.stat().st_mtime_ns:
            return not (directory / MANIFEST_NAME).exists()
    return False


def lines(ledger: Path, pattern: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each line with its generation, in the order of generations."""
    paths = [(int(path.stem.partition("-g")[2].partition("-")[0]), path) for path in ledger.glob(pattern)]
    for generation, path in sorted(paths):
        for line in path.read_text().splitlines():
            yield generation, json.loads(line)


def losses(ledger: Path) -> dict[int, float]:
    """Return the loss of each step. For a repeated step, the later generation counts."""
    return {int(line["step"]): float(line["loss"]) for _, line in lines(ledger, "losses-g*.jsonl")}


def _lives(process: psutil.Process) -> bool:
    """Return whether the process runs. A zombie counts as ended."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
