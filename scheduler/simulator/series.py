"""Series: what happened over time under one policy set, as means over equal intervals, few enough to draw."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.floating[Any]]
POINTS_MAX = 2_000
_SHARES = 1_000
_ROUND_S = (1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 600.0, 1800.0, 3600.0, 7200.0, 21_600.0, 43_200.0)
"""Each divides the next one and the day, so that series of unlike length can be brought to a common step."""


@dataclass(frozen=True, slots=True)
class PolicySeries:
    """Each figure is the mean over `step_s` seconds, the first from `start_s` on; at most 2,000 of each.

    The last job is submitted `submitting_s` after the first.
    The usage ratios are as in `UsageRatio`, but over the whole run. `demand_gpus` and `forecast_gpus` (at each pool's
    lending quantile) are sums over the inference pools, capped at what these have: `inference_gpus` GPUs on
    `inference_nodes` nodes. `jct_s` holds completion times in ascending order, at most 1,001 quantiles of them.
    """

    policy: str
    start_s: float
    step_s: float
    submitting_s: float
    queued_jobs: tuple[float, ...]
    training_usage_ratio: tuple[float, ...]
    inference_usage_ratio: tuple[float, ...]
    inference_gpus: float
    inference_nodes: int
    lent_nodes: tuple[float, ...]
    demand_gpus: tuple[float, ...]
    forecast_gpus: tuple[float, ...]
    jct_s: tuple[float, ...]


class StepLine:
    """A step function, written down as it changes: 16 bytes a step."""

    def __init__(self) -> None:
        self._at_s = array("d")
        self._values = array("d")

    def step(self, at_s: float, value: float) -> None:
        """The value is `value` from `at_s` on, which is not before the last step."""
        if not self._values or self._values[-1] != value:
            self._at_s.append(at_s)
            self._values.append(value)

    def means(self, edges_s: FloatArray) -> FloatArray:
        return interval_means(np.array(self._at_s), np.diff(np.array(self._values), prepend=0.0), edges_s)


def interval_edges(start_s: float, end_s: float) -> FloatArray:
    """Ends of equal intervals of a round length, the last of which may reach beyond `end_s`."""
    step_s = round_length_s((end_s - start_s) / POINTS_MAX)
    return start_s + step_s * np.arange(max(1, math.ceil((end_s - start_s) / step_s)) + 1)


def round_length_s(least_s: float) -> float:
    """The shortest round length of time that is not below `least_s`; whole days beyond one."""
    return next((length_s for length_s in _ROUND_S if length_s >= least_s), math.ceil(least_s / 86_400.0) * 86_400.0)


def interval_means(at_s: FloatArray, deltas: FloatArray, edges_s: FloatArray) -> FloatArray:
    """Means, between neighbouring edges, of the function that is 0 at first and changes by `deltas` at `at_s`.

    Shapes: `at_s` and `deltas` (n,) in any order, `edges_s` (m + 1,) ascending, the result (m,).
    """
    order = np.argsort(at_s, kind="stable")
    at_s, deltas, edges_s = at_s[order] - edges_s[0], deltas[order], edges_s - edges_s[0]
    seen = np.searchsorted(at_s, edges_s, side="right")
    level = np.concatenate(([0.0], np.cumsum(deltas)))[seen]
    area = level * edges_s - np.concatenate(([0.0], np.cumsum(deltas * at_s)))[seen]
    means: FloatArray = np.diff(area) / np.diff(edges_s)
    return means


def quantiles(values: list[float]) -> tuple[float, ...]:
    """The values in ascending order; evenly spaced quantiles of them where they are many."""
    if len(values) <= _SHARES:
        return tuple(sorted(values))
    return tuple(np.quantile(values, np.linspace(0.0, 1.0, _SHARES + 1)).tolist())
