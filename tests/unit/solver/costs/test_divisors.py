"""Divisors."""

from __future__ import annotations

from scheduler.solver.costs.strategy_space import list_divisors


def test_divisors_are_complete_and_ascending() -> None:
    for number in range(1, 200):
        assert list_divisors(number) == [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def test_large_number_is_fast() -> None:
    assert len(list_divisors(2**20 * 3**10)) == 21 * 11
