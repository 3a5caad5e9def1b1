"""A training on a real service is resized and learns as if it had not been."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from scheduler.domain.events import EventCode
from scheduler.domain.job_records import ReplanPhase
from scheduler.domain.job_spec import JobSpec
from scheduler.domain.job_state import JobState
from scheduler.store.protocol import Page
from tests.e2e.paused_trainer import PAUSED_TRAINER, hold_at
from tests.e2e.training_harness import TrainingHarness, lines, losses

STEPS = 40
STEP_DELAY_S = 0.1
"""Ranks agree on a notice within half a second: about five steps."""
GLOBAL_BATCH = 12


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[TrainingHarness]:
    harness = TrainingHarness(tmp_path)
    yield harness
    harness.close()


@pytest.mark.e2e
@pytest.mark.full
@pytest.mark.parametrize("widths_at_step", [{6: 3, 20: 1}], ids=["grown and shrunk"])
def test_resized_training_has_the_losses_of_an_uninterrupted_one(
    tmp_path: Path, harness: TrainingHarness, widths_at_step: dict[int, int]
) -> None:
    ledger, reference, hold = harness.ledger, tmp_path / "reference", tmp_path / "hold"
    holds = [*widths_at_step, STEPS - 1]
    hold_at(hold, holds[0])
    harness.open(_spec(ledger, hold))
    for (step, width), next_hold in zip(widths_at_step.items(), holds[1:], strict=True):
        harness.wait(partial(_has_reached, ledger, step))
        harness.resize(width)
        harness.wait(partial(harness.is_noticed, harness.generation()))
        hold_at(hold, next_hold)
        harness.wait(partial(_runs_on, harness, width))
    hold.unlink()
    harness.wait(lambda: harness.job().state is JobState.SUCCEEDED)
    harness.end()
    trainer = [sys.executable, "-m", "scheduler.trainer.train", *_options(reference)]
    subprocess.run(trainer, check=True, timeout=120, capture_output=True)
    _check_learning(losses(ledger), losses(reference))
    _check_events(harness, resizes=len(widths_at_step))


def _check_learning(seen: dict[int, float], reference: dict[int, float]) -> None:
    assert sorted(seen) == list(range(1, STEPS + 1)) == sorted(reference)
    assert max(abs(seen[step] - reference[step]) for step in seen) <= 1e-5
    assert seen[STEPS] <= 0.7 * seen[1]


def _check_events(harness: TrainingHarness, *, resizes: int) -> None:
    events = [record.event for record in harness.store.list_events(Page(limit=1000), subject="train")]
    job = harness.job()
    assert sum(event.code in (EventCode.JOB_GROWN, EventCode.JOB_SHRUNK) for event in events) >= resizes
    assert job.account.lost_gpu_s == 0.0
    replans = [event.numbers for event in events if event.code is EventCode.JOB_REPLANNED]
    assert replans
    for numbers in replans:
        assert list(numbers) == [*(f"{phase}_s" for phase in ReplanPhase), "needed_bytes", "read_bytes", "moved_bytes"]
        assert all(number >= 0.0 for number in numbers.values())
        assert numbers["moved_bytes"] <= numbers["read_bytes"] <= 1.05 * numbers["needed_bytes"]
    assert (job.progress.peak_bytes or 0) > 10**7
    seen: dict[int, list[int]] = {}
    for _, line in lines(harness.ledger, "samples-g*.jsonl"):
        seen.setdefault(int(line["step"]), []).extend(line["samples"])
    assert all(len(samples) == GLOBAL_BATCH for samples in seen.values()), "no step ran twice"


def _spec(ledger: Path, hold: Path) -> JobSpec:
    pause = ("--step-delay-s", str(STEP_DELAY_S))
    return JobSpec(
        name="train",
        min_gpus=2,
        max_gpus=2,
        model="tiny-gpt",
        global_batch=GLOBAL_BATCH,
        steps=STEPS,
        command=(sys.executable, PAUSED_TRAINER, str(hold), *_options(ledger), *pause),
    )


def _options(ledger: Path) -> list[str]:
    size = ["--model", "tiny-gpt", "--steps", str(STEPS), "--global-batch", str(GLOBAL_BATCH)]
    return [*size, "--ledger", str(ledger)]


def _runs_on(harness: TrainingHarness, width: int) -> bool:
    job = harness.job()
    assert not job.is_ended, "the training ended before its last resize"
    return job.state is JobState.RUNNING and job.allocation.target_gpus == width


def _has_reached(ledger: Path, step: int) -> bool:
    return max(losses(ledger), default=0) >= step
