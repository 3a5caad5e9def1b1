"""What a queue may be."""

from __future__ import annotations

import math

import pytest

from scheduler.domain.job_queue import JobQueue


def test_a_queue_of_which_nothing_is_said_has_no_guarantee_no_limit_and_weight_1() -> None:
    assert JobQueue("default") == JobQueue("default", guaranteed_gpus=0, limit_gpus=None, weight=1.0)
    assert JobQueue("closed", limit_gpus=0).limit_gpus == 0


@pytest.mark.parametrize(
    ("quota", "message"),
    [
        ({"guaranteed_gpus": -1}, "guaranteed_gpus must be at least 0, got -1"),
        ({"guaranteed_gpus": 4, "limit_gpus": 3}, "limit_gpus must be at least guaranteed_gpus = 4, or absent, got 3"),
        ({"limit_gpus": -1}, "limit_gpus must be at least guaranteed_gpus = 0, or absent, got -1"),
        ({"weight": 0.0}, "weight must be a positive, finite number, got 0.0"),
        ({"weight": math.nan}, "weight must be a positive, finite number, got nan"),
        ({"weight": math.inf}, "weight must be a positive, finite number, got inf"),
    ],
)
def test_a_wrong_queue_is_refused_with_field_value_and_what_is_allowed(quota: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        JobQueue("q", **quota)  # type: ignore[arg-type]  # wrong on purpose
