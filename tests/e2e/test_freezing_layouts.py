"""Blocks freeze in the middle of a training under several layouts. The reference is the same training on one rank."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan, Schedule, ScheduleName, Stage
from tests.e2e.rank_launcher import RankLauncher, Training
from tests.e2e.test_notices_and_resharding import plan

pytestmark = pytest.mark.e2e

STEPS = 12
# The first block freezes, then both. In float64 the layouts differ by rounding only.
FREEZE = ("--freeze", "4:1,8:2", "--dtype", "float64", "--seed", "3", "--learning-rate", "0.003")


def pipelined(name: ScheduleName, stages: int) -> ParallelPlan:
    """Return a plan for two groups of one rank, with one layer per stage; with four stages, embedding and head have
    their own.
    """
    layers = tuple(Stage(layer, layer, "cpu", 1, (LayerStrategy(1),)) for layer in range(stages))
    schedule = Schedule(name, interleave=stages // 2)
    return replace(plan(LayerStrategy(2), micro_batches=4), schedule=schedule, stages=layers)


LAYOUTS = {
    "replicated": plan(LayerStrategy(2, dp=2), micro_batches=2),
    "sharded": plan(LayerStrategy(2, dp=2, zero=3, shard_group=2), micro_batches=2),
    "optimizer sharded and in host memory": plan(LayerStrategy(2, dp=2, zero=1, shard_group=2, offload=True)),
    "sequence sharded": plan(LayerStrategy(2, tp=2, sequence_sharding=True)),
    "ring": plan(LayerStrategy(2, ring=2, zero=3, shard_group=2)),
    "1f1b": pipelined(ScheduleName.ONE_F_ONE_B, 2),
    "interleaved": pipelined(ScheduleName.INTERLEAVED, 4),
    "experts": plan(LayerStrategy(2, dp=2, ep=2)),
    "experts, by columns": plan(LayerStrategy(2, tp=2, sequence_sharding=True)),
}
MODELS = {"experts": "nano-moe", "experts, by columns": "nano-moe"}  # the others run nano-gpt
SHORT = ("sharded", "1f1b")


LossesAlone = Callable[[str], dict[int, float]]


@pytest.fixture(scope="module")
def losses_alone(tmp_path_factory: pytest.TempPathFactory, ranks: RankLauncher) -> LossesAlone:
    """Return the losses of a model on one rank."""
    return cache(lambda model: losses(ranks, tmp_path_factory.mktemp(model), plan(LayerStrategy(2)), model))


@pytest.mark.parametrize(
    "name", [name if name in SHORT else pytest.param(name, marks=pytest.mark.full) for name in LAYOUTS]
)
def test_blocks_freeze_and_every_rank_reports_it(
    tmp_path: Path, ranks: RankLauncher, losses_alone: LossesAlone, name: str
) -> None:
    model = MODELS.get(name, "nano-gpt")
    actual = losses(ranks, tmp_path, LAYOUTS[name], model)
    alone = losses_alone(model)
    assert sorted(actual) == sorted(alone) == list(range(1, STEPS + 1))
    assert max(abs(actual[step] - alone[step]) for step in actual) < 1e-9


def losses(ranks: RankLauncher, root: Path, layout: ParallelPlan, model: str) -> dict[int, float]:
    training = Training(root, model, STEPS, FREEZE)
    statuses = ranks.run(training, layout)
    assert {(status["phase"], status["frozen_layers"]) for status in statuses} == {("succeeded", 2)}, statuses
    return training.losses()
