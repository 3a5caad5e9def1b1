"""The monthly safety report of a pool, from hand-made records."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.domain.decisions import ReasonCode
from scheduler.domain.fleet import DemandReading, Loan, LoanState
from scheduler.domain.lending_policy import LendingPolicy
from scheduler.domain.recall_receipts import JobExit, LeavingJob, RecallOutcome, RecallReceipt
from scheduler.domain.shortages import ShortageDay, ShortageRecord
from scheduler.scheduling.safety_report import Month, PoolMonth, Verdict, build_safety_report

OCTOBER = Month(2026, 10)
START_S, DAY_S = OCTOBER.start_s, 86_400.0
RULES = LendingPolicy(shortage_target=0.001, cold_start_s=300.0)


def a_receipt(
    number: int, *, at_s: float = 0.0, took_s: float = 60.0, outcome: RecallOutcome = RecallOutcome.IN_TIME, **more: Any
) -> RecallReceipt:
    asked_s = START_S + at_s
    return RecallReceipt(
        id=f"i0-{number}-{number + 1}",
        loan_id=f"i0-{number}",
        node="i0",
        pool="serve",
        gpus=8,
        code=ReasonCode.INFERENCE_NEEDS_NODE,
        detail="demand rose",
        asked_at_s=asked_s,
        return_by_s=asked_s + 300.0,
        freed_at_s=asked_s + took_s,
        settled_at_s=asked_s + took_s,
        closed_at_s=asked_s + took_s,
        outcome=outcome,
        **more,
    )


def a_month(**fields: Any) -> PoolMonth:
    empty = PoolMonth("serve", RULES, OCTOBER, OCTOBER.end_s, (), (), (), ShortageRecord(), 16, {})
    return replace(empty, **fields)


def test_month_without_records_has_no_data() -> None:
    report = build_safety_report(a_month())
    assert (report.verdict, report.recalls, report.return_times, report.days) == (Verdict.NO_DATA, 0, None, ())


def test_loans_count_within_the_month_only() -> None:
    loans = [
        Loan("a", "i0", "serve", LoanState.RETURNED, 0, START_S + 3600, lent_at_s=START_S - 3600, gpus=8),
        Loan("b", "i1", "serve", LoanState.ACTIVE, 0, 0, lent_at_s=OCTOBER.end_s - 3600),
        Loan("c", "i2", "serve", LoanState.OFFERED, START_S, START_S),
        Loan("d", "i3", "serve", LoanState.ACTIVE, 0, 0, lent_at_s=OCTOBER.end_s + 5.0, gpus=8),
    ]
    report = build_safety_report(a_month(loans=loans, node_gpus={"i1": 4}, now_s=OCTOBER.end_s + DAY_S))
    assert (report.loans, report.lent_gpu_hours, report.is_complete) == (2, 12.0, True)


def test_open_month_ends_now() -> None:
    loans = [Loan("a", "i0", "serve", LoanState.ACTIVE, 0, 0, lent_at_s=START_S, gpus=8)]
    report = build_safety_report(a_month(loans=loans, now_s=START_S + 7200.0))
    assert (report.lent_gpu_hours, report.until_s, report.is_complete) == (16.0, START_S + 7200.0, False)


def test_outcomes_times_and_the_longest_recall() -> None:
    took_s = [float(seconds) for seconds in range(1, 21)]
    receipts = [a_receipt(at, took_s=seconds) for at, seconds in enumerate(took_s)]
    cancelled = replace(a_receipt(90), outcome=RecallOutcome.CANCELLED, settled_at_s=START_S + 900.0)
    open_one = replace(a_receipt(91), outcome=None, settled_at_s=None)
    report = build_safety_report(a_month(receipts=[*receipts, cancelled, open_one]))
    assert report.return_times is not None
    times = report.return_times
    assert (times.p50_s, times.p95_s, times.max_s, times.deadline_ratio_max) == (10.0, 19.0, 20.0, 20.0 / 300.0)
    assert dict(report.outcomes) == {"in_time": 20, "late": 0, "cancelled": 1, "lost": 0}
    assert (report.recalls, report.open_recalls, report.longest) == (22, 1, receipts[-1])
    assert report.verdict is Verdict.KEPT


def test_late_return_breaks_the_promise_and_is_a_problem_of_its_day() -> None:
    job = LeavingJob("a", "ada", "id", "web", 8, exit=JobExit.PREEMPTED, lost_gpu_s=7200.0, lost_steps=9.0)
    late = a_receipt(1, at_s=2 * DAY_S, took_s=310.0, outcome=RecallOutcome.LATE, jobs=(job,))
    lost = a_receipt(2, at_s=3 * DAY_S, outcome=RecallOutcome.LOST)
    report = build_safety_report(a_month(receipts=[late, lost, a_receipt(3, at_s=4 * DAY_S)]))
    assert (report.verdict, report.lost_gpu_hours, report.lost_steps) == (Verdict.BROKEN, 2.0, 9.0)
    days = [(day.start_s, day.late, day.lost, day.lost_gpu_hours) for day in report.days]
    assert days == [(START_S + 2 * DAY_S, 1, 0, 2.0), (START_S + 3 * DAY_S, 0, 1, 0.0)]


def test_every_day_so_far_has_its_loans_recalls_and_short_intervals() -> None:
    loan = Loan("a", "i0", "serve", LoanState.RETURNED, 0, START_S + DAY_S + 7200, lent_at_s=START_S - 3600, gpus=8)
    receipts = [a_receipt(1, at_s=5.0, took_s=60.0), a_receipt(2, at_s=9.0, took_s=240.0)]
    record = ShortageRecord((ShortageDay(int(START_S // DAY_S) + 1, 288, 3),))
    report = build_safety_report(a_month(loans=[loan], receipts=receipts, record=record, now_s=START_S + 2.5 * DAY_S))
    days = [(day.lent_gpu_hours, day.recalls, day.deadline_ratio_max, day.short_intervals) for day in report.daily]
    assert days == [(192.0, 2, 0.8, 0), (16.0, 0, None, 3), (0.0, 0, None, 0)]
    assert [day.start_s for day in report.daily] == [START_S + DAY_S * number for number in range(3)]
    assert sum(day.lent_gpu_hours for day in report.daily) == report.lent_gpu_hours
    assert build_safety_report(a_month()).daily == ()


@pytest.mark.parametrize(
    ("target", "short", "verdict"),
    [(0.01, 2, Verdict.KEPT), (0.01, 3, Verdict.BROKEN), (None, 288, Verdict.KEPT)],
    ids=["within the target", "above the target", "no target"],
)
def test_short_intervals_are_held_against_the_target(target: float | None, short: int, verdict: Verdict) -> None:
    first = int(START_S // DAY_S)
    record = ShortageRecord((ShortageDay(first - 1, 288, 99), ShortageDay(first, 288, short)))
    rules = LendingPolicy(quantile=0.99) if target is None else replace(RULES, shortage_target=target)
    report = build_safety_report(a_month(record=record, rules=rules))
    assert (report.intervals, report.short_intervals, report.recomputed_intervals) == (288, short, 0)
    assert report.verdict is verdict


def record_demand(gpus: list[int], loans: list[Loan]) -> tuple[list[DemandReading], ShortageRecord]:
    """Return readings every ten minutes, and the record that the control loop makes of them."""
    record, readings = ShortageRecord(), list[DemandReading]()
    for number, used in enumerate(gpus):
        at_s = START_S + 600.0 * number
        lent = sum(8 for loan in loans if loan.lent_at_s is not None and loan.lent_at_s <= at_s < loan.state_since_s)
        record = record.observe(at_s, spare_gpus=16.0 - used, lent_gpus=lent, cold_start_s=300.0)
        readings.append(DemandReading(at_s, float(used), float(used)))
    return readings, record


@given(
    st.lists(st.integers(0, 16), min_size=150, max_size=450),
    st.lists(st.tuples(st.integers(0, 300), st.integers(1, 60)), max_size=4),
)
def test_intervals_from_readings_equal_those_of_the_record(gpus: list[int], lent: list[tuple[int, int]]) -> None:
    loans = [
        Loan(f"{at}", "i0", "serve", LoanState.RETURNED, 0, START_S + (first + count) * 600.0, gpus=8)
        for at, (first, count) in enumerate(lent)
    ]
    loans = [replace(loan, lent_at_s=START_S + first * 600.0) for loan, (first, _) in zip(loans, lent, strict=True)]
    readings, record = record_demand(gpus, loans)
    now_s = readings[-1].at_s
    recorded = build_safety_report(a_month(record=record, loans=loans, now_s=now_s))
    recomputed = build_safety_report(a_month(readings=readings, loans=loans, now_s=now_s))
    assert recomputed.recomputed_intervals == recomputed.intervals == recorded.intervals
    assert recomputed.short_intervals == recorded.short_intervals
    later = replace(record, days=record.days[1:])
    mixed = build_safety_report(a_month(readings=readings, record=later, loans=loans, now_s=now_s))
    assert (mixed.intervals, mixed.short_intervals) == (recorded.intervals, recorded.short_intervals)


@pytest.mark.parametrize(
    "text", ["", "2026", "2026-13", "2026-00", "26-10", "2026-1", "2026-10-01", "0000-01", "９０２６-10"]
)
def test_text_that_is_no_month(text: str) -> None:
    with pytest.raises(ValueError, match="month must be like 2026-10"):
        Month.parse(text)


def test_month_has_its_bounds_and_names() -> None:
    assert Month.parse("2026-10") == OCTOBER == Month.at(START_S) == Month.at(OCTOBER.end_s - 1.0)
    assert (OCTOBER.end_s - START_S, str(OCTOBER), OCTOBER.title) == (31 * DAY_S, "2026-10", "October 2026")
    assert Month.at(OCTOBER.end_s) == Month(2026, 11)
