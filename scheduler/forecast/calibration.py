"""Quantiles of what the point forecast has missed lately: the rolling-window conformal correction."""

from __future__ import annotations

from math import ceil, log

import numpy as np

from scheduler.forecast.history import FloatArray

# With fewer residuals than this, demand is allowed to rise by COLD_RESIDUAL scales whatever the residuals say.
WARM_RESIDUALS = 20
COLD_RESIDUAL = 1.0
TAIL_SHARE = 0.05
TAIL_RESIDUALS_MIN = 5


def residual_quantile(ordered: FloatArray, level: float, *, overlap: int = 1) -> float:
    """The residual that the next one stays below with probability `level`; `ordered` is ascending, shape (m,).

    The rank is that of split conformal prediction, ceil((m + 1) x level) (Vovk et al., Algorithmic Learning in a
    Random World, 2005, chapter 2), over a window that rolls because demand drifts. `overlap` neighbouring residuals
    share outcomes, so the m stand for m / overlap independent ones. Where those are too few for the level, the
    answer is the larger of the empirical quantile (the largest residual, where the rank exceeds m) and an
    exponential tail fitted to the top residuals (peaks over threshold with shape 0: Pickands 1975; Coles, An
    Introduction to Statistical Modeling of Extreme Values, 2001, chapter 4). Never decreases in `level`.
    """
    count = len(ordered)
    rank = max(1, ceil((count + 1) * level - 1e-9))
    empirical = float(ordered[min(rank, count) - 1]) if count else 0.0
    if count < WARM_RESIDUALS:
        return max(empirical, COLD_RESIDUAL) if level > 0.5 else min(empirical, 0.0)
    independent = count / overlap
    if (independent + 1) * level <= independent:
        return empirical
    top = max(TAIL_RESIDUALS_MIN, ceil(TAIL_SHARE * count))
    threshold = float(ordered[-top - 1])
    mean_excess = float(np.mean(ordered[-top:])) - threshold
    return max(empirical, threshold + mean_excess * log(top / count / (1.0 - level)))
