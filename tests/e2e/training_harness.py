"""A training on a service whose processes can be killed. Tests observe it through its files."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from scheduler.domain.commands import AddNode, CommandBody, CreatePool, ScaleJob, SubmitJob
from scheduler.domain.fleet import Pool, PoolKind
from scheduler.domain.job import Job
from scheduler.domain.job_spec import JobSpec
from scheduler.trainer.checkpoint_manifest import (
    MANIFEST_NAME,
    checkpoint_path,
    find_latest_manifest,
    list_checkpoint_steps,
)
from tests.builders import a_node
from tests.e2e.service_harness import TIMEOUT_S, ServiceHarness

JOB = "train"
_POLL_PERIOD_S = 0.001
_CHECK_PERIOD_S = 0.1


class TrainingHarness:
    """A job `train` on two nodes with two slots and one slot.

    Attributes:
        resumed_from: the complete checkpoint step that each generation must start from. Filled while `wait` runs.
    """

    def __init__(self, folder: Path) -> None:
        self.site = ServiceHarness(folder)
        self.store = self.site.store
        self.ledger = self.site.shared / "ledger"
        self.checkpoints = self.site.folders.checkpoint_dir(JOB)
        self.resumed_from: dict[int, int] = {}

    def open(self, spec: JobSpec) -> None:
        self.send(CreatePool(Pool("training", PoolKind.TRAINING)))
        self.send(AddNode(a_node("t0", gpus=2, gpu="cpu")))
        self.send(AddNode(a_node("t1", gpus=1, gpu="cpu")))
        self.send(SubmitJob(JOB, spec))
        self.wait(lambda: self.site.job(JOB) is not None)

    def send(self, body: CommandBody) -> None:
        self.site.send(body)

    def resize(self, gpus: int) -> None:
        self.send(ScaleJob(JOB, gpus, gpus))

    def job(self) -> Job:
        job = self.site.job(JOB)
        assert job is not None, "call open() first"
        return job

    def wait(self, reached: Callable[[], bool], *, nudge: Callable[[], None] = lambda: None) -> None:
        """Poll `reached` every millisecond until it is true. `nudge` is called every 0.1 s."""
        deadline_s = time.monotonic() + TIMEOUT_S
        check_at_s = 0.0
        while not reached():
            self._note_generation()
            if time.monotonic() >= check_at_s:
                self.site.check(deadline_s)
                nudge()
                check_at_s = time.monotonic() + _CHECK_PERIOD_S
            time.sleep(_POLL_PERIOD_S)

    def generation(self) -> int:
        """Return the newest generation that has begun; 0 before the first."""
        return max(self.site.generations(JOB), default=0)

    def generation_before(self, generation: int) -> int:
        """Return the previous generation; 0 if there is none."""
        return max((one for one in self.site.generations(JOB) if one < generation), default=0)

    def gpus(self, generation: int) -> dict[str, list[int]]:
        """Return the slots of a generation by node."""
        documents = (json.loads((path / "run.json").read_text()) for path in self.site.run_dirs(JOB, generation))
        return {document["node"]: [seat["gpu"] for seat in document["ranks"]] for document in documents}

    def status(self, generation: int, rank: int = 0) -> dict[str, Any]:
        """Return the status of a rank. Its phase is empty if it has written none."""
        return self.site.status(JOB, generation, rank)

    def steps_made(self, generation: int) -> int:
        path = self.ledger / f"losses-g{generation}.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def is_noticed(self, generation: int) -> bool:
        return any((path / "notice.json").exists() for path in self.site.run_dirs(JOB, generation))

    def is_loading(self, generation: int) -> bool:
        """Return whether a checkpoint exists and a rank has checked that the directory is writable, which it does
        before loading.
        """
        if (started := self._started_file(generation)) is None:
            return False
        touched = self.checkpoints.stat().st_mtime_ns > started.stat().st_mtime_ns
        return touched and self.status(generation)["phase"] == "starting" and bool(self.resumed_from.get(generation))

    def is_saving(self, generation: int) -> bool:
        started = self._started_file(generation)
        return started is not None and has_unfinished_checkpoint(self.checkpoints, newer_than=started)

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
        generation = self.generation()
        for folder in self.site.run_dirs(JOB, generation):
            ranks = [seat["rank"] for seat in json.loads((folder / "run.json").read_text())["ranks"]]
            if rank in ranks:
                return _kill_child(self._supervisors(generation).get(folder), ranks.index(rank))
        return False

    def kill_supervisor(self, node: str) -> bool:
        """Kill the supervisor of the newest generation on a node. Return whether it existed."""
        for folder, supervisor in self._supervisors(self.generation()).items():
            if folder.name.endswith(f"@{node}"):
                supervisor.kill()
                return True
        return False

    def kill_agent(self) -> bool:
        """Kill the node agent and start the next one."""
        self.site.agent.kill()
        self.site.agent.wait()
        self.site.start_agent()
        return True

    def kill_service(self) -> bool:
        """Kill API and controller and start the next ones."""
        self.site.service.kill()
        self.site.service.wait()
        self.site.start_service()
        return True

    def end(self) -> None:
        self.site.end()

    def close(self) -> None:
        self.site.close()

    def _started_file(self, generation: int) -> Path | None:
        """Return the file that a supervisor writes when it starts the ranks; None while no supervisor has."""
        files = (path / "start.json" for path in self.site.run_dirs(JOB, generation))
        return max((path for path in files if path.exists()), default=None)

    def _supervisors(self, generation: int) -> dict[Path, psutil.Process]:
        """Return the supervisors by folder: the processes that are PID 1 of their container and run its module."""
        found = dict[Path, psutil.Process]()
        folders = self.site.run_dirs(JOB, generation)
        for process in self.site.list_processes():
            with contextlib.suppress(psutil.Error, IndexError):
                words = process.cmdline()
                parent = process.parent()
                is_first = parent is not None and "bwrap" in parent.name()
                folder = Path(words[words.index("scheduler.agent.supervisor") + 1])
                if is_first and folder in folders:
                    found[folder] = process
        return found

    def _note_generation(self) -> None:
        """Record the checkpoint that a new generation starts from.

        When a generation begins, earlier ones have ended, and it saves nothing for some steps.
        """
        generation = self.generation()
        if generation and generation not in self.resumed_from:
            manifest = find_latest_manifest(self.checkpoints)
            self.resumed_from[generation] = manifest.position.step if manifest else 0


def _kill_child(supervisor: psutil.Process | None, number: int) -> bool:
    """Kill a rank by its position among the supervisor's children, which start in the order of ranks."""
    with contextlib.suppress(psutil.Error, ProcessLookupError):
        if supervisor is not None:
            children = sorted(supervisor.children(), key=lambda each: each.pid)
            if number < len(children):
                os.kill(children[number].pid, signal.SIGKILL)
                return True
    return False


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
