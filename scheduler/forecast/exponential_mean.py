"""Exponential means of arrays."""

from __future__ import annotations

import numpy as np

from scheduler.forecast.demand_history import FloatArray


def compute_exponential_means(values: FloatArray, rate: float, *, start: float | None = None) -> FloatArray:
    """Return the exponential mean up to each value along the first axis, of the shape of `values`.

    Args:
        rate: weight of the newest value, above 0 and at most 1.
        start: the mean before the first value; None for the first value itself.
    """
    from scipy.signal import lfilter  # half a second of CPU time, which processes that never forecast need not spend

    if not len(values):
        return values
    before = values[:1] if start is None else np.full_like(values[:1], start)
    means, _ = lfilter([rate], [1.0, rate - 1.0], values, axis=0, zi=(1.0 - rate) * before)
    return np.asarray(means)
