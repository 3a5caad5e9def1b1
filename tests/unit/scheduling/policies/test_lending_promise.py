"""The working quantile of a pool that promises a share of short intervals."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.domain.lending_policy import LendingPolicy
from scheduler.domain.shortages import ShortageDay, ShortageRecord
from scheduler.scheduling.policies.lending_promise import find_working_quantile


def record_of(days: int, short: int) -> ShortageRecord:
    return ShortageRecord(tuple(ShortageDay(day, 288, short if day == 0 else 0) for day in range(days)))


@pytest.mark.parametrize(
    ("days", "short", "quantile"),
    [
        (0, 0, 0.9999),
        (14, 0, 0.995),
        (28, 0, 0.99),
        (28, 2, 0.995),
        (28, 5, 0.998),
        (28, 9, 0.99995),
        (14, 4, 0.99995),
        (14, 400, 0.99995),
    ],
)
def test_quantile_follows_the_budget_that_is_left(days: int, short: int, quantile: float) -> None:
    rules = LendingPolicy(shortage_target=0.001)
    assert find_working_quantile(rules, record_of(days, short)) == pytest.approx(quantile, abs=1e-9)


def test_default_promise_is_one_interval_in_a_thousand() -> None:
    assert LendingPolicy().shortage_target == 0.001
    assert LendingPolicy(quantile=0.97).shortage_target is None


def test_fixed_quantile_does_not_move() -> None:
    assert find_working_quantile(LendingPolicy(quantile=0.97), record_of(14, 40)) == 0.97


def test_both_kinds_of_risk_at_once_are_refused() -> None:
    with pytest.raises(ValueError, match=r"quantile is 0\.9 and lending\.shortage_target is 0\.01"):
        LendingPolicy(quantile=0.9, shortage_target=0.01)


@given(target=st.floats(0.0001, 0.1), days=st.integers(0, 28), short=st.integers(0, 288))
def test_more_shortages_never_lower_the_quantile(target: float, days: int, short: int) -> None:
    rules = LendingPolicy(shortage_target=target)
    fewer, more = (find_working_quantile(rules, record_of(days, count)) for count in (short // 2, short))
    assert 0.5 <= fewer <= more < 1.0
