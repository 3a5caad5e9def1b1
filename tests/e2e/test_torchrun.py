"""A script that torchrun starts, under a real controller."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler.domain.commands import ResumeJob, SuspendJob
from scheduler.domain.job import JobSpec
from scheduler.domain.job_state import JobState
from tests.e2e.held_trainer import hold_at
from tests.e2e.training_play import Play

STEPS = 30


@pytest.fixture
def play(tmp_path: Path) -> Iterator[Play]:
    made = Play(tmp_path)
    yield made
    made.close()


@pytest.mark.e2e
def test_a_script_that_torchrun_starts_trains_saves_and_leaves_when_told(play: Play) -> None:
    """torchrun is the rank's process, the script its child; its store and its membership are its own business."""
    torchrun = ("python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1")
    hold = play.folder / "hold"
    hold_at(hold, 10)
    trainer = ("-m", "tests.e2e.held_trainer", str(hold), "--model", "nano-gpt", "--global-batch", "12")
    command = (*torchrun, *trainer, "--steps", str(STEPS), "--ledger", str(play.ledger))
    play.open(
        JobSpec(name="train", min_gpus=1, max_gpus=1, model="nano-gpt", global_batch=12, steps=STEPS, command=command)
    )
    play.wait(lambda: play.steps_made(play.generation()) >= 10)
    first = play.generation()
    play.send(SuspendJob("train"))
    play.wait(lambda: play.job().state is JobState.SUSPENDED and not play.job().allocation.held)
    assert play.status(first)["phase"] == "left"
    hold.unlink()
    play.send(ResumeJob("train"))
    play.wait(lambda: play.job().state is JobState.SUCCEEDED)
    assert play.job().account.lost_gpu_s == 0.0
    assert sorted(play.losses()) == list(range(1, STEPS + 1))
