"""ForecastCoverage: how often demand stayed at or below what each quantile of a forecast said."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass

from scheduler.domain.forecast import Forecast
from scheduler.domain.tick_report import TickReport
from scheduler.telemetry.metrics import FORECAST_COVERAGE, FORECASTS_JUDGED

WINDOW_S = 86_400.0


@dataclass(slots=True)
class _Open:
    """A forecast whose horizon lasts, and the largest demand since it was made."""

    forecast: Forecast
    largest_gpus: float


class ForecastCoverage:
    """Each forecast is judged once, when its horizon has passed, by what was asked for within it, above the pool's
    capacity too. The demand that stood when it was made counts as within it."""

    def __init__(self) -> None:
        self._newest: dict[str, float] = {}
        self._open: defaultdict[str, deque[_Open]] = defaultdict(deque)
        self._judged: defaultdict[tuple[str, float], deque[tuple[float, bool]]] = defaultdict(deque)

    def record(self, report: TickReport) -> None:
        for pool, reading in report.readings:
            for one in self._open[pool]:
                if reading.at_s <= one.forecast.made_at_s + one.forecast.horizon_s:
                    one.largest_gpus = max(one.largest_gpus, reading.asked_gpus)
        for pool, open_ones in self._open.items():
            while open_ones and open_ones[0].forecast.made_at_s + open_ones[0].forecast.horizon_s <= report.now_s:
                self._judge(pool, open_ones.popleft(), report.now_s)
        for pool, forecast in report.after.forecasts.items():
            demand = report.after.demand.get(pool)
            if self._newest.get(pool) != forecast.made_at_s and demand is not None:
                self._newest[pool] = forecast.made_at_s
                FORECASTS_JUDGED.labels(pool)  # shown as 0 until the first is judged
                self._open[pool].append(_Open(forecast, demand.asked_gpus))

    def rest(self) -> None:
        for pool, quantile in self._judged:
            FORECAST_COVERAGE.labels(pool, f"{quantile:g}").set(float("nan"))
        self._judged.clear()
        self._open.clear()

    def _judge(self, pool: str, one: _Open, now_s: float) -> None:
        FORECASTS_JUDGED.labels(pool).inc()
        for quantile, gpus in zip(one.forecast.quantiles, one.forecast.gpus, strict=True):
            judged = self._judged[pool, quantile]
            judged.append((now_s, one.largest_gpus <= gpus))
            while judged[0][0] <= now_s - WINDOW_S:
                judged.popleft()
            FORECAST_COVERAGE.labels(pool, f"{quantile:g}").set(sum(held for _, held in judged) / len(judged))
