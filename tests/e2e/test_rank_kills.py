"""A rank is killed with SIGKILL during a step and during a save, under each dimension of a plan.

All other ranks end by themselves. The next generation, under another plan, continues from the last complete
checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan
from scheduler.trainer.checkpoint_manifest import find_latest_manifest
from tests.e2e.rank_launcher import RankLauncher, Training, make_plan
from tests.e2e.training_harness import has_unfinished_checkpoint

pytestmark = pytest.mark.e2e

BATCH = 6
STEPS = 24
EVERY = 6
L = LayerStrategy


def plan(*stages: tuple[LayerStrategy, ...], micro_batches: int = 1) -> ParallelPlan:
    return make_plan(*stages, batch=BATCH, micro_batches=micro_batches)


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


SHORT = "pipeline x data, then tensor x data"


@pytest.mark.parametrize(
    "route", [route if route == SHORT else pytest.param(route, marks=pytest.mark.full) for route in ROUTES]
)
def test_after_a_killed_rank_all_others_end_and_the_next_plan_continues(
    ranks: RankLauncher, tmp_path: Path, route: str
) -> None:
    model, first, second = ROUTES[route]
    killed = Training(tmp_path / "killed", model, STEPS, ("--checkpoint-every", str(EVERY), "--step-delay-s", "0.03"))
    checkpoints = killed.root / "checkpoints"
    resumed_from = {ranks.generation + 1: 0}

    kills = (first, first.world_size - 1, _steps(killed, EVERY + 3)), (second, 0, _saves(killed, ranks))
    for killed_plan, rank, moment in kills:
        survivors = ranks.kill_one(killed, killed_plan, rank, when=moment)
        assert not survivors, "these ranks waited for the killed one"
        manifest = find_latest_manifest(checkpoints)
        resumed_from[ranks.generation + 1] = manifest.position.step if manifest else 0
    ranks.run(killed, LAST)

    whole = Training(tmp_path / "whole", model, STEPS)
    ranks.run(whole, plan((L(2),)))
    seen, expected = killed.losses(), whole.losses()
    assert sorted(seen) == sorted(expected) == list(range(1, STEPS + 1))
    assert max(abs(seen[step] - expected[step]) for step in seen) <= 1e-5
    assert killed.first_steps() == {generation: step + 1 for generation, step in resumed_from.items()}
    assert len(killed.lines("losses-*")) > STEPS, "some steps must have run twice"


def _steps(training: Training, steps: int) -> Callable[[], bool]:
    return lambda: max(training.losses(), default=0) >= steps


def _saves(training: Training, ranks: RankLauncher) -> Callable[[], bool]:
    def is_saving() -> bool:
        begun = training.root / f"run-{ranks.generation}/plan.json"
        return has_unfinished_checkpoint(training.root / "checkpoints", newer_than=begun)

    return is_saving
