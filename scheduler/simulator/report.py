"""Series: what happened over time under one policy set, as means over equal intervals, few enough to draw.

The report of a simulation: the JSON that other programs read, and the figures in it.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.floating[Any]]
POINTS_MAX = 2_000
_QUANTILE_STEPS = 1_000
_ROUND_LENGTHS_S = (1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 600.0, 1800.0, 3600.0, 7200.0, 21_600.0, 43_200.0)
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


class StepFunction:
    """A step function, written down as it changes: 16 bytes a step."""

    def __init__(self) -> None:
        self._at_s = array("d")
        self._values = array("d")

    def set_value(self, at_s: float, value: float) -> None:
        """The value is `value` from `at_s` on, which is not before the last step."""
        if not self._values or self._values[-1] != value:
            self._at_s.append(at_s)
            self._values.append(value)

    def compute_means(self, edges_s: FloatArray) -> FloatArray:
        return compute_interval_means(np.array(self._at_s), np.diff(np.array(self._values), prepend=0.0), edges_s)


def compute_interval_edges(start_s: float, end_s: float) -> FloatArray:
    """Ends of equal intervals of a round length, the last of which may reach beyond `end_s`."""
    step_s = round_up_length((end_s - start_s) / POINTS_MAX)
    return start_s + step_s * np.arange(max(1, math.ceil((end_s - start_s) / step_s)) + 1)


def round_up_length(least_s: float) -> float:
    """The shortest round length of time that is not below `least_s`; whole days beyond one."""
    return next(
        (length_s for length_s in _ROUND_LENGTHS_S if length_s >= least_s), math.ceil(least_s / 86_400.0) * 86_400.0
    )


def compute_interval_means(at_s: FloatArray, deltas: FloatArray, edges_s: FloatArray) -> FloatArray:
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


def compute_quantiles(values: list[float]) -> tuple[float, ...]:
    """The values in ascending order; evenly spaced quantiles of them where they are many."""
    if len(values) <= _QUANTILE_STEPS:
        return tuple(sorted(values))
    return tuple(np.quantile(values, np.linspace(0.0, 1.0, _QUANTILE_STEPS + 1)).tolist())


HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Distribution:
    """Mean and percentiles (linear between ranks); all zero where there is nothing to measure."""

    mean: float
    p50: float
    p95: float
    p99: float

    @classmethod
    def from_values(cls, values: Sequence[float]) -> Distribution:
        if not values:
            return cls(0.0, 0.0, 0.0, 0.0)
        p50, p95, p99 = (float(value) for value in np.percentile(values, [50, 95, 99]))
        return cls(float(np.mean(values)), p50, p95, p99)


@dataclass(frozen=True, slots=True)
class TickTimes:
    p50: float
    p99: float
    max: float

    @classmethod
    def from_values(cls, values: Sequence[float]) -> TickTimes:
        if not values:
            return cls(0.0, 0.0, 0.0)
        p50, p99 = (float(value) for value in np.percentile(values, [50, 99]))
        return cls(p50, p99, max(values))


@dataclass(frozen=True, slots=True)
class UsageRatio:
    """Useful GPU-seconds over those that were there, from the first submission to the last.

    `training`: steps that were kept, on nodes that training owns. `inference`: its demand, and kept steps on its
    lent nodes. `overall`: both together. Start-up, saving and lost work are not useful.
    """

    training: float
    inference: float
    overall: float


@dataclass(frozen=True, slots=True)
class ShortageRatio:
    """Share of the demand's intervals in which loans, and returned nodes that do not serve yet, left inference with
    fewer GPUs than it needed: in the first pass of the trace, and in all."""

    first_pass: float
    all: float


@dataclass(frozen=True, slots=True)
class PolicyReport:
    """One policy set's outcome. Ratios lie in 0 to 1.

    `queueing_s`: all waiting, after preemption too. `jct_s`: from submission to completion, of completed jobs;
    `jct_elastic_s` of those that had 2 GPUs or more in the trace. `jct_bound_s`: the mean if every job ran at its
    maximum and none waited. `makespan_s`: first submission to last completion. `idle_while_waiting_gpu_hours`: GPUs
    that training might use and does not, while a job waits. `loaned_gpu_hours`: from offer to return.
    `recalls_late`: nodes home after their deadline. `preemption_ratio`: jobs preempted at least once.
    `collateral_gpus`: GPUs that jobs had to give up by a recall beyond those on nodes that they had to leave.
    `lost_gpu_hours`: computed and lost again; `lost_ratio`: as a share of all computed. `tick_s`, `wall_s` are real.
    `deadlines_met_ratio`: of the jobs that have a deadline those that completed by it; None where none has one.
    `rejected`: jobs that the policy turned away. `violations`: decisions that were dropped because they broke a law;
    `violated` says in a sentence for each law which it was first. Both are empty under a policy without a mistake.
    """

    policy: str
    jobs: int
    completed: int
    queueing_s: Distribution
    jct_s: Distribution
    jct_elastic_s: Distribution
    jct_bound_s: float
    makespan_s: float
    usage_ratio: UsageRatio
    idle_while_waiting_gpu_hours: float
    loaned_gpu_hours: float
    loans: int
    recalls: int
    recalls_late: int
    preemptions: int
    preemption_ratio: float
    resizes: int
    collateral_gpus: int
    lost_gpu_hours: float
    lost_ratio: float
    inference_short_intervals_ratio: ShortageRatio
    ticks: int
    tick_s: TickTimes
    wall_s: float
    deadlines_met_ratio: float | None
    rejected: int
    violations: int = 0
    violated: tuple[str, ...] = ()


PolicyResult = tuple[PolicyReport, PolicySeries]


@dataclass(frozen=True, slots=True)
class SimulationReport:
    """What `ebbtide simulate -o json` prints, and beside it `series`, what happened over time, policy by policy."""

    seed: int
    policies: tuple[PolicyReport, ...]
    series: tuple[PolicySeries, ...]

    @classmethod
    def from_results(cls, seed: int, results: Iterable[PolicyResult]) -> SimulationReport:
        reports, series = zip(*results, strict=True)
        return cls(seed, reports, series)

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        reports = [asdict(report) | {"violated": list(report.violated)} for report in self.policies]
        return {"seed": self.seed, "policies": reports}


def compute_ratio(part: float, whole: float) -> float:
    """`part / whole`, and 0 where there is no whole."""
    return part / whole if whole else 0.0


def compute_mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed) if listed else 0.0
