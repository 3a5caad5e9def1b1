"""The integration with Accelerate: the loss it reports, damage and non-finite losses."""

from __future__ import annotations

import re
from pathlib import Path

from tests.e2e.framework_probes import LONG_WITH_FRAMEWORKS, flip_bit, make_ranks_fixture
from tests.e2e.framework_trainings import REPOSITORY, ElasticTraining, FrameworkRanks

PROBE = REPOSITORY / "tests" / "e2e" / "accelerate_probe.py"
NEVER = "1000"

pytestmark = LONG_WITH_FRAMEWORKS
ranks = make_ranks_fixture("accelerate")


def _read_steps(root: Path, run: int) -> list[int]:
    """Return the steps that a generation has trained."""
    return [int(step) for step in re.findall(r"^> step (\d+)", (root / f"run-{run}" / "log-0").read_text(), re.M)]


def test_the_step_before_a_break_is_counted(ranks: FrameworkRanks, tmp_path: Path) -> None:
    training = ElasticTraining(ranks, tmp_path, PROBE, [NEVER, "5"])
    training.run(1)
    assert (training.step, training.statuses[0][0]["phase"]) == (5, "succeeded")
    assert _read_steps(tmp_path, 1) == [1, 2, 3, 4, 5]


def test_a_flipped_bit_leads_to_the_previous_checkpoint(ranks: FrameworkRanks, tmp_path: Path) -> None:
    training = ElasticTraining(ranks, tmp_path, PROBE, [NEVER])
    for step in (3, 5):
        training.run(1, until=step)
    assert training.statuses[-1][0]["loss"] > 0
    weights = tmp_path / "checkpoints" / "elastic-checkpoints" / "step-5" / "model.safetensors"
    flip_bit(weights)
    training.run(1)
    assert _read_steps(tmp_path, 3) == list(range(4, 13))


def test_a_loss_that_is_not_finite_twice_leads_to_the_previous_checkpoint(
    ranks: FrameworkRanks, tmp_path: Path
) -> None:
    healthy = ElasticTraining(ranks, tmp_path, PROBE, [NEVER])
    for step in (3, 5):
        healthy.run(1, until=step)
    failing = ElasticTraining(ranks, tmp_path, PROBE, ["6"])
    failing.statuses = healthy.statuses
    for _ in range(2):
        failing.run(1)  # it is stopped before another checkpoint, as a training without progress would be
    healthy.run(1)
    assert [_read_steps(tmp_path, run)[0] for run in (3, 4, 5)] == [6, 6, 4]
