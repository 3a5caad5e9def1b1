"""Real processes train with each option under plans of many kinds, and over resizes, as one rank does."""

from __future__ import annotations

from pathlib import Path

import pytest

from scheduler.domain.parallel_plan import LayerStrategy
from tests.e2e.rank_launcher import RankLauncher, Training, make_plan
from tests.e2e.rank_programs import run_on_ranks
from tests.e2e.training_options_ranks import BATCH, cases

pytestmark = pytest.mark.e2e

TOLERANCES = {
    "together": 1e-9,
    "clip": 1e-9,
    "dropout": 1e-9,
    "sgd": 1e-9,
    "muon": 1e-9,
    "compile": 1e-9,
    "bf16": 1e-3,
    "fp16": 1e-3,
}
"""Largest difference of a loss. In half precision it stems from sums in another order."""

PROGRAM = "tests.e2e.training_options_ranks"
L = LayerStrategy


FULL = [pytest.param(options, count, "", marks=pytest.mark.full) for options in TOLERANCES for count in (2, 3, 4)]


@pytest.mark.parametrize(("options", "count", "only"), [("together", 2, "unlike"), ("together", 2, "streamed"), *FULL])
def test_losses_under_every_plan_are_those_of_one_rank(
    ranks: RankLauncher, tmp_path: Path, options: str, count: int, only: str
) -> None:
    [alone] = run_on_ranks(ranks, PROGRAM, tmp_path / "alone", options, ranks=1)
    found = run_on_ranks(ranks, PROGRAM, tmp_path / "together", options, only, ranks=count)
    for case in cases(count, only):
        expected = alone["experts: one" if case.startswith("experts") else "one"]
        for losses in (of_rank[case] for of_rank in found):
            assert losses == pytest.approx(expected, abs=TOLERANCES[options]), case
    assert alone["streamed to one"] == pytest.approx(alone["one"], abs=TOLERANCES[options])
    assert alone["one"][-2] < alone["one"][0]


@pytest.mark.full
@pytest.mark.parametrize(
    ("words", "tolerance"),
    [
        (("--dropout", "0.2", "--clip-norm", "1", "--optimizer", "muon"), 1e-5),
        (("--autocast", "fp16", "--dropout", "0.1", "--clip-norm", "1"), 2e-2),
        (("--autocast", "bf16", "--optimizer", "sgd"), 2e-2),
    ],
    ids=["dropout, clipping and muon", "fp16", "bf16 and sgd"],
)
def test_losses_over_resizes_are_those_of_one_generation(
    ranks: RankLauncher, tmp_path: Path, words: tuple[str, ...], tolerance: float
) -> None:
    options = ("--global-batch", str(BATCH), "--seed", "3", "--learning-rate", "0.003", *words)
    whole, resized = (Training(tmp_path / name, "nano-gpt", 12, options) for name in ("whole", "resized"))
    one = make_plan((L(2),), batch=BATCH)
    ranks.run(whole, one)
    ranks.run(resized, one, until=3)
    ranks.run(resized, make_plan((L(2, tp=2, sequence_sharding=True),), batch=BATCH, micro_batches=2), until=6)
    ranks.run(resized, make_plan((L(2, dp=2, zero=3, shard_group=2),), batch=BATCH), until=9)
    ranks.run(resized, one)
    assert sorted(resized.losses()) == list(range(1, 13))
    assert resized.losses() == pytest.approx(whole.losses(), abs=tolerance)
