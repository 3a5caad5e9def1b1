"""Forecast fan: quantiles of the demand of a pool at several times of the next day."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ForecastFan:
    """Quantiles of the GPU demand of one pool, for display. Lending does not use them.

    With probability `quantiles[j]`, the largest demand of the `bin_s` seconds from `at_s[i]` stays at or below
    `gpus[i][j]`. Times and quantiles ascend.
    """

    pool: str
    made_at_s: float
    bin_s: float
    quantiles: tuple[float, ...]
    at_s: tuple[float, ...]
    gpus: tuple[tuple[float, ...], ...]
    method: str
