"""Forecast: what a pool's inference is likely to need, as quantiles over a horizon."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Forecast:
    """Quantiles of the largest GPU demand of one pool within the next `horizon_s` seconds.

    `quantiles` are ascending levels in (0, 1); `gpus[i]` is the demand that stays unexceeded with probability
    `quantiles[i]`. `method` names the forecaster, for people.
    """

    made_at_s: float
    horizon_s: float
    quantiles: tuple[float, ...]
    gpus: tuple[float, ...]
    method: str

    def __post_init__(self) -> None:
        if len(self.quantiles) != len(self.gpus) or not self.quantiles:
            raise ValueError("a forecast needs one GPU figure a quantile, and at least one")
        if list(self.quantiles) != sorted(self.quantiles):
            raise ValueError(f"quantiles must ascend, got {self.quantiles}")

    def at(self, quantile: float) -> float:
        """GPU demand at the lowest stored level that is not below `quantile` (the highest one, failing that)."""
        for level, gpus in zip(self.quantiles, self.gpus, strict=True):
            if level >= quantile:
                return gpus
        return self.gpus[-1]
