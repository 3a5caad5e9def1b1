import pytest

from scheduler.trainer.optimizer import BatchScalingRule, LearningRateDecay, LearningRateSchedule


def test_the_rate_rises_in_a_line_and_falls_to_a_tenth() -> None:
    rate = LearningRateSchedule(peak=1.0, steps=110, warmup_steps=10, decay=LearningRateDecay.COSINE)
    assert [rate.rate_at(step) for step in (0, 4, 9)] == pytest.approx([0.1, 0.5, 1.0])
    assert rate.rate_at(60) == pytest.approx(0.55)
    assert rate.rate_at(110) == rate.rate_at(500) == pytest.approx(0.1)


def test_without_a_decay_it_stays() -> None:
    assert {LearningRateSchedule(peak=0.5, steps=10).rate_at(step) for step in range(20)} == {0.5}


@pytest.mark.parametrize(
    ("rule", "factor"),
    [(BatchScalingRule.LINEAR, 4.0), (BatchScalingRule.SQUARE_ROOT, 2.0)],
    ids=["linear", "square-root"],
)
def test_a_batch_four_times_as_large_changes_the_rate_by_the_named_rule(rule: BatchScalingRule, factor: float) -> None:
    assert rule.compute_factor(8, 32) == pytest.approx(factor)
    assert rule.compute_factor(32, 8) == pytest.approx(1 / factor)
    assert rule.compute_factor(8, 8) == 1.0


def test_without_a_rule_another_batch_is_refused() -> None:
    assert BatchScalingRule.KEEP.compute_factor(8, 8) == 1.0
    with pytest.raises(ValueError, match="global_batch is 32, the training's was 8: keep it, or say how"):
        BatchScalingRule.KEEP.compute_factor(8, 32)
