"""The recorded demand that the demo replays: eight days of ServeGen, with time compressed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from scheduler.documents.trace_files import read_demand
from scheduler.forecast.demand_history import fill_gaps

SECONDS_PER_DAY = 86_400.0
HISTORY_DAYS = 7
_TRACE_FILE = Path(__file__).parent / "data" / "servegen_m_small_8days.csv.gz"


@dataclass(frozen=True, slots=True)
class DemandSample:
    """Demand as a share of the peak, at a time in seconds from the start of the replayed day. History is negative."""

    at_s: float
    share: float


@dataclass(frozen=True, slots=True)
class DemandTrace:
    """Seven days of history and the day to replay, with time compressed so that one day lasts `day_s` seconds."""

    day_s: float
    history: tuple[DemandSample, ...]
    today: tuple[DemandSample, ...]

    def get_share(self, at_s: float) -> float:
        """Return the demand at a time of the replayed day, as a share of the peak. It stays after the last sample."""
        return max(
            (sample for sample in self.today if sample.at_s <= at_s), default=self.history[-1], key=_time_of
        ).share


def load_demand_trace(*, day_s: float) -> DemandTrace:
    """Return eight days of ServeGen's m_small, as shares of its peak."""
    rows = read_demand(_TRACE_FILE)
    load = fill_gaps(np.array([row.amount for row in rows], dtype=np.float64))
    shares = load / load.max()
    pace = day_s / SECONDS_PER_DAY
    at_s = [(row.time_s - HISTORY_DAYS * SECONDS_PER_DAY) * pace for row in rows]
    samples = tuple(DemandSample(at, float(share)) for at, share in zip(at_s, shares, strict=True))
    return DemandTrace(day_s, tuple(s for s in samples if s.at_s < 0), tuple(s for s in samples if s.at_s >= 0))


def _time_of(sample: DemandSample) -> float:
    return sample.at_s
