"""Four ranks train on sequences of unlike lengths in groups of unlike degrees."""

from __future__ import annotations

from pathlib import Path

import pytest

from scheduler.domain.parallel_plan import LayerStrategy
from tests.e2e.rank_launcher import RankLauncher, Training
from tests.e2e.rank_programs import run_on_ranks
from tests.e2e.sequence_group_ranks import RANKS
from tests.e2e.test_notices_and_resharding import plan

pytestmark = pytest.mark.e2e


def test_planned_groups_train_as_uniform_groups_and_as_one_process(ranks: RankLauncher, tmp_path: Path) -> None:
    results = run_on_ranks(ranks, "tests.e2e.sequence_group_ranks", tmp_path, ranks=RANKS)
    assert any(len(set(degrees)) > 1 for degrees in results[0]["degrees"])
    for own in results:
        assert own["losses"] == results[0]["losses"]
        planned = own["losses"]["planned"]
        assert abs(planned[-1] - planned[0]) > 1e-3, "the weights change"
        for losses in own["losses"].values():
            assert losses == pytest.approx(planned, abs=1e-5)
        assert max(own["gradients"].values()) < 1e-12


def test_the_trainer_runs_unlike_lengths_on_four_ranks_as_on_one(ranks: RankLauncher, tmp_path: Path) -> None:
    lengths = write_lengths(tmp_path, "64 3 17 40 1 9 25 33 64 5")
    options = ("--lengths", str(lengths), "--global-batch", "8", "--dtype", "float64")
    losses = []
    for name, strategy in (("one", LayerStrategy(2)), ("four", LayerStrategy(2, dp=4))):
        training = Training(tmp_path / name, "nano-gpt", 4, options)
        ranks.run(training, plan(strategy), until=2)
        ranks.run(training, plan(strategy))
        losses.append(training.losses())
    assert sorted(losses[0]) == [1, 2, 3, 4]
    assert losses[1] == pytest.approx(losses[0], abs=1e-9)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "which is empty. Write one length in tokens in each line."),
        ("5 -1", "length 2 of"),
        ("5 65", "from 1 to 64"),
    ],
)
def test_lengths_that_cannot_be_are_refused(ranks: RankLauncher, tmp_path: Path, content: str, message: str) -> None:
    training = Training(tmp_path, "nano-gpt", 2, ("--lengths", str(write_lengths(tmp_path, content))))
    assert message in ranks.fail(training, plan(LayerStrategy(2)))


def test_lengths_need_plain_data_parallelism(ranks: RankLauncher, tmp_path: Path) -> None:
    training = Training(tmp_path, "nano-gpt", 2, ("--lengths", str(write_lengths(tmp_path, "5"))))
    assert "needs a plan of plain data parallelism" in ranks.fail(training, plan(LayerStrategy(2, tp=2)))


def write_lengths(folder: Path, content: str) -> Path:
    file = folder / "lengths.txt"
    file.write_text(content.replace(" ", "\n"))
    return file
