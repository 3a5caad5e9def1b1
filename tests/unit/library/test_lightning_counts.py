"""Limits and intervals of a Lightning Trainer mean the same steps, whatever a step takes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ebbtide.integrations.lightning_counts import scale_counts


def _scale(*, limit: float = 1.0, interval: Any = 1.0, frequency: int = 1, asked: int = 1, passes: int = 2) -> Any:
    config = SimpleNamespace(interval="step", frequency=frequency)
    trainer = SimpleNamespace(limit_train_batches=limit, val_check_interval=interval, lr_scheduler_configs=[config])
    scale_counts(trainer, steps_per_epoch=25, asked=asked, passes=passes)
    return trainer


@pytest.mark.parametrize(
    ("limit", "asked", "scaled"),
    [(1.0, 1, 1.0), (4, 1, 8), (4, 2, 4), (5, 2, 6), (0, 1, 0), (0.5, 1, 24), (0.01, 1, 2)],
)
def test_a_limit_of_batches_keeps_its_steps(limit: float, asked: int, scaled: float) -> None:
    assert _scale(limit=limit, asked=asked).limit_train_batches == scaled


@pytest.mark.parametrize(
    ("interval", "limit", "asked", "scaled"),
    [
        (2, 1.0, 1, 4),
        (4, 1.0, 2, 4),
        (1.0, 1.0, 1, 1.0),
        (0.1, 1.0, 1, 4),
        (0.5, 4, 1, 4),
        ("00:01:00", 4, 1, "00:01:00"),
    ],
)
def test_a_validation_interval_keeps_its_steps(interval: Any, limit: float, asked: int, scaled: Any) -> None:
    assert _scale(interval=interval, limit=limit, asked=asked).val_check_interval == scaled


def test_a_validation_within_a_step_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`val_check_interval` is 3"):
        _scale(interval=3, asked=2)


@pytest.mark.parametrize(("frequency", "asked"), [(1, 1), (3, 1), (3, 2), (4, 2)])
def test_a_scheduler_advances_after_the_same_steps(frequency: int, asked: int) -> None:
    scaled = _scale(frequency=frequency, asked=asked, passes=3).lr_scheduler_configs[0].frequency
    steps = range(1, 25)
    assert [step * 3 % scaled == 0 for step in steps] == [step * asked % frequency == 0 for step in steps]
