"""A script that is started by torchrun, under a real controller."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler.domain.commands import ResumeJob, SuspendJob
from scheduler.domain.job_spec import JobSpec
from scheduler.domain.job_state import JobState
from tests.e2e.paused_trainer import PAUSED_TRAINER, hold_at
from tests.e2e.training_harness import TrainingHarness

STEPS = 30


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[TrainingHarness]:
    harness = TrainingHarness(tmp_path)
    yield harness
    harness.close()


@pytest.mark.e2e
@pytest.mark.full
def test_script_under_torchrun_trains_saves_and_leaves_on_request(harness: TrainingHarness) -> None:
    """torchrun is the process of the rank and the script its child. torchrun manages its own store and membership."""
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1")
    hold = harness.site.shared / "hold"
    hold_at(hold, 10)
    trainer = (PAUSED_TRAINER, str(hold), "--model", "nano-gpt", "--global-batch", "12")
    command = (*torchrun, *trainer, "--steps", str(STEPS), "--ledger", str(harness.ledger))
    harness.open(
        JobSpec(name="train", min_gpus=1, max_gpus=1, model="nano-gpt", global_batch=12, steps=STEPS, command=command)
    )
    harness.wait(lambda: harness.steps_made(harness.generation()) >= 10)
    first = harness.generation()
    harness.send(SuspendJob("train"))
    harness.wait(lambda: harness.job().state is JobState.SUSPENDED and not harness.job().allocation.held)
    assert harness.status(first)["phase"] == "left"
    hold.unlink()
    harness.send(ResumeJob("train"))
    harness.wait(lambda: harness.job().state is JobState.SUCCEEDED)
    assert harness.job().account.lost_gpu_s == 0.0
    assert sorted(harness.losses()) == list(range(1, STEPS + 1))
