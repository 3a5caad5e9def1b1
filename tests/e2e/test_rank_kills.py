"""A rank of a training under each dimension of a plan is killed with SIGKILL, during a step and during a save: all
others end by themselves, and the next generation, under another plan, goes on from the last complete checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan
from scheduler.trainer.checkpoint_manifest import find_latest_manifest
from tests.e2e.forked_ranks import Farm, Training, a_plan
from tests.e2e.training_play import has_half_a_checkpoint

pytestmark = pytest.mark.e2e

BATCH = 6
STEPS = 24
EVERY = 6
L = LayerStrategy


def plan(*stages: tuple[LayerStrategy, ...], micro_batches: int = 1) -> ParallelPlan:
    return a_plan(*stages, batch=BATCH, micro_batches=micro_batches)


LAST = plan((L(2, dp=3, zero=3, shard_group=3),))
ROUTES = {
    "pipeline x data, then tensor x data": (
        "nano-gpt",
        plan((L(1, dp=2),), (L(1, dp=2),), micro_batches=3),
        plan((L(2, tp=2, dp=2),)),
    ),
    "tensor x data, then pipeline x data": (
        "nano-gpt",
        plan((L(2, tp=2, dp=2),)),
        plan((L(1, dp=2),), (L(1, dp=2, zero=3, shard_group=2),), micro_batches=3),
    ),
    "pipeline x tensor, then ring x Ulysses": (
        "nano-gpt",
        plan((L(1, tp=2),), (L(1, tp=2),), micro_batches=3),
        plan((L(2, ring=2, ulysses=2),)),
    ),
    "ring x Ulysses, then shards": (
        "nano-gpt",
        plan((L(2, ring=2, ulysses=2),)),
        plan((L(2, dp=2, zero=3, shard_group=2),)),
    ),
    "experts x tensor, then experts in a pipeline": (
        "nano-moe",
        plan((L(2, dp=2, ep=2, tp=2, sequence_sharding=True),)),
        plan((L(1, dp=2, ep=2),), (L(1, dp=2, ep=2),), micro_batches=3),
    ),
}


@pytest.mark.parametrize("route", ROUTES)
def test_when_one_rank_is_killed_all_others_end_and_the_next_plan_goes_on(
    ranks: Farm, tmp_path: Path, route: str
) -> None:
    model, first, second = ROUTES[route]
    killed = Training(tmp_path / "killed", model, STEPS, ("--checkpoint-every", str(EVERY), "--step-delay-s", "0.03"))
    checkpoints = killed.root / "checkpoints"
    resumed_from = {ranks.generation + 1: 0}

    kills = (first, first.world_size - 1, _steps(killed, EVERY + 3)), (second, 0, _saves(killed, ranks))
    for each, rank, moment in kills:
        outlived = ranks.kill_one(killed, each, rank, when=moment)
        assert not outlived, "these ranks waited for a dead one"
        found = find_latest_manifest(checkpoints)
        resumed_from[ranks.generation + 1] = found.position.step if found else 0
    ranks.run(killed, LAST)

    whole = Training(tmp_path / "whole", model, STEPS)
    ranks.run(whole, plan((L(2),)))
    seen, expected = killed.losses(), whole.losses()
    assert sorted(seen) == sorted(expected) == list(range(1, STEPS + 1))
    assert max(abs(seen[step] - expected[step]) for step in seen) <= 1e-5
    assert killed.first_steps() == {generation: step + 1 for generation, step in resumed_from.items()}
    assert len(killed.lines("losses-*")) > STEPS, "some steps were done again"


def _steps(training: Training, steps: int) -> Callable[[], bool]:
    return lambda: max(training.losses(), default=0) >= steps


def _saves(training: Training, ranks: Farm) -> Callable[[], bool]:
    def is_saving() -> bool:
        begun = training.root / f"run-{ranks.generation}/plan.json"
        return has_half_a_checkpoint(training.root / "checkpoints", newer_than=begun)

    return is_saving
