"""ReadingBin: the readings of demand in one interval, reduced to what a forecast needs of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from math import floor

from scheduler.domain.fleet import DemandReading

ROUNDING_BINS = 1e-9
"""Part of a bin by which a time may be below its beginning, because times are rounded."""


@dataclass(frozen=True, slots=True)
class ReadingBin:
    """Readings of a series in one bin, in order of time: the first, the last, their largest demand and their number."""

    first_at_s: float
    first_gpus: float
    last_at_s: float
    last_gpus: float
    peak_gpus: float
    readings: int


def find_bin(at_s: float, bin_s: float) -> int:
    """Return the number of the bin of a time; bin k begins at k x `bin_s`."""
    return floor(at_s / bin_s + ROUNDING_BINS)


def bin_readings(readings: Iterable[DemandReading], bin_s: float) -> Iterator[ReadingBin]:
    """Yield the bins of readings that are in order of time. Demand is what was asked for, also above the capacity."""
    for _, members in groupby(readings, key=lambda each: find_bin(each.at_s, bin_s)):
        inside = list(members)
        peak_gpus = max(each.asked_gpus for each in inside)
        first, last = inside[0], inside[-1]
        yield ReadingBin(first.at_s, first.asked_gpus, last.at_s, last.asked_gpus, peak_gpus, len(inside))
