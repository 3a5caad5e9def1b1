"""Forecast: what a pool's inference is likely to need, as quantiles over a horizon."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Forecast:
    """Quantiles of the largest GPU demand of one pool within the next `horizon_s` seconds.

    `quantiles` are ascending levels in (0, 1); `gpus[i]` is the demand that stays unexceeded with probability
    `quantiles[i]`. `method` names the forecaster, for people. `lasting_gpus` are the same over the shortest loan that
    is worth making, empty where the horizon covers it.
    """

    made_at_s: float
    horizon_s: float
    quantiles: tuple[float, ...]
    gpus: tuple[float, ...]
    method: str
    lasting_gpus: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if len(self.quantiles) != len(self.gpus) or not self.quantiles:
            raise ValueError("a forecast needs one GPU figure a quantile, and at least one")
        if list(self.quantiles) != sorted(self.quantiles):
            raise ValueError(f"quantiles must ascend, got {self.quantiles}")

    def at(self, quantile: float) -> float:
        """GPU demand at the lowest stored level that is not below `quantile` (the highest one, failing that)."""
        return self.gpus[self._level(quantile)]

    def lasting_at(self, quantile: float) -> float:
        """Likewise over the shortest loan that is worth making."""
        return (self.lasting_gpus or self.gpus)[self._level(quantile)]

    def lasting(self, longer: Forecast) -> Forecast:
        """The same with what `longer` says of the shortest loan that is worth making."""
        return replace(self, lasting_gpus=longer.gpus)

    def _level(self, quantile: float) -> int:
        return next((at for at, level in enumerate(self.quantiles) if level >= quantile), len(self.quantiles) - 1)
