"""A training changes plans and has the losses of an uninterrupted one. Full variants train 20 million parameters."""

from __future__ import annotations

from pathlib import Path

import pytest

from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan, Recompute
from tests.e2e.rank_launcher import RankLauncher, Training, make_plan

pytestmark = pytest.mark.e2e

BATCH = 6
LAYERS = 4  # blocks of wide-gpt
L = LayerStrategy


def plan(*stages: tuple[LayerStrategy, ...], micro_batches: int = 1, interleave: int = 1) -> ParallelPlan:
    return make_plan(*stages, batch=BATCH, micro_batches=micro_batches, interleave=interleave)


CENTRE = plan((L(LAYERS, tp=2, dp=2),))
PLANS = {
    "dp2": plan((L(LAYERS, dp=2),), micro_batches=3),
    "dp3 sharded": plan((L(LAYERS, dp=3, zero=3, shard_group=3),)),
    "tp2 by tokens": plan((L(LAYERS, tp=2, sequence_sharding=True, recompute=Recompute.FULL),)),
    "pp2, uneven": plan((L(3),), (L(1),), micro_batches=3),
    "pp2 x dp2": plan((L(2, dp=2),), (L(2, dp=2, zero=3, shard_group=2),), micro_batches=3),
    "pp2 x tp2": plan((L(2, tp=2),), (L(2, tp=2),), micro_batches=3),
    "cp2, Ulysses": plan((L(LAYERS, ulysses=2, recompute=Recompute.SELECTIVE),)),
    "cp2, ring": plan((L(LAYERS, ring=2, zero=3, shard_group=2, offload=True),)),
    "streamed": plan(
        (
            L(
                *(LAYERS, 1, False, 2, 3, 2),
                recompute=Recompute.FULL,
                offload=True,
                offload_parameters=True,
                offload_activations=True,
            ),
        ),
        micro_batches=3,
    ),
    "one": plan((L(LAYERS),)),
    "one, then dp2": plan((L(1),), (L(3, dp=2),), micro_batches=3),
}
MORE = {
    "tp2 x dp2 sharded": plan((L(LAYERS, tp=2, dp=2, zero=3, shard_group=2),)),
    "dp2 x ring2 hybrid": plan((L(LAYERS, dp=2, ring=2, zero=3, shard_group=2),)),
    "dp2 zero2": plan((L(LAYERS, dp=2, zero=2, shard_group=2),), micro_batches=3),
    "pp2 interleaved": plan((L(1),), (L(1),), (L(1),), (L(1),), micro_batches=6, interleave=2),
    "layers unlike": plan((L(2, tp=2), L(1, dp=2), L(1, tp=2, sequence_sharding=True))),
    "pp2 of unlike stages": plan((L(2, tp=2),), (L(2, dp=2),), micro_batches=3),
    "tp2 by tokens, then one": plan((L(3, tp=2, sequence_sharding=True),), (L(1),), micro_batches=2),
    "ring x Ulysses": plan((L(LAYERS, ring=2, ulysses=2),)),
}


def a_training(root: Path, *, steps: int, model: str = "wide-gpt") -> Training:
    return Training(root, model, steps, ("--seed", "3", "--learning-rate", "0.0003", "--warmup-steps", "4"))


def check_there_and_back(
    ranks: RankLauncher, root: Path, center: ParallelPlan, others: list[ParallelPlan], model: str
) -> None:
    """Change from the center plan to each of the others and back, with two steps under each."""
    route = [center, *(each for other in others for each in (other, center))]
    elastic, plain = (a_training(root / name, steps=2 * len(route), model=model) for name in ("elastic", "plain"))
    for number, each in enumerate(route, 1):
        ranks.run(elastic, each, until=2 * number)
    ranks.run(plain, plan((L(2 if model.startswith("nano") else LAYERS),)))

    saved = {step: digest for (_, step), digest in elastic.digests("saved").items()}
    loaded = {step: digest for (_, step), digest in elastic.digests("loaded").items()}
    assert len(loaded) == len(route) - 1
    assert loaded == {step: saved[step] for step in loaded}, "parameters and optimizer must be bitwise equal"
    losses, reference = elastic.losses(), plain.losses()
    assert sorted(losses) == sorted(reference) == list(range(1, elastic.steps + 1))
    assert max(abs(losses[step] - reference[step]) for step in losses) < 1e-5
    assert losses[elastic.steps] < losses[1]


@pytest.mark.full
def test_training_changes_to_every_common_plan_and_back(ranks: RankLauncher, tmp_path: Path) -> None:
    check_there_and_back(ranks, tmp_path, CENTRE, list(PLANS.values()), "wide-gpt")


@pytest.mark.full
def test_training_changes_to_rarer_plans_and_back(ranks: RankLauncher, tmp_path: Path) -> None:
    check_there_and_back(ranks, tmp_path, CENTRE, list(MORE.values()), "wide-gpt")


@pytest.mark.full
def test_experts_move_between_ranks(ranks: RankLauncher, tmp_path: Path) -> None:
    plans = [
        plan((L(2, dp=3),)),
        plan((L(2, tp=2),)),
        plan((L(2, dp=2, ep=2, tp=2, sequence_sharding=True),)),
        plan((L(2, dp=2, ep=2, tp=2, zero=3, shard_group=2, recompute=Recompute.SELECTIVE),), micro_batches=3),
        plan((L(1, dp=2, ep=2),), (L(1, dp=2, ep=2, zero=3, shard_group=2),), micro_batches=3),
        plan((L(2, ulysses=2, ep=2, recompute=Recompute.FULL),)),
    ]
    check_there_and_back(ranks, tmp_path, plan((L(2, dp=2, ep=2),)), plans, "nano-moe")


@pytest.mark.parametrize(
    ("invalid", "problem"),
    [
        (plan((L(3, dp=2),)), "3 layers"),
        pytest.param(plan((L(LAYERS, tp=3),)), "8 heads", marks=pytest.mark.full),
        pytest.param(plan((L(LAYERS, ring=3),)), "32 tokens", marks=pytest.mark.full),
    ],
)
def test_plan_that_does_not_fit_the_model_is_rejected_and_overwrites_nothing(
    ranks: RankLauncher, tmp_path: Path, invalid: ParallelPlan, problem: str
) -> None:
    training = a_training(tmp_path / "training", steps=4)
    ranks.run(training, PLANS["dp2"], until=1)
    checkpoints = sorted(path.name for path in (tmp_path / "training/checkpoints").rglob("*"))
    assert problem in ranks.fail(training, invalid)
    assert sorted(path.name for path in (tmp_path / "training/checkpoints").rglob("*")) == checkpoints
