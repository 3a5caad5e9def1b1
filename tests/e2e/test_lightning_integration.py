"""The integration with Lightning: a training that leaves does what an uninterrupted one does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.framework_probes import LONG_WITH_FRAMEWORKS, make_ranks_fixture, read_printed
from tests.e2e.framework_trainings import REPOSITORY, ElasticTraining, FrameworkRanks

PROBE = REPOSITORY / "tests" / "e2e" / "lightning_probe.py"

pytestmark = LONG_WITH_FRAMEWORKS
ranks = make_ranks_fixture("lightning.pytorch")


def _train(ranks: FrameworkRanks, root: Path, leave_after: list[int], options: dict[str, Any]) -> list[str]:
    """Return what the probe has printed over all generations."""
    training = ElasticTraining(ranks, root, PROBE, [json.dumps(options)])
    for step in [*leave_after, 0]:
        training.run(1, until=step)
        if step == options.get("max_steps"):
            break
    *left, last = [statuses[0]["phase"] for statuses in training.statuses]
    assert (set(left) - {"left"}, last) == (set(), "succeeded")
    return read_printed(root)


@pytest.mark.parametrize(
    ("leave_after", "options"),
    [
        pytest.param([3, 6], {}, id="end of an epoch"),
        pytest.param([6], {"limit_val_batches": 0}, id="end of an epoch without validation"),
        pytest.param([2], {"val_check_interval": 2, "frequency": 2}, id="validation within an epoch"),
        pytest.param([2, 3], {"limit_train_batches": 3}, id="limited epochs"),
        pytest.param([8], {"max_steps": 8, "max_epochs": 9}, id="last step"),
    ],
)
def test_a_training_that_leaves_does_the_same(
    ranks: FrameworkRanks, tmp_path: Path, leave_after: list[int], options: dict[str, Any]
) -> None:
    expected = _train(ranks, tmp_path / "plain", [], options)
    assert _train(ranks, tmp_path / "elastic", leave_after, options) == expected


def test_more_batches_per_step_change_no_step_of_limits_and_validations(ranks: FrameworkRanks, tmp_path: Path) -> None:
    options = {"limit_train_batches": 3, "val_check_interval": 2, "frequency": 2, "num_sanity_val_steps": 0}
    plain = _train(ranks, tmp_path / "plain", [], {**options, "batch_size": 2})
    divided = _train(ranks, tmp_path / "divided", [2], {**options, "batch_size": 1, "global_batch": 2})
    assert _list_places(divided) == _list_places(plain)


def _list_places(lines: list[str]) -> list[tuple[str, ...]]:
    """Return kind, epoch, step and learning rate of each line, once per step. Ends of micro-batches are left out."""
    places = [(*line.split()[:3], line.split()[-1]) for line in lines if not line.startswith("stepped")]
    return [place for place, before in zip(places, [(), *places], strict=False) if place != before]


def test_manual_optimization_is_refused(ranks: FrameworkRanks, tmp_path: Path) -> None:
    training = ElasticTraining(ranks, tmp_path, PROBE, [json.dumps({"manual": True})])
    with pytest.raises(AssertionError):
        training.run(1)
    (status,) = training.statuses[0]
    assert status["phase"] == "failed"
    assert "automatic_optimization" in status["reason"]
