"""A rank, rank 0, a node agent or the controller is killed with SIGKILL during a step, a save, a load or a re-plan of a
real training: it goes on from its last complete checkpoint, learns as if nothing had happened, and leaves no process.

One training is killed again and again, each time as soon as it has come to the next moment: what a moment is, is read
from files, every millisecond. A seed chooses the order, who exactly is killed, and when within the moment.
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

from scheduler.domain.job import JobSpec
from scheduler.domain.job_state import JobState
from tests.e2e.training_play import Play, lines, losses

pytestmark = pytest.mark.e2e

GLOBAL_BATCH = 12
CHECKPOINT_EVERY = 8
STEPS_A_KILL = 40
STEP_DELAY_S = 0.05
"""A training must last until its last kill: it goes on for seconds while a node's new agent loads what ranks need."""


class Victim(StrEnum):
    RANK = "a rank that is not 0"
    RANK_0 = "rank 0"
    AGENT = "an agent"
    CONTROLLER = "the controller"


class Moment(StrEnum):
    STEP = "a step"
    SAVE = "a save"
    LOAD = "a load"
    REPLAN = "a re-plan"


class Part(StrEnum):
    """Of a re-plan."""

    TOLD = "the ranks are told"
    SAVING = "they save, or have just done so"
    STARTING = "the next generation has begun and made no step"


Cell = tuple[Victim, Moment]
CELLS: list[Cell] = list(itertools.product(Victim, Moment))


def sample(seed: int, cells: int) -> list[Cell]:
    """So many different cells; with four and more of them every victim and every moment."""
    chance = random.Random(seed)
    square = list(zip(Victim, chance.sample(list(Moment), len(Moment)), strict=True))
    others = [cell for cell in CELLS if cell not in square]
    chosen = square + chance.sample(others, cells - len(square))
    return chance.sample(chosen, len(chosen))


class Killer:
    """Brings a training to one moment after another and kills there."""

    def __init__(self, play: Play, seed: int) -> None:
        self._play = play
        self._chance = random.Random(seed)
        self._struck = 0
        self._width = 3

    def strike(self, victim: Victim, moment: Moment) -> None:
        """Each kill hits a generation that is younger than the last one that was hit."""
        after_steps = self._chance.randint(2, 2 * CHECKPOINT_EVERY)
        part = self._chance.choice(list(Part))
        luck = self._chance.random()

        def is_done() -> bool:
            generation = self._play.generation()
            if generation <= self._struck or not self._is_at(moment, generation, after_steps, part):
                return False
            if not self._kill(victim, generation, luck):
                return False
            self._struck = generation
            return True

        def nudge() -> None:
            assert not self._play.job().is_ended, "the training ended before its last kill"
            if moment in (Moment.LOAD, Moment.REPLAN):
                self._resize_if_settled()

        self._play.wait(is_done, nudge=nudge)

    def _is_at(self, moment: Moment, generation: int, after_steps: int, part: Part) -> bool:
        play = self._play
        match moment:
            case Moment.STEP:
                return play.steps_made(generation) >= after_steps
            case Moment.SAVE:
                return play.is_saving(generation)
            case Moment.LOAD:
                return play.is_loading(generation)
        if part is Part.STARTING:
            before = play.generation_before(generation)
            told = before > self._struck and play.is_noticed(before)
            return told and play.steps_made(generation) == 0
        saves = play.status(generation)["phase"] in ("saving", "left")
        return play.is_noticed(generation) and (part is Part.TOLD or saves)

    def _kill(self, victim: Victim, generation: int, luck: float) -> bool:
        gpus = self._play.gpus(generation)
        nodes, ranks = sorted(gpus), sum(map(len, gpus.values()))
        match victim:
            case Victim.RANK:
                return self._play.kill_rank(1 + int(luck * (ranks - 1)))
            case Victim.RANK_0:
                return self._play.kill_rank(0)
            case Victim.AGENT:
                return self._play.kill_agent(nodes[int(luck * len(nodes))])
            case Victim.CONTROLLER:
                return self._play.kill_controller()

    def _resize_if_settled(self) -> None:
        """From 3 GPUs to 2 or back, once the last resize is done and steps are made."""
        generation = self._play.generation()
        if generation <= self._struck or self._play.steps_made(generation) == 0:
            return
        if sum(map(len, self._play.gpus(generation).values())) == self._width:
            self._width = 5 - self._width
            self._play.resize(self._width)


@pytest.fixture
def play(tmp_path: Path) -> Iterator[Play]:
    made = Play(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("seed", "cells"),
    [
        pytest.param(31, 6, id="sample"),
        *(pytest.param(seed, 16, id=f"all-{seed}", marks=pytest.mark.full) for seed in (2, 3)),
    ],
)
def test_a_training_that_is_killed_again_and_again_learns_as_if_it_never_was(
    play: Play, tmp_path: Path, seed: int, cells: int
) -> None:
    story = sample(seed, cells)
    assert {victim for victim, _ in story} == set(Victim)
    assert {moment for _, moment in story} == set(Moment)
    steps = STEPS_A_KILL * cells
    play.open(_spec(play.ledger, steps, rank_kills=cells))
    killer = Killer(play, seed)
    for victim, moment in story:
        killer.strike(victim, moment)
    play.wait(lambda: play.job().state is JobState.SUCCEEDED)
    play.end()

    subprocess.run([sys.executable, *_trainer(tmp_path / "reference", steps)], check=True, capture_output=True)
    seen, expected = play.losses(), losses(tmp_path / "reference")
    assert sorted(seen) == sorted(expected) == list(range(1, steps + 1))
    assert max(abs(seen[step] - expected[step]) for step in seen) <= 1e-5
    _check_loads(play)
    _check_account(play, story, steps)


def _check_loads(play: Play) -> None:
    """Every generation went on from the last checkpoint that was complete when it began, as it had been saved."""
    first: dict[int, int] = {}
    for generation, line in lines(play.ledger, "losses-g*.jsonl"):
        first.setdefault(generation, line["step"])
    assert first == {generation: play.resumed_from[generation] + 1 for generation in first}
    saved = play.digests("saved")
    for (generation, step), digest in play.digests("loaded").items():
        assert step == play.resumed_from[generation]
        assert digest in {was for (by, at), was in saved.items() if at == step and by < generation}


def _check_account(play: Play, story: list[Cell], steps: int) -> None:
    done = sum(1 for _ in lines(play.ledger, "losses-g*.jsonl"))
    account = play.job().account
    assert done > steps, "some steps were done again"
    assert account.lost_gpu_s > 0.0
    killed_ranks = sum(victim in (Victim.RANK, Victim.RANK_0) for victim, _ in story)
    assert account.failures <= killed_ranks, "the death of an agent or a controller is not the job's fault"


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
