"""The safety report of an inference pool: what lending did to it in one calendar month."""

from __future__ import annotations

import calendar
import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from itertools import accumulate

from scheduler.domain.fleet import DemandReading, Loan
from scheduler.domain.lending_policy import LendingPolicy
from scheduler.domain.recall_receipts import RecallOutcome, RecallReceipt, count_outcomes
from scheduler.domain.shortages import INTERVALS_PER_DAY, ShortageDay, ShortageRecord

HOUR_S = 3600.0
DAY_S = 86_400
YEAR_MIN, YEAR_MAX = 1970, 9998


@dataclass(frozen=True, slots=True)
class Month:
    """A calendar month in UTC.

    Raises:
        ValueError: the year is not from 1970 to 9998, or the month not from 1 to 12.
    """

    year: int
    month: int

    def __post_init__(self) -> None:
        if not (YEAR_MIN <= self.year <= YEAR_MAX and 1 <= self.month <= 12):
            raise ValueError(f"month must be like 2026-10, got {self.year:04d}-{self.month:02d}")

    @classmethod
    def parse(cls, text: str) -> Month:
        """Return the month of a text like `2026-10`.

        Raises:
            ValueError: the text has another form.
        """
        year, dash, month = text.partition("-")
        if not (dash and len(year) == 4 and len(month) == 2 and (year + month).isdecimal() and text.isascii()):
            raise ValueError(f"month must be like 2026-10, got {text!r}")
        return cls(int(year), int(month))

    @classmethod
    def at(cls, at_s: float) -> Month:
        moment = datetime.fromtimestamp(at_s, UTC)
        return cls(moment.year, moment.month)

    def __str__(self) -> str:
        return f"{self.year:04d}-{self.month:02d}"

    @property
    def title(self) -> str:
        return f"{calendar.month_name[self.month]} {self.year}"

    @property
    def start_s(self) -> float:
        return datetime(self.year, self.month, 1, tzinfo=UTC).timestamp()

    @property
    def end_s(self) -> float:
        return self.start_s + calendar.monthrange(self.year, self.month)[1] * DAY_S


class Verdict(StrEnum):
    """KEPT: every recalled node was free in time, and no more intervals were short than promised. NO_DATA: the pool has
    no demand readings and no loans of the month.
    """

    KEPT = "kept"
    BROKEN = "broken"
    NO_DATA = "no_data"


@dataclass(frozen=True, slots=True)
class ReturnTimes:
    """Seconds from recalls to returns, by nearest rank.

    `deadline_ratio_max` is the largest share of its deadline that a return used.
    """

    p50_s: float
    p95_s: float
    max_s: float
    deadline_ratio_max: float


@dataclass(frozen=True, slots=True)
class ProblemDay:
    """A day (UTC) with late or lost recalls, short intervals, or lost work."""

    start_s: float
    late: int
    lost: int
    short_intervals: int
    lost_gpu_hours: float


@dataclass(frozen=True, slots=True)
class LendingDay:
    """A day (UTC) of lending. Recalls count on the day on which they were made.

    `deadline_ratio_max` is the largest share of its deadline that a return of these recalls used; None without any.
    """

    start_s: float
    lent_gpu_hours: float
    recalls: int
    deadline_ratio_max: float | None
    short_intervals: int


@dataclass(frozen=True, slots=True)
class PoolMonth:
    """Everything that is recorded about the lending of a pool in a month.

    Args:
        now_s: time of the newest recorded state.
        receipts: receipts of recalls that were made in the month.
        loans: live and ended loans that overlap the month.
        readings: demand readings from the start of the month, oldest first. Later ones are ignored.
        record: the pool's current record of shortages, which covers the last days only.
        capacity_gpus: current capacity, for the days before the record.
        node_gpus: GPUs of current nodes, for loans that were recorded without.
    """

    pool: str
    rules: LendingPolicy
    month: Month
    now_s: float
    receipts: Sequence[RecallReceipt]
    loans: Sequence[Loan]
    readings: Sequence[DemandReading]
    record: ShortageRecord
    capacity_gpus: int
    node_gpus: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class SafetyReport:
    """The report of one pool and month. `summary` is one sentence with the verdict.

    Args:
        until_s: end of the month, or of what is recorded so far.
        loans: nodes that training could use, however often.
        outcomes: number of recalls by outcome; `open_recalls` have none yet.
        target: promised share of short intervals; None if the pool fixes a quantile.
        recomputed_intervals: intervals that are older than the record of shortages. They are computed from demand
            readings and loans, with the present capacity of the pool.
        longest: the receipt of the recall that took longest to return.
        days: days with problems, oldest first.
        daily: every day from the start of the month to `until_s`. Empty if nothing is recorded.
    """

    pool: str
    month: Month
    until_s: float
    is_complete: bool
    verdict: Verdict
    summary: str
    loans: int
    lent_gpu_hours: float
    recalls: int
    outcomes: Mapping[RecallOutcome, int]
    open_recalls: int
    return_times: ReturnTimes | None
    intervals: int
    short_intervals: int
    recomputed_intervals: int
    target: float | None
    lost_gpu_hours: float
    lost_steps: float
    longest: RecallReceipt | None
    days: tuple[ProblemDay, ...]
    daily: tuple[LendingDay, ...]

    @property
    def short_ratio(self) -> float:
        return self.short_intervals / self.intervals if self.intervals else 0.0


def build_safety_report(month: PoolMonth) -> SafetyReport:
    """Return the report. Equal records give equal reports."""
    until_s = min(month.month.end_s, max(month.now_s, month.month.start_s))
    outcomes = count_outcomes(month.receipts)
    short_days, recomputed = _count_short_intervals(month)
    intervals = sum(day.intervals for day in short_days)
    short = sum(day.short for day in short_days)
    used = [loan for loan in month.loans if loan.lent_at_s is not None and loan.lent_at_s < until_s]
    lent_gpu_s = _compute_lent_gpu_s(used, month, until_s)
    returned = [receipt for receipt in month.receipts if receipt.return_s is not None]
    has_data = bool(intervals or used or month.receipts)
    target = month.rules.shortage_target
    is_broken = outcomes[RecallOutcome.LATE] > 0 or (target is not None and short > target * intervals)
    verdict = Verdict.NO_DATA if not has_data else Verdict.BROKEN if is_broken else Verdict.KEPT
    return SafetyReport(
        pool=month.pool,
        month=month.month,
        until_s=until_s,
        is_complete=month.now_s >= month.month.end_s,
        verdict=verdict,
        summary=_summarize(month, verdict, outcomes, intervals=intervals, short=short),
        loans=len(used),
        lent_gpu_hours=sum(lent_gpu_s.values()) / HOUR_S,
        recalls=len(month.receipts),
        outcomes=outcomes,
        open_recalls=len(month.receipts) - sum(outcomes.values()),
        return_times=_measure_returns(returned),
        intervals=intervals,
        short_intervals=short,
        recomputed_intervals=recomputed,
        target=target,
        lost_gpu_hours=sum(receipt.lost_gpu_s for receipt in month.receipts) / HOUR_S,
        lost_steps=sum(receipt.lost_steps for receipt in month.receipts),
        longest=max(returned, key=lambda receipt: (receipt.return_s or 0.0, receipt.id), default=None),
        days=_list_problem_days(month.receipts, short_days),
        daily=_list_days(month, lent_gpu_s, short_days, until_s) if has_data else (),
    )


def _compute_lent_gpu_s(loans: Iterable[Loan], month: PoolMonth, until_s: float) -> Mapping[int, float]:
    """Return the GPU-seconds of the loans in the month by day."""
    lent = defaultdict[int, float](float)
    for loan in loans:
        assert loan.lent_at_s is not None
        start_s = max(month.month.start_s, loan.lent_at_s)
        end_s = until_s if loan.is_live else min(until_s, loan.state_since_s)
        for day in range(int(start_s // DAY_S), math.ceil(end_s / DAY_S)):
            covered_s = min(end_s, (day + 1) * DAY_S) - max(start_s, day * DAY_S)
            lent[day] += covered_s * _get_gpus(loan, month)
    return lent


def _get_gpus(loan: Loan, month: PoolMonth) -> int:
    return loan.gpus or month.node_gpus.get(loan.node, 0)


def _measure_returns(returned: Sequence[RecallReceipt]) -> ReturnTimes | None:
    if not returned:
        return None
    times_s = sorted(receipt.return_s or 0.0 for receipt in returned)
    p50_s, p95_s = (times_s[math.ceil(level * len(times_s)) - 1] for level in (0.5, 0.95))
    return ReturnTimes(p50_s, p95_s, times_s[-1], max(map(_get_deadline_ratio, returned)))


def _get_deadline_ratio(receipt: RecallReceipt) -> float:
    """Return the share of its deadline that a return used."""
    return (receipt.return_s or 0.0) / max(1e-9, receipt.return_by_s - receipt.asked_at_s)


def _count_short_intervals(month: PoolMonth) -> tuple[tuple[ShortageDay, ...], int]:
    """Return the days of the month with their intervals, and how many intervals the record no longer covers."""
    first, last = int(month.month.start_s // DAY_S), int(month.month.end_s // DAY_S)
    recorded = {day.day: day for day in month.record.days}
    oldest = min(recorded, default=last)
    older = [day for day in _recompute_days(month) if first <= day.day < min(oldest, last)]
    days = {day.day: day for day in older} | {day: recorded[day] for day in recorded if first <= day < last}
    return tuple(days[day] for day in sorted(days)), sum(day.intervals for day in older)


def _recompute_days(month: PoolMonth) -> Iterable[ShortageDay]:
    """Return the days' intervals as they follow from the demand readings and the loans."""
    lent = [
        (at_s, gpus)
        for loan in month.loans
        if loan.lent_at_s is not None
        for at_s, gpus in (
            (loan.lent_at_s, _get_gpus(loan, month)),
            (math.inf if loan.is_live else loan.state_since_s, -_get_gpus(loan, month)),
        )
    ]
    changes = sorted(lent)
    times_s, levels = [at_s for at_s, _ in changes], [0, *accumulate(gpus for _, gpus in changes)]
    record, days = ShortageRecord(), dict[int, ShortageDay]()
    for reading in month.readings:
        if reading.at_s >= month.month.end_s + DAY_S / INTERVALS_PER_DAY:
            break
        opened = record.interval
        record = record.observe(
            reading.at_s,
            spare_gpus=month.capacity_gpus - min(reading.gpus, month.capacity_gpus),
            lent_gpus=levels[bisect_right(times_s, reading.at_s)],
            cold_start_s=month.rules.cold_start_s,
        )
        if record.interval != opened:
            days |= {day.day: day for day in record.days}
    return days.values()


def _list_problem_days(receipts: Iterable[RecallReceipt], short_days: Iterable[ShortageDay]) -> tuple[ProblemDay, ...]:
    late, lost, lost_gpu_s = Counter[int](), Counter[int](), defaultdict[int, float](float)
    for receipt in receipts:
        day = int(receipt.asked_at_s // DAY_S)
        late[day] += receipt.outcome is RecallOutcome.LATE
        lost[day] += receipt.outcome is RecallOutcome.LOST
        lost_gpu_s[day] += receipt.lost_gpu_s
    short = {day.day: day.short for day in short_days}
    days = sorted({*late, *lost, *short})
    return tuple(
        ProblemDay(float(day * DAY_S), late[day], lost[day], short.get(day, 0), lost_gpu_s[day] / HOUR_S)
        for day in days
        if late[day] or lost[day] or short.get(day) or lost_gpu_s[day]
    )


def _list_days(
    month: PoolMonth, lent_gpu_s: Mapping[int, float], short_days: Iterable[ShortageDay], until_s: float
) -> tuple[LendingDay, ...]:
    recalls, ratios = Counter[int](), defaultdict[int, float | None](lambda: None)
    for receipt in month.receipts:
        day = int(receipt.asked_at_s // DAY_S)
        recalls[day] += 1
        if receipt.return_s is not None:
            ratios[day] = max(ratios[day] or 0.0, _get_deadline_ratio(receipt))
    short = {day.day: day.short for day in short_days}
    days = range(int(month.month.start_s // DAY_S), math.ceil(until_s / DAY_S))
    return tuple(
        LendingDay(
            start_s=float(day * DAY_S),
            lent_gpu_hours=lent_gpu_s.get(day, 0.0) / HOUR_S,
            recalls=recalls[day],
            deadline_ratio_max=ratios[day],
            short_intervals=short.get(day, 0),
        )
        for day in days
    )


def _summarize(
    month: PoolMonth, verdict: Verdict, outcomes: Mapping[RecallOutcome, int], *, intervals: int, short: int
) -> str:
    title, target = month.month.title, month.rules.shortage_target
    if verdict is Verdict.NO_DATA:
        return f"Nothing is recorded of pool {month.pool} in {title}."
    lateness, returned = outcomes[RecallOutcome.LATE], outcomes[RecallOutcome.LATE] + outcomes[RecallOutcome.IN_TIME]
    if not returned:
        recalls = "no node was returned after a recall"
    elif lateness:
        recalls = f"{lateness} of {returned} recalled nodes {'was' if lateness == 1 else 'were'} returned late"
    else:
        recalls = f"{'the one recalled node was' if returned == 1 else f'all {returned} recalled nodes were'} in time"
    ratio = short / intervals if intervals else 0.0
    shortage = f"{short} of {intervals:,} intervals ({ratio:.3%}) were short"
    if target is not None:
        shortage += f", {'more than' if short > target * intervals else 'within'} the target of {target:.3%}"
    promise = "Lending kept its promise to" if verdict is Verdict.KEPT else "Lending broke its promise to"
    return f"{promise} pool {month.pool} in {title}: {recalls}, and {shortage}."
