"""Working levels of quantiles, adapted so that demand stays at or below each as often as promised."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scheduler.forecast.demand_history import FloatArray

TRACKED_LEVELS = (0.9, 0.95, 0.99, 0.999)
_RATE = 0.1
_FACTOR_MIN, _FACTOR_MAX = 0.1, 2.0
# Two weeks hold too few independent residuals for levels beyond this one, so these are aimed at twice as far out.
_FAR_LEVEL, _FAR_FACTOR = 0.99, 0.5


@dataclass(frozen=True, slots=True)
class WorkingLevels:
    """Adaptive conformal inference (Gibbs and Candes 2021, section 2) of the levels that loans depend on.

    A forecast for level q is made at level 1 - factor x (1 - q). Levels below the tracked ones are not adapted.

    Args:
        factors: one for each of `TRACKED_LEVELS`. It falls with each outcome above the forecast, and rises otherwise.
    """

    factors: tuple[float, ...] = (1.0,) * len(TRACKED_LEVELS)

    def find(self, level: float) -> float:
        """Return the level at which a forecast for `level` is made."""
        if level < TRACKED_LEVELS[0]:
            return level
        distances = np.abs(np.log((1.0 - np.array(TRACKED_LEVELS)) / (1.0 - level)))
        factor = self.factors[int(distances.argmin())] * (_FAR_FACTOR if level > _FAR_LEVEL else 1.0)
        return 1.0 - factor * (1.0 - level)

    def learn(self, outcomes: FloatArray, quantiles: FloatArray, *, overlap: int) -> WorkingLevels:
        """Return the levels after more outcomes.

        Args:
            outcomes: (m,), in GPUs; NaN is not counted.
            quantiles: (m, len(TRACKED_LEVELS)), the forecasts for them, in GPUs.
            overlap: number of neighboring outcomes that share demand, so that each counts as 1 / overlap.
        """
        known = ~np.isnan(outcomes) & ~np.isnan(quantiles).any(axis=1)
        misses = 1.0 - np.array(TRACKED_LEVELS)
        surplus = ((outcomes[known][:, None] > quantiles[known]) - misses).sum(axis=0)
        factors = np.array(self.factors) - _RATE / overlap * (1.0 - misses) * surplus
        return WorkingLevels(tuple(np.clip(factors, _FACTOR_MIN, _FACTOR_MAX).tolist()))
