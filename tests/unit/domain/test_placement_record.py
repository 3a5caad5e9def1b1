"""Refusals of a job's pods."""

from __future__ import annotations

from scheduler.domain.placement_record import FREE_REFUSALS, NO_PLACEMENT_RECORD, PodRefusal

REFUSAL = PodRefusal("n0", "OutOfcpu", "too little cpu")


def test_backoff_and_avoidance_double_and_later_refusals_cost_retries() -> None:
    record = NO_PLACEMENT_RECORD
    pauses_s: list[float] = []
    avoidances_s: list[float] = []
    for number in range(4):
        record = record.with_refusal(REFUSAL, 1000.0)
        assert record.costs_retry is (number >= FREE_REFUSALS)
        assert record.retry_at_s is not None
        pauses_s.append(record.retry_at_s - 1000.0)
        avoidances_s.append(record.avoided[0].until_s - 1000.0)
    assert pauses_s == [5.0, 10.0, 20.0, 40.0]
    assert avoidances_s == [120.0, 240.0, 480.0, 960.0]


def test_node_is_avoided_for_a_while() -> None:
    record = NO_PLACEMENT_RECORD.with_refusal(REFUSAL, 0.0)
    assert record.find_avoided(119.0) == ("n0",)
    assert record.find_avoided(120.0) == ()


def test_start_ends_the_streak_and_keeps_the_avoidance() -> None:
    record = NO_PLACEMENT_RECORD.with_refusal(REFUSAL, 0.0).with_start()
    assert (record.streak, record.last, record.retry_at_s) == (0, None, None)
    assert record.find_avoided(1.0) == ("n0",)


def test_backoff_and_avoidance_are_bounded() -> None:
    record = NO_PLACEMENT_RECORD
    for _ in range(1100):
        record = record.with_refusal(REFUSAL, 0.0)
    assert record.retry_at_s == 300.0
    assert record.avoided[0].until_s == 3600.0
