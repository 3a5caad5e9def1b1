"""Shortages of inference in a simulation: short intervals of demand, and GPU-seconds that no pod served."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from scheduler.executors.simulated_nodes import UnservedSteps
from scheduler.simulator.demand import DemandChange
from scheduler.simulator.report import FloatArray, ShortageRatio, compute_interval_means, compute_ratio

BoolArray = NDArray[np.bool_]

_GPUS_MIN = 1e-9
"""Mean shortage of an interval that counts. Less is rounding."""


@dataclass(slots=True)
class _DemandTimes:
    """When the demand of a pool changed, and whether that was in the first pass of its trace."""

    at_s: array[float] = field(default_factory=lambda: array("d"))
    first_pass: array[int] = field(default_factory=lambda: array("b"))


class InferenceShortages:
    """Demand intervals of all pools. An interval lasts from one change of a pool's demand to the next, as in its trace.

    An interval is short if demand lacked a serving pod for any part of it.
    """

    def __init__(self, pools: Iterable[str]) -> None:
        self._times = {pool: _DemandTimes() for pool in pools}

    def record_demand_change(self, change: DemandChange) -> None:
        times = self._times[change.pool]
        times.at_s.append(change.at_s)
        times.first_pass.append(change.first_pass)

    def compute_ratio(self, unserved: Mapping[str, UnservedSteps], *, end_s: float) -> ShortageRatio:
        """Return the share of the intervals until `end_s` that were short.

        `unserved` is the demand without a serving pod by pool.
        """
        short, counted = np.zeros(2), np.zeros(2)
        for pool, times in self._times.items():
            edges_s, first_pass = _close_intervals(times, end_s)
            if not len(first_pass):
                continue
            steps = unserved.get(pool, [])
            is_short = compute_step_means(steps, edges_s) > _GPUS_MIN
            for at, chosen in enumerate((first_pass, ~first_pass)):
                short[at] += np.count_nonzero(is_short & chosen)
                counted[at] += np.count_nonzero(chosen)
        first, every = compute_ratio(short[0], counted[0]), compute_ratio(short.sum(), counted.sum())
        return ShortageRatio(float(first), float(every))


def compute_step_means(steps: UnservedSteps, edges_s: FloatArray) -> FloatArray:
    """Return the means of a step function that starts at 0 in the intervals between `edges_s`, (m + 1,): (m,)."""
    at_s, values = (np.array([step[column] for step in steps], dtype=np.float64) for column in (0, 1))
    return compute_interval_means(at_s, np.diff(values, prepend=0.0), edges_s)


def sum_unserved_gpu_s(unserved: Mapping[str, UnservedSteps], *, start_s: float, end_s: float) -> float:
    """Return the GPU-seconds of demand that no pod served from `start_s` to `end_s`, over all pools."""
    if end_s <= start_s:
        return 0.0
    edges_s = np.array((start_s, end_s))
    return sum(float(compute_step_means(steps, edges_s)[0]) for steps in unserved.values()) * (end_s - start_s)


def _close_intervals(times: _DemandTimes, end_s: float) -> tuple[FloatArray, BoolArray]:
    """Return the bounds of the intervals that began before `end_s`, (m + 1,), and which are of the first pass, (m,)."""
    at_s = np.append(np.minimum(np.array(times.at_s), end_s), end_s)
    lasts = np.diff(at_s) > 0
    return np.append(at_s[:-1][lasts], end_s), np.array(times.first_pass, dtype=np.bool_)[lasts]
