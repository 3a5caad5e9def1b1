"""A training whose ranks, supervisors, agent and service are killed with SIGKILL continues as if nothing had happened.

It is killed during a step, a save, a load or a replan, each time as soon as it reaches the next of these moments.
Files tell which moment it is, polled every millisecond. A seed chooses the order, the victim and the time within the
moment. The ranks survive their agent and the service. Otherwise the training continues from its last complete
checkpoint. In the end no process is left.
"""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

import pytest

from scheduler.domain.job_spec import JobSpec
from scheduler.domain.job_state import JobState
from tests.e2e.training_harness import TrainingHarness, lines, losses

pytestmark = pytest.mark.e2e

GLOBAL_BATCH = 12
CHECKPOINT_EVERY = 8
STEPS_A_KILL = 75
# The training must last until its last kill. It continues for seconds while new supervisors load torch.
STEP_DELAY_S = 0.05


class Victim(StrEnum):
    RANK = "a rank that is not 0"
    RANK_0 = "rank 0"
    SUPERVISOR = "a supervisor"
    AGENT = "the agent"
    SERVICE = "API and controller"

    @property
    def ends_generation(self) -> bool:
        return self in (Victim.RANK, Victim.RANK_0, Victim.SUPERVISOR)


class Moment(StrEnum):
    STEP = "a step"
    SAVE = "a save"
    LOAD = "a load"
    REPLAN = "a re-plan"


class Part(StrEnum):
    """Part of a replan."""

    NOTIFIED = "the ranks have a notice"
    SAVING = "they save or have just saved"
    STARTING = "the next generation has started and made no step"


Cell = tuple[Victim, Moment]
CELLS: list[Cell] = list(itertools.product(Victim, Moment))


def sample(seed: int, cells: int) -> list[Cell]:
    """Return `cells` different cells. Five or more cover every victim and every moment."""
    chance = random.Random(seed)
    moments = chance.sample([*Moment, chance.choice(list(Moment))], len(Victim))
    square = list(zip(Victim, moments, strict=True))
    others = [cell for cell in CELLS if cell not in square]
    chosen = square + chance.sample(others, cells - len(square))
    return chance.sample(chosen, len(chosen))


class Killer:
    """Brings a training to one moment after another and kills a victim there."""

    def __init__(self, harness: TrainingHarness, seed: int) -> None:
        self._harness = harness
        self._chance = random.Random(seed)
        self._struck = 0
        self._width = 3

    def strike(self, victim: Victim, moment: Moment) -> None:
        """Kill one victim. After a kill that ends a generation, the next one hits a younger generation."""
        after_steps = self._chance.randint(2, 2 * CHECKPOINT_EVERY)
        part = self._chance.choice(list(Part))
        luck = self._chance.random()

        def is_done() -> bool:
            generation = self._harness.generation()
            if generation <= self._struck or not self._is_at(moment, generation, after_steps, part):
                return False
            if not self._kill(victim, generation, luck):
                return False
            if victim.ends_generation:
                self._struck = generation
            return True

        def nudge() -> None:
            assert not self._harness.job().is_ended, "the training ended before its last kill"
            if moment in (Moment.LOAD, Moment.REPLAN):
                self._resize_if_settled()

        self._harness.wait(is_done, nudge=nudge)

    def _is_at(self, moment: Moment, generation: int, after_steps: int, part: Part) -> bool:
        harness = self._harness
        match moment:
            case Moment.STEP:
                return harness.steps_made(generation) >= after_steps
            case Moment.SAVE:
                return harness.is_saving(generation)
            case Moment.LOAD:
                return harness.is_loading(generation)
        if part is Part.STARTING:
            before = harness.generation_before(generation)
            is_replan = before > self._struck and harness.is_noticed(before)
            return is_replan and harness.steps_made(generation) == 0
        is_saving = harness.status(generation)["phase"] in ("saving", "left")
        return harness.is_noticed(generation) and (part is Part.NOTIFIED or is_saving)

    def _kill(self, victim: Victim, generation: int, luck: float) -> bool:
        gpus = self._harness.gpus(generation)
        nodes, ranks = sorted(gpus), sum(map(len, gpus.values()))
        match victim:
            case Victim.RANK:
                return self._harness.kill_rank(1 + int(luck * (ranks - 1)))
            case Victim.RANK_0:
                return self._harness.kill_rank(0)
            case Victim.SUPERVISOR:
                return self._harness.kill_supervisor(nodes[int(luck * len(nodes))])
            case Victim.AGENT:
                return self._harness.kill_agent()
            case Victim.SERVICE:
                return self._harness.kill_service()

    def _resize_if_settled(self) -> None:
        """Resize from 3 GPUs to 2 or back, once the previous resize is done and steps are made."""
        generation = self._harness.generation()
        if generation <= self._struck or self._harness.steps_made(generation) == 0:
            return
        if sum(map(len, self._harness.gpus(generation).values())) == self._width:
            self._width = 5 - self._width
            self._harness.resize(self._width)


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[TrainingHarness]:
    harness = TrainingHarness(tmp_path)
    yield harness
    harness.close()


@pytest.mark.parametrize(
    ("seed", "cells"),
    [
        pytest.param(31, 5, id="sample", marks=pytest.mark.full),
        *(pytest.param(seed, 20, id=f"all-{seed}", marks=pytest.mark.full) for seed in (2, 3)),
    ],
)
def test_repeatedly_killed_training_has_the_losses_of_an_uninterrupted_one(
    harness: TrainingHarness, tmp_path: Path, seed: int, cells: int
) -> None:
    kills = sample(seed, cells)
    assert {victim for victim, _ in kills} == set(Victim)
    assert {moment for _, moment in kills} == set(Moment)
    steps = STEPS_A_KILL * cells
    harness.open(_spec(harness.ledger, steps, rank_kills=cells))
    killer = Killer(harness, seed)
    for victim, moment in kills:
        killer.strike(victim, moment)
    harness.wait(lambda: harness.job().state is JobState.SUCCEEDED)
    harness.end()

    subprocess.run([sys.executable, *_trainer(tmp_path / "reference", steps)], check=True, capture_output=True)
    seen, expected = harness.losses(), losses(tmp_path / "reference")
    assert sorted(seen) == sorted(expected) == list(range(1, steps + 1))
    assert max(abs(seen[step] - expected[step]) for step in seen) <= 1e-5
    _check_loads(harness)
    _check_account(harness, kills, steps)


def _check_loads(harness: TrainingHarness) -> None:
    """Check that every generation started from the checkpoint that was complete when it began, bitwise as saved."""
    first: dict[int, int] = {}
    for generation, line in lines(harness.ledger, "losses-g*.jsonl"):
        first.setdefault(generation, line["step"])
    assert first == {generation: harness.resumed_from[generation] + 1 for generation in first}
    saved = harness.digests("saved")
    for (generation, step), digest in harness.digests("loaded").items():
        assert step == harness.resumed_from[generation]
        assert digest in {was for (by, at), was in saved.items() if at == step and by < generation}


def _check_account(harness: TrainingHarness, kills: list[Cell], steps: int) -> None:
    steps_run = sum(1 for _ in lines(harness.ledger, "losses-g*.jsonl"))
    account = harness.job().account
    assert steps_run > steps, "some steps must have run twice"
    assert account.lost_gpu_s > 0.0
    killed_ranks = sum(victim in (Victim.RANK, Victim.RANK_0) for victim, _ in kills)
    assert account.failures <= killed_ranks, "other kills must not count as failures of the job"


def _spec(ledger: Path, steps: int, *, rank_kills: int) -> JobSpec:
    return JobSpec(
        name="train",
        min_gpus=3,
        max_gpus=3,
        model="nano-gpt",
        global_batch=GLOBAL_BATCH,
        steps=steps,
        retries=rank_kills,
        command=(
            "python",
            *_trainer(ledger, steps),
            "--checkpoint-every",
            str(CHECKPOINT_EVERY),
            "--step-delay-s",
            str(STEP_DELAY_S),
        ),
    )


def _trainer(ledger: Path, steps: int) -> list[str]:
    size = ["--model", "nano-gpt", "--steps", str(steps), "--global-batch", str(GLOBAL_BATCH)]
    return ["-m", "scheduler.trainer.train", *size, "--ledger", str(ledger)]
