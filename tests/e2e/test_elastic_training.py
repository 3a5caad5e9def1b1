"""A training under a real controller is resized and learns as if it had not been."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from scheduler.domain.commands import AddNode, Command, CommandBody, CreatePool, ScaleJob, SubmitJob
from scheduler.domain.events import EventCode
from scheduler.domain.fleet import Pool, PoolKind
from scheduler.domain.job import Job, JobSpec
from scheduler.domain.job_records import ReplanPhase
from scheduler.domain.job_state import JobState
from scheduler.executors.local_run import find_marked_processes
from scheduler.store.protocol import Page
from scheduler.store.schema_migration import migrate
from scheduler.store.sql_store import SqlStore
from tests.builders import a_node
from tests.e2e.killable_controller import settings

ROOT = Path(__file__).parents[2]
STEPS = 40
STEP_DELAY_S = 0.2
"""Gives the controller time to resize the training."""
GLOBAL_BATCH = 12
TIMEOUT_S = 240.0


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqlStore]:
    url = settings(tmp_path).database_url
    migrate(url)
    opened = SqlStore(url)
    yield opened
    opened.close()


@pytest.fixture
def controller(tmp_path: Path, store: SqlStore) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "tests.e2e.killable_controller", str(tmp_path), "never", "1", "60"]
    with (tmp_path / "controller.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
    yield process
    process.kill()
    process.wait()
    for left in find_marked_processes(tmp_path / "run"):
        left.kill()


@pytest.mark.e2e
@pytest.mark.parametrize(
    "widths_at_step", [{6: 3}, pytest.param({6: 3, 16: 1}, marks=pytest.mark.full)], ids=["grown", "grown and shrunk"]
)
def test_resized_training_has_the_losses_of_an_uninterrupted_one(
    tmp_path: Path, store: SqlStore, controller: subprocess.Popen[bytes], widths_at_step: dict[int, int]
) -> None:
    ledger, reference = tmp_path / "ledger", tmp_path / "reference"
    _send(store, CreatePool(Pool("training", PoolKind.TRAINING)))
    _send(store, AddNode(a_node("t0", gpus=2, gpu="cpu")))
    _send(store, AddNode(a_node("t1", gpus=1, gpu="cpu")))
    _send(store, SubmitJob("train", _spec(ledger)))

    for step, width in widths_at_step.items():
        _wait(partial(_has_reached, ledger, step), controller, tmp_path)
        _send(store, ScaleJob("train", width, width))
        _wait(partial(_runs_on, store, width), controller, tmp_path)
    _wait(lambda: _job(store).state is JobState.SUCCEEDED, controller, tmp_path)

    controller.send_signal(signal.SIGTERM)
    assert controller.wait(60) == 0
    assert not find_marked_processes(tmp_path / "run")
    subprocess.run([sys.executable, *_trainer(reference)], check=True, timeout=120, capture_output=True)
    _check_learning(_losses(ledger), _losses(reference))
    _check_events(store, ledger, resizes=len(widths_at_step))


def _check_learning(losses: dict[int, float], reference: dict[int, float]) -> None:
    assert sorted(losses) == list(range(1, STEPS + 1)) == sorted(reference)
    assert max(abs(losses[step] - reference[step]) for step in losses) <= 1e-5
    assert losses[STEPS] <= 0.7 * losses[1]


def _check_events(store: SqlStore, ledger: Path, *, resizes: int) -> None:
    events = [record.event for record in store.list_events(Page(limit=1000), subject="train")]
    assert sum(event.code in (EventCode.JOB_GROWN, EventCode.JOB_SHRUNK) for event in events) >= resizes
    assert _job(store).account.lost_gpu_s == 0.0
    replans = [event.numbers for event in events if event.code is EventCode.JOB_REPLANNED]
    assert replans
    for numbers in replans:
        assert list(numbers) == [*(f"{phase}_s" for phase in ReplanPhase), "needed_bytes", "read_bytes", "moved_bytes"]
        assert all(number >= 0.0 for number in numbers.values())
        assert numbers["moved_bytes"] <= numbers["read_bytes"] <= 1.05 * numbers["needed_bytes"]
    assert (_job(store).progress.peak_bytes or 0) > 10**7
    seen: dict[int, list[int]] = {}
    for line in _lines(ledger, "samples-*.jsonl"):
        seen.setdefault(int(line["step"]), []).extend(line["samples"])
    assert all(len(samples) == GLOBAL_BATCH for samples in seen.values()), "no step ran twice"


def _spec(ledger: Path) -> JobSpec:
    return JobSpec(
        name="train",
        min_gpus=2,
        max_gpus=2,
        model="tiny-gpt",
        global_batch=GLOBAL_BATCH,
        steps=STEPS,
        command=("python", *_trainer(ledger), "--step-delay-s", str(STEP_DELAY_S)),
    )


def _trainer(ledger: Path) -> list[str]:
    size = ["--model", "tiny-gpt", "--steps", str(STEPS), "--global-batch", str(GLOBAL_BATCH)]
    return ["-m", "scheduler.trainer.train", *size, "--ledger", str(ledger)]


def _send(store: SqlStore, body: CommandBody) -> None:
    store.send(Command(f"test-{time.time_ns()}", time.time(), body))


def _job(store: SqlStore) -> Job:
    job = store.load().snapshot.jobs.get("train") or store.get_ended_job("train")
    assert job is not None
    return job


def _runs_on(store: SqlStore, width: int) -> bool:
    job = _job(store)
    assert not job.is_ended, "the training ended before its last resize"
    return job.state is JobState.RUNNING and job.allocation.target_gpus == width


def _wait(reached: Callable[[], bool], controller: subprocess.Popen[bytes], folder: Path) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not reached():
        assert controller.poll() is None, (folder / "controller.log").read_text()
        assert time.monotonic() < deadline_s, (folder / "controller.log").read_text()
        time.sleep(0.1)


def _has_reached(ledger: Path, step: int) -> bool:
    return max(_losses(ledger), default=0) >= step


def _losses(ledger: Path) -> dict[int, float]:
    return {int(line["step"]): float(line["loss"]) for line in _lines(ledger, "losses-*.jsonl")}


def _lines(ledger: Path, pattern: str) -> Iterator[dict[str, Any]]:
    for path in sorted(ledger.glob(pattern)):
        for line in path.read_text().splitlines():
            yield json.loads(line)
