"""The tide of the demo: eight real days of inference load, brought into minutes and onto a few GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from scheduler.documents.trace import read_demand
from scheduler.forecast.history import fill_gaps

DAY_S = 86_400.0
HISTORY_DAYS = 7
_EIGHT_DAYS = Path(__file__).parent / "data" / "servegen_m_small_8days.csv.gz"


@dataclass(frozen=True, slots=True)
class Reading:
    """`at_s` counts from the beginning of the day that is replayed: history lies before 0."""

    at_s: float
    gpus: float


@dataclass(frozen=True, slots=True)
class Tide:
    """`history` are seven days, `today` the eighth, all in the demo's time: one day lasts `day_s` seconds."""

    day_s: float
    history: tuple[Reading, ...]
    today: tuple[Reading, ...]


def real_tide(*, day_s: float, peak_gpus: float) -> Tide:
    """Eight days of ServeGen's m_small; `peak_gpus` is what its largest load of those days needs."""
    rows = read_demand(_EIGHT_DAYS)
    load = fill_gaps(np.array([row.amount for row in rows], dtype=np.float64))
    gpus = peak_gpus * load / load.max()
    pace = day_s / DAY_S
    at_s = [(row.time_s - HISTORY_DAYS * DAY_S) * pace for row in rows]
    readings = tuple(Reading(at, float(need)) for at, need in zip(at_s, gpus, strict=True))
    return Tide(day_s, tuple(r for r in readings if r.at_s < 0), tuple(r for r in readings if r.at_s >= 0))
