"""The integration with the Trainer of Hugging Face: evaluations, damage and non-finite losses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.framework_probes import LONG_WITH_FRAMEWORKS, flip_bit, make_ranks_fixture, read_printed
from tests.e2e.framework_trainings import REPOSITORY, ElasticTraining, FrameworkRanks

PROBE = REPOSITORY / "tests" / "e2e" / "transformers_probe.py"

pytestmark = LONG_WITH_FRAMEWORKS
ranks = make_ranks_fixture("transformers.trainer")


def _start(ranks: FrameworkRanks, root: Path, options: dict[str, Any]) -> ElasticTraining:
    return ElasticTraining(ranks, root, PROBE, [json.dumps(options)])


@pytest.mark.parametrize(
    ("options", "leave_after", "evaluations"),
    [
        pytest.param({"eval_strategy": "steps", "eval_steps": 2}, 4, [2, 4, 6, 8, 10, 12], id="steps"),
        pytest.param({"eval_strategy": "epoch"}, 6, [6, 12], id="epoch"),
        pytest.param({"eval_strategy": "epoch"}, 4, [6, 12], id="none due"),
    ],
)
def test_an_evaluation_that_is_due_at_the_exit_is_made_up_for(
    ranks: FrameworkRanks, tmp_path: Path, options: dict[str, Any], leave_after: int, evaluations: list[int]
) -> None:
    training = _start(ranks, tmp_path, options)
    training.run(1, until=leave_after)
    assert f"evaluation {leave_after}" not in read_printed(tmp_path)
    training.run(1)
    lines = read_printed(tmp_path)
    assert [line for line in lines if line.startswith("step")] == [f"step {step}" for step in range(1, 13)]
    assert [line for line in lines if line.startswith("eval")] == [f"evaluation {step}" for step in evaluations]


def test_a_stream_of_samples_is_refused(ranks: FrameworkRanks, tmp_path: Path) -> None:
    training = _start(ranks, tmp_path, {"stream": True, "max_steps": 8})
    with pytest.raises(AssertionError, match="train_dataset"):
        training.run(1)
    assert read_printed(tmp_path) == []


def test_a_flipped_bit_leads_to_the_previous_checkpoint(ranks: FrameworkRanks, tmp_path: Path) -> None:
    training = _start(ranks, tmp_path, {})
    for step in (3, 5):
        training.run(1, until=step)
    weights = tmp_path / "checkpoints" / "out" / "checkpoint-5" / "model.safetensors"
    flip_bit(weights)
    training.run(1)
    assert read_printed(tmp_path)[5] == "step 4"
    assert training.step == 12


def test_a_loss_that_is_not_finite_twice_leads_to_the_previous_checkpoint(
    ranks: FrameworkRanks, tmp_path: Path
) -> None:
    training = _start(ranks, tmp_path, {"nan_from": 6})
    for step in (3, 5):
        training.run(1, until=step)
    for _ in range(2):
        training.run(1)
        # As if the training had been stopped before its last checkpoint.
        (tmp_path / "checkpoints" / "out" / "checkpoint-12" / "ebbtide.json").unlink()
    training.run(1)
    steps = [line for line in read_printed(tmp_path) if line.startswith("step")]
    assert [steps[5], steps[12], steps[19]] == ["step 6", "step 6", "step 4"]
