"""Learning rate schedule and scaling rules."""

import pytest

from scheduler.trainer.optimizer import BatchScalingRule, LearningRateDecay, LearningRateSchedule


def test_learning_rate_warms_up_linearly_and_decays_to_a_tenth() -> None:
    schedule = LearningRateSchedule(peak=1.0, steps=110, warmup_steps=10, decay=LearningRateDecay.COSINE)
    assert [schedule.rate_at(step) for step in (0, 4, 9)] == pytest.approx([0.1, 0.5, 1.0])
    assert schedule.rate_at(60) == pytest.approx(0.55)
    assert schedule.rate_at(110) == schedule.rate_at(500) == pytest.approx(0.1)


def test_learning_rate_is_constant_without_decay() -> None:
    assert {LearningRateSchedule(peak=0.5, steps=10).rate_at(step) for step in range(20)} == {0.5}


@pytest.mark.parametrize(
    ("rule", "factor"),
    [(BatchScalingRule.LINEAR, 4.0), (BatchScalingRule.SQUARE_ROOT, 2.0)],
    ids=["linear", "square-root"],
)
def test_scaling_rule_follows_a_changed_batch(rule: BatchScalingRule, factor: float) -> None:
    assert rule.compute_factor(8, 32) == pytest.approx(factor)
    assert rule.compute_factor(32, 8) == pytest.approx(1 / factor)
    assert rule.compute_factor(8, 8) == 1.0


def test_changed_batch_is_rejected_without_a_scaling_rule() -> None:
    assert BatchScalingRule.KEEP.compute_factor(8, 8) == 1.0
    with pytest.raises(ValueError, match=r"32.*8.*--batch-rule"):
        BatchScalingRule.KEEP.compute_factor(8, 32)
