"""A node agent is killed with SIGKILL during a step, a save, a start and a re-plan of a real training: it goes on from
its last complete checkpoint, learns as if nothing had happened, and leaves no process."""

from __future__ import annotations

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
import pytest

from scheduler.domain.command import (
    AddNode,
    Command,
    CommandBody,
    CreatePool,
    ResumeJob,
    ScaleJob,
    SubmitJob,
    SuspendJob,
)
from scheduler.domain.fleet import Pool, PoolKind
from scheduler.domain.job import Job, JobSpec
from scheduler.domain.job_state import JobState
from scheduler.executors.local_processes import marked_processes
from scheduler.store.migrate import migrate
from scheduler.store.sql import SqlStore
from tests.builders import a_node
from tests.e2e.killable_controller import settings

ROOT = Path(__file__).parents[2]
STEPS = 130
GLOBAL_BATCH = 12
PATIENCE_S = 240.0


class Play:
    """One training under one controller."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ledger = folder / "ledger"
        url = settings(folder).database_url
        migrate(url)
        self.store = SqlStore(url)
        command = [sys.executable, "-m", "tests.e2e.killable_controller", str(folder), "never", "1", "60"]
        with (folder / "controller.log").open("wb") as log:
            self.controller = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)

    def send(self, body: CommandBody) -> None:
        self.store.send(Command(f"test-{time.time_ns()}", time.time(), body))

    def job(self) -> Job:
        job = self.store.load().snapshot.jobs.get("train") or self.store.ended_job("train")
        assert job is not None
        return job

    def status(self, generation: int) -> str:
        """What rank 0 of a generation says of itself; empty while it says nothing."""
        path = self.folder / f"run/jobs/train/gen-{generation}/status-0.json"
        return str(json.loads(path.read_text())["phase"]) if path.exists() else ""

    def generation(self) -> int:
        """The latest one that was begun."""
        names = [path.name for path in self.folder.glob("run/jobs/train/gen-*")]
        return max((int(name.removeprefix("gen-")) for name in names), default=0)

    def kill_agent(self, node: str) -> None:
        for process in psutil.Process(self.controller.pid).children():
            if Path(f"/proc/{process.pid}/fd/2").readlink().name == f"agent-{node}.log":
                return os.kill(process.pid, signal.SIGKILL)
        raise AssertionError(f"node {node} has no agent")

    def wait(self, reached: Callable[[], bool]) -> None:
        limit_s = time.monotonic() + PATIENCE_S
        while not reached():
            assert self.controller.poll() is None, (self.folder / "controller.log").read_text()
            assert time.monotonic() < limit_s, (self.folder / "controller.log").read_text()
            assert self.job_is_well(), self.job().message
            time.sleep(0.01)

    def job_is_well(self) -> bool:
        live = self.store.load().snapshot.jobs.get("train") or self.store.ended_job("train")
        return live is None or live.account.failures == 0

    def step(self) -> int:
        return max(losses(self.ledger), default=0)

    def close(self) -> None:
        self.controller.kill()
        self.controller.wait()
        for left in marked_processes(self.folder / "run"):
            left.kill()
        self.store.close()


@pytest.fixture
def play(tmp_path: Path) -> Iterator[Play]:
    made = Play(tmp_path)
    yield made
    made.close()


@pytest.mark.e2e
def test_a_training_whose_agents_are_killed_again_and_again_learns_as_if_they_never_were(
    play: Play, tmp_path: Path
) -> None:
    reference = tmp_path / "reference"
    trainer = ["-m", "scheduler.worker.train", "--steps", str(STEPS), "--global-batch", str(GLOBAL_BATCH)]
    trainer += ["--checkpoint-every", "10", "--ledger"]
    _open(play, ("python", *trainer, str(play.ledger)), gpus=3)

    play.wait(lambda: play.step() >= 15)
    first = play.generation()
    play.kill_agent("t0")  # during a step
    play.wait(lambda: play.generation() > first and play.status(play.generation()) == "starting")
    second = play.generation()
    play.kill_agent("t1")  # during a start and a load
    play.wait(lambda: play.generation() > second and play.step() >= 35)
    third = play.generation()
    play.wait(lambda: play.status(third) == "saving")
    play.kill_agent("t0")  # during a save
    play.wait(lambda: play.generation() > third and play.step() >= 60)
    fourth = play.generation()
    play.send(ScaleJob("train", 2, 2))
    play.wait(lambda: (tmp_path / f"run/jobs/train/gen-{fourth}/notice.json").exists())
    play.kill_agent("t0")  # during a re-plan
    play.wait(lambda: play.job().state is JobState.SUCCEEDED)

    play.controller.send_signal(signal.SIGTERM)
    assert play.controller.wait(60) == 0
    assert not marked_processes(tmp_path / "run")
    assert play.job().account.failures == 0, "an agent's death is not the job's fault"
    subprocess.run([sys.executable, *trainer, str(reference)], check=True, timeout=120, capture_output=True)
    seen, expected = losses(play.ledger), losses(reference)
    assert sorted(seen) == sorted(expected) == list(range(1, STEPS + 1))
    assert max(abs(seen[step] - expected[step]) for step in seen) <= 1e-5


@pytest.mark.e2e
def test_a_script_that_torchrun_starts_trains_saves_and_leaves_when_told(play: Play, tmp_path: Path) -> None:
    """torchrun is the rank's process, the script its child; its store and its membership are its own business."""
    torchrun = ("python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1")
    trainer = ("-m", "scheduler.worker.train", "--global-batch", "12", "--steps", "100", "--ledger", str(play.ledger))
    _open(play, (*torchrun, *trainer), gpus=1)
    play.wait(lambda: play.step() >= 10)
    play.send(SuspendJob("train"))
    play.wait(lambda: play.job().state is JobState.SUSPENDED and not play.job().allocation.held)
    assert play.status(1) == "left"
    play.send(ResumeJob("train"))
    play.wait(lambda: play.job().state is JobState.SUCCEEDED)
    assert play.job().account.lost_gpu_s == 0.0
    assert sorted(losses(play.ledger)) == list(range(1, 101))


def _open(play: Play, command: tuple[str, ...], *, gpus: int) -> None:
    play.send(CreatePool(Pool("training", PoolKind.TRAINING)))
    play.send(AddNode(a_node("t0", gpus=2, gpu="cpu")))
    play.send(AddNode(a_node("t1", gpus=1, gpu="cpu")))
    spec = JobSpec(
        name="train", min_gpus=gpus, max_gpus=gpus, model="tiny-gpt", global_batch=12, steps=STEPS, command=command
    )
    play.send(SubmitJob("train", spec))
    play.wait(lambda: "train" in play.store.load().snapshot.jobs)


def losses(ledger: Path) -> dict[int, float]:
    """The loss of each step; of a step that was done again, the later generation's."""
    found: dict[int, float] = {}
    for path in sorted(ledger.glob("losses-*.jsonl"), key=lambda path: int(path.stem.partition("-g")[2])):
        for line in path.read_text().splitlines():
            entry: dict[str, Any] = json.loads(line)
            found[int(entry["step"])] = float(entry["loss"])
    return found
