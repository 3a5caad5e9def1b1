"""Blocks freeze in the middle of a training under one layout or another, as they do on one rank."""

from dataclasses import replace
from pathlib import Path

import pytest

from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan, Schedule, ScheduleName, Stage
from tests.e2e.forked_ranks import Farm, Training
from tests.e2e.test_worker_resharding import plan

pytestmark = pytest.mark.e2e

STEPS = 12
FREEZE = ("--freeze", "4:1,8:2", "--dtype", "float64", "--seed", "3", "--learning-rate", "0.003")
"""Of the two blocks first one is frozen, then both. In double precision layouts differ by roundings alone."""


def pipelined(name: ScheduleName, stages: int) -> ParallelPlan:
    """Two groups of one rank, and one layer a stage: with four stages embedding and head have one each."""
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
MODELS = {"experts": "nano-moe", "experts, by columns": "nano-moe"}
"""Where it is not the dense one."""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, ranks: Farm) -> dict[str, dict[int, float]]:
    """The losses of either model on one rank."""
    one = plan(LayerStrategy(2))
    return {model: losses(ranks, tmp_path_factory.mktemp(model), one, model) for model in ("nano-gpt", "nano-moe")}


@pytest.mark.parametrize("name", LAYOUTS)
def test_blocks_freeze_under_every_layout_and_every_rank_says_so(
    tmp_path: Path, ranks: Farm, alone: dict[str, dict[int, float]], name: str
) -> None:
    model = MODELS.get(name, "nano-gpt")
    spread = losses(ranks, tmp_path, LAYOUTS[name], model)
    assert sorted(spread) == sorted(alone[model]) == list(range(1, STEPS + 1))
    assert max(abs(spread[step] - alone[model][step]) for step in spread) < 1e-9


def losses(ranks: Farm, root: Path, layout: ParallelPlan, model: str) -> dict[int, float]:
    training = Training(root, model, STEPS, FREEZE)
    ends = ranks.run(training, layout)
    assert {(end["phase"], end["frozen_layers"]) for end in ends} == {("succeeded", 2)}, ends
    return training.losses()
