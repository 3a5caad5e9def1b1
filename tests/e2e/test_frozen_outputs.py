"""Frozen blocks are skipped in later passes over the text, under several layouts and across a change of the plan."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan
from scheduler.trainer.dataset import TextDataset
from scheduler.trainer.model import SIZES
from tests.e2e.rank_launcher import RankLauncher, Training
from tests.e2e.test_freezing_layouts import LAYOUTS, MODELS, LossesAlone
from tests.e2e.test_notices_and_resharding import plan

pytestmark = [pytest.mark.e2e, pytest.mark.full]

STEPS = 10
BATCH = 800
"""A pass over the text takes just over three steps, so that both numbers of frozen blocks are read from the cache."""
OPTIONS = (
    *("--freeze", "2:1,6:2", "--dtype", "float64", "--seed", "3", "--learning-rate", "0.003"),
    *("--global-batch", str(BATCH)),
)


def train(ranks: RankLauncher, root: Path, plans: list[ParallelPlan], model: str, *options: str) -> dict[int, float]:
    """Run one generation for each plan, each for an equal share of the steps, and return the losses."""
    training = Training(root, model, STEPS, (*OPTIONS, *options))
    for number, each in enumerate(plans, 1):
        ranks.run(training, each, until=number * STEPS // len(plans))
    return training.losses()


@pytest.fixture(scope="module")
def losses_alone(tmp_path_factory: pytest.TempPathFactory, ranks: RankLauncher) -> LossesAlone:
    """Return the losses of a model on one rank that computes all layers in each step."""
    return functools.cache(lambda model: train(ranks, tmp_path_factory.mktemp(model), [plan(LayerStrategy(2))], model))


def count_complete_windows(cache: Path) -> dict[int, int]:
    """Return how many windows are complete by the number of frozen blocks."""
    return {int(path.parent.name): len(set(path.read_text().split())) for path in cache.glob("*/*/complete")}


@pytest.mark.parametrize("name", LAYOUTS)
def test_cached_outputs_change_no_loss(
    tmp_path: Path, ranks: RankLauncher, losses_alone: LossesAlone, name: str
) -> None:
    model = MODELS.get(name, "nano-gpt")
    computed = losses_alone(model)
    cached = train(ranks, tmp_path / "cached", [LAYOUTS[name]], model, "--frozen-cache", str(tmp_path / "cache"))
    assert sorted(cached) == sorted(computed) == list(range(1, STEPS + 1))
    assert max(abs(cached[step] - computed[step]) for step in computed) < 1e-9
    windows = TextDataset(sequence=SIZES[model].sequence, seed=3).window_count
    complete = count_complete_windows(tmp_path / "cache")
    assert set(complete) == {1, 2}
    # Nearly all windows are written, and each number of frozen blocks serves more windows than there are.
    assert all(0.95 * windows < count <= windows < 4 * BATCH for count in complete.values()), complete


def test_cached_outputs_outlast_a_change_of_the_plan(
    tmp_path: Path, ranks: RankLauncher, losses_alone: LossesAlone
) -> None:
    computed = losses_alone("nano-gpt")
    plans = [LAYOUTS["1f1b"], LAYOUTS["sharded"]]
    cached = train(ranks, tmp_path / "cached", plans, "nano-gpt", "--frozen-cache", str(tmp_path / "cache"))
    assert max(abs(cached[step] - computed[step]) for step in computed) < 1e-9
