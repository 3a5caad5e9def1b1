"""The record of intervals in which loans left a pool short."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.domain.shortages import INTERVAL_S, WINDOW_DAYS, ShortageDay, ShortageRecord

DAY_S = 86_400.0


def observe(record: ShortageRecord, at_s: float, *, spare: float, lent: int) -> ShortageRecord:
    return record.observe(at_s, spare_gpus=spare, lent_gpus=lent, cold_start_s=600.0)


def test_an_interval_is_short_if_any_reading_in_it_is() -> None:
    record = ShortageRecord()
    for at_s, spare in ((0.0, 16.0), (100.0, 4.0), (200.0, 16.0), (300.0, 16.0), (600.0, 16.0)):
        record = observe(record, at_s, spare=spare, lent=8)
    assert (record.intervals, record.short_intervals, record.short_ratio) == (2, 1, 0.5)


def test_without_loans_no_interval_is_short() -> None:
    record = ShortageRecord()
    for at_s in (0.0, 300.0, 600.0):
        record = observe(record, at_s, spare=0.0, lent=0)
    assert (record.intervals, record.short_intervals) == (2, 0)


def test_returned_nodes_serve_only_after_their_cold_start() -> None:
    record = observe(ShortageRecord(), 0.0, spare=8.0, lent=8)
    for at_s, is_short in ((300.0, True), (600.0, True), (900.0, False)):
        record = observe(record, at_s, spare=4.0, lent=0)
        assert record.is_short is is_short


def test_a_shortage_lasts_until_the_next_reading() -> None:
    record = observe(ShortageRecord(), 0.0, spare=4.0, lent=8)
    record = observe(record, 4 * INTERVAL_S, spare=16.0, lent=8)
    assert (record.intervals, record.short_intervals, record.is_short) == (4, 4, False)


def test_days_outside_the_window_are_forgotten() -> None:
    record = observe(ShortageRecord(), 0.0, spare=4.0, lent=8)
    record = observe(record, 1.5 * DAY_S, spare=16.0, lent=8)
    assert [(day.day, day.intervals, day.short) for day in record.days] == [(0, 288, 288), (1, 144, 144)]
    record = observe(record, 29.5 * DAY_S, spare=16.0, lent=8)
    assert [day.day for day in record.days] == list(range(2, 30))
    assert (record.intervals, record.short_intervals) == (27 * 288 + 144, 0)


def test_budget_counts_the_open_interval() -> None:
    record = observe(ShortageRecord(), 0.0, spare=4.0, lent=8)
    assert record.compute_budget_left(0.001) == pytest.approx(1 - 1 / 4.032)
    assert record.compute_budget_left(0.0001) == 0.0
    assert ShortageRecord().compute_budget_left(0.001) == 1.0


def test_budget_grows_with_the_record_to_that_of_the_window() -> None:
    days = tuple(ShortageDay(day, 288, 2 if day == 0 else 0) for day in range(WINDOW_DAYS))
    left = [ShortageRecord(days[:count]).compute_budget_left(0.001) for count in (1, 14, 21, 28)]
    assert left == pytest.approx([1 - 2 / 4.032, 1 - 2 / 4.032, 1 - 2 / 6.048, 1 - 2 / 8.064])


@settings(max_examples=50, deadline=None)
@given(readings=st.lists(st.tuples(st.floats(0.0, 3 * DAY_S), st.integers(0, 16), st.integers(0, 16)), max_size=20))
def test_counts_stay_within_the_time_observed(readings: list[tuple[float, int, int]]) -> None:
    record, at_s = ShortageRecord(), 0.0
    for pause_s, spare, lent in readings:
        at_s += pause_s
        record = observe(record, at_s, spare=float(spare), lent=lent)
        assert 0 <= record.short_intervals <= record.intervals <= at_s / INTERVAL_S + 1
        assert len(record.days) <= WINDOW_DAYS
        assert sorted(day.day for day in record.days) == [day.day for day in record.days]
