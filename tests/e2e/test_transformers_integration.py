"""The integration with the Trainer of Hugging Face: evaluations, damage and non-finite losses."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.framework_trainings import (
    REPOSITORY,
    ElasticTraining,
    FrameworkRanks,
    has_frameworks,
    launch_frameworks,
)

PROBE = REPOSITORY / "tests" / "e2e" / "transformers_probe.py"

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.full,
    pytest.mark.skipif(not has_frameworks(), reason="no training frameworks: run `make frameworks`"),
]


@pytest.fixture(scope="module")
def ranks() -> Iterator[FrameworkRanks]:
    with launch_frameworks("transformers.trainer") as launched:
        yield launched


def _start(ranks: FrameworkRanks, root: Path, options: dict[str, Any]) -> ElasticTraining:
    return ElasticTraining(ranks, root, PROBE, [json.dumps(options)])


def _read_lines(root: Path) -> list[str]:
    return re.findall(r"^> (.*)$", "\n".join(path.read_text() for path in sorted(root.glob("run-*/log-0"))), re.M)


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
    assert f"evaluation {leave_after}" not in _read_lines(tmp_path)
    training.run(1)
    lines = _read_lines(tmp_path)
    assert [line for line in lines if line.startswith("step")] == [f"step {step}" for step in range(1, 13)]
    assert [line for line in lines if line.startswith("eval")] == [f"evaluation {step}" for step in evaluations]


def test_a_stream_of_samples_is_refused(ranks: FrameworkRanks, tmp_path: Path) -> None:
    training = _start(ranks, tmp_path, {"stream": True, "max_steps": 8})
    with pytest.raises(AssertionError, match="train_dataset"):
        training.run(1)
    assert _read_lines(tmp_path) == []


def test_a_flipped_bit_leads_to_the_previous_checkpoint(ranks: FrameworkRanks, tmp_path: Path) -> None:
    training = _start(ranks, tmp_path, {})
    for step in (3, 5):
        training.run(1, until=step)
    weights = tmp_path / "checkpoints" / "out" / "checkpoint-5" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    training.run(1)
    assert _read_lines(tmp_path)[5] == "step 4"
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
    steps = [line for line in _read_lines(tmp_path) if line.startswith("step")]
    assert [steps[5], steps[12], steps[19]] == ["step 6", "step 6", "step 4"]
