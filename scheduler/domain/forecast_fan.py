"""Forecast fan: quantiles of the demand of a pool at several times ahead."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ForecastFan:
    """Quantiles of the GPU demand of one pool by the time ahead.

    `gpus[i][j]` is the demand that the largest demand of the interval that ends `ahead_s[i]` seconds after
    `made_at_s` stays at or below with probability `quantiles[j]`. The interval begins at the previous time ahead, or
    at `made_at_s`. `is_calibrated` says whether enough forecasts have met their outcome.
    """

    pool: str
    made_at_s: float
    method: str
    quantiles: tuple[float, ...]
    ahead_s: tuple[float, ...]
    gpus: tuple[tuple[float, ...], ...]
    is_calibrated: bool = True
