"""Record of the intervals in which loans left an inference pool short."""

from __future__ import annotations

from dataclasses import dataclass

INTERVAL_S = 300.0
WINDOW_DAYS = 28
INTERVALS_PER_DAY = int(86_400 / INTERVAL_S)
WINDOW_INTERVALS = WINDOW_DAYS * INTERVALS_PER_DAY
_BUDGET_INTERVALS_MIN = WINDOW_INTERVALS // 2


@dataclass(frozen=True, slots=True)
class ShortageDay:
    """Counts of closed intervals of one day, counted in days since 1970 (UTC)."""

    day: int
    intervals: int
    short: int


@dataclass(frozen=True, slots=True)
class LentGpus:
    """GPUs of a pool that were lent or recalled at a moment."""

    at_s: float
    gpus: int


@dataclass(frozen=True, slots=True)
class ShortageRecord:
    """Intervals of five minutes, by day, and how many of them were short. It keeps `WINDOW_DAYS` days.

    An interval is short if at any reading in it demand exceeded the GPUs that were not lent, and not lent shortly
    before either: a returned node serves only after its cold start. Without loans no interval is short.

    Args:
        interval: number of the newest interval, which is still open; None before the first reading.
        is_short: whether the newest interval is short so far.
        lent: readings of lent GPUs that are not older than a cold start, oldest first.
    """

    days: tuple[ShortageDay, ...] = ()
    interval: int | None = None
    is_short: bool = False
    lent: tuple[LentGpus, ...] = ()

    @property
    def intervals(self) -> int:
        return sum(day.intervals for day in self.days)

    @property
    def short_intervals(self) -> int:
        return sum(day.short for day in self.days)

    @property
    def short_ratio(self) -> float:
        """Share of the closed intervals that were short; 0 before the first one."""
        return self.short_intervals / self.intervals if self.intervals else 0.0

    def compute_budget_left(self, target: float) -> float:
        """Return the share of the window's short intervals that is left, 0 to 1, if `target` of them may be short.

        The budget of a young record grows with it, from that of half a window on.
        """
        spent = self.short_intervals + self.is_short
        return max(0.0, 1.0 - spent / (target * max(_BUDGET_INTERVALS_MIN, self.intervals)))

    def observe(self, at_s: float, *, spare_gpus: float, lent_gpus: int, cold_start_s: float) -> ShortageRecord:
        """Return the record after a reading of demand, which is not older than the last one.

        Args:
            spare_gpus: GPUs of the pool, lent or not, beyond its demand, which counts up to the pool's capacity.
            lent_gpus: GPUs that are lent or recalled now.
        """
        lent = (*(each for each in self.lent if at_s - each.at_s <= cold_start_s), LentGpus(at_s, lent_gpus))
        unavailable = max(each.gpus for each in lent)
        is_short = unavailable > 0 and spare_gpus < unavailable
        number = int(at_s // INTERVAL_S)
        if self.interval is None or number <= self.interval:
            opened = number if self.interval is None else self.interval
            return ShortageRecord(self.days, opened, self.is_short or is_short, lent)
        return ShortageRecord(self._close_until(number), number, is_short, lent)

    def _close_until(self, number: int) -> tuple[ShortageDay, ...]:
        """Return the days after all intervals before `number` are closed, each as short as the newest."""
        assert self.interval is not None
        first_day = number // INTERVALS_PER_DAY - WINDOW_DAYS + 1
        days = {each.day: each for each in self.days if each.day >= first_day}
        begin = max(self.interval, first_day * INTERVALS_PER_DAY)
        for day in range(begin // INTERVALS_PER_DAY, (number - 1) // INTERVALS_PER_DAY + 1):
            end = min(number, (day + 1) * INTERVALS_PER_DAY)
            count = end - max(begin, day * INTERVALS_PER_DAY)
            before = days.get(day, ShortageDay(day, 0, 0))
            days[day] = ShortageDay(day, before.intervals + count, before.short + count * self.is_short)
        return tuple(days[day] for day in sorted(days))
