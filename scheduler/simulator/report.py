"""Reports of simulations: metrics of each policy set, and time series as means over equal intervals."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.floating[Any]]
POINTS_MAX = 2_000
CHART_POINTS_MAX = 400
"""Points of a series in a chart on a page."""
QUANTILES_MAX = 100
_QUANTILE_STEPS = 1_000
_ROUND_LENGTHS_S = (1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 600.0, 1800.0, 3600.0, 7200.0, 21_600.0, 43_200.0)
"""Each divides the next one and the day, so that series of different lengths can be resampled to a common step."""


@dataclass(frozen=True, slots=True)
class PolicySeries:
    """Time series under one policy set: means over `step_s` seconds, at most 2,000 values per series.

    Args:
        start_s: start of the first interval.
        submitting_s: time from the first to the last submission.
        training_usage_ratio: as in `UsageRatio`, but over the whole run; likewise `inference_usage_ratio`.
        demand_gpus: sum over the inference pools, limited to their capacity of `inference_gpus` on `inference_nodes`.
        forecast_gpus: likewise, at the lending quantile of each pool.
        jct_s: job completion times in ascending order, or 1,001 quantiles of them.
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

    def to_chart(self, points_max: int = CHART_POINTS_MAX) -> dict[str, Any]:
        """Return the series as JSON values, as means over longer intervals, and quantiles of completion times."""
        least_s = self.step_s * len(self.queued_jobs) / points_max
        size = math.ceil(round_up_length(least_s) / self.step_s)
        names = ("queued_jobs", "training_usage_ratio", "inference_usage_ratio", "lent_nodes", "demand_gpus")
        return {
            "policy": self.policy,
            "step_s": self.step_s * size,
            "submitting_s": self.submitting_s,
            "inference_gpus": self.inference_gpus,
            "inference_nodes": self.inference_nodes,
            **{name: _compute_group_means(getattr(self, name), size) for name in (*names, "forecast_gpus")},
            "jct_s": [float(f"{value:.6g}") for value in _pick_evenly(self.jct_s, QUANTILES_MAX)],
        }


def _compute_group_means(values: Sequence[float], size: int) -> list[float]:
    groups = (values[at : at + size] for at in range(0, len(values), size))
    return [float(f"{sum(group) / len(group):.6g}") for group in groups]


def _pick_evenly(values: Sequence[float], count: int) -> list[float]:
    """Return at most `count` of the values, evenly spaced, with the first and the last."""
    if len(values) <= count:
        return list(values)
    return [values[round(at * (len(values) - 1) / (count - 1))] for at in range(count)]


class StepFunction:
    """A step function, recorded at its changes with 16 bytes per step."""

    def __init__(self) -> None:
        self._at_s = array("d")
        self._values = array("d")

    def set_value(self, at_s: float, value: float) -> None:
        """Set the value from `at_s` on, which must not be before the last step."""
        if not self._values or self._values[-1] != value:
            self._at_s.append(at_s)
            self._values.append(value)

    def compute_means(self, edges_s: FloatArray) -> FloatArray:
        return compute_interval_means(np.array(self._at_s), np.diff(np.array(self._values), prepend=0.0), edges_s)


def compute_interval_edges(start_s: float, end_s: float) -> FloatArray:
    """Return the bounds of equal intervals of a round length. The last interval may extend beyond `end_s`."""
    step_s = round_up_length((end_s - start_s) / POINTS_MAX)
    return start_s + step_s * np.arange(max(1, math.ceil((end_s - start_s) / step_s)) + 1)


def round_up_length(least_s: float) -> float:
    """Return the smallest round duration of at least `least_s`; above one day, whole days."""
    return next(
        (length_s for length_s in _ROUND_LENGTHS_S if length_s >= least_s), math.ceil(least_s / 86_400.0) * 86_400.0
    )


def compute_interval_means(at_s: FloatArray, deltas: FloatArray, edges_s: FloatArray) -> FloatArray:
    """Return the means per interval of a function that starts at 0 and changes by `deltas` at `at_s`.

    Args:
        at_s: times of shape (n,), in any order; `deltas` has the same shape.
        edges_s: ascending interval bounds of shape (m + 1,).

    Returns:
        Means of shape (m,).
    """
    order = np.argsort(at_s, kind="stable")
    at_s, deltas, edges_s = at_s[order] - edges_s[0], deltas[order], edges_s - edges_s[0]
    seen = np.searchsorted(at_s, edges_s, side="right")
    level = np.concatenate(([0.0], np.cumsum(deltas)))[seen]
    area = level * edges_s - np.concatenate(([0.0], np.cumsum(deltas * at_s)))[seen]
    means: FloatArray = np.diff(area) / np.diff(edges_s)
    return means


def compute_quantiles(values: list[float]) -> tuple[float, ...]:
    """Return the values in ascending order, or evenly spaced quantiles if there are many."""
    if len(values) <= _QUANTILE_STEPS:
        return tuple(sorted(values))
    return tuple(np.quantile(values, np.linspace(0.0, 1.0, _QUANTILE_STEPS + 1)).tolist())


HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Distribution:
    """Mean and percentiles with linear interpolation; all zero without values."""

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
    """Useful GPU-seconds divided by existing ones, from the first to the last submission.

    `training` counts kept steps on nodes owned by training. `inference` counts served demand, and kept steps on lent
    nodes.
    `overall` counts both. Start-up, saving and lost work are not useful.
    """

    training: float
    inference: float
    overall: float


@dataclass(frozen=True, slots=True)
class ShortageRatio:
    """Fraction of demand intervals in which inference lacked pods because of loans.

    Demand lacks a pod while no GPU is left for it, and while a pod that moved off a lent node, or one on a returned
    node, starts. An interval is the time between two rows of the demand trace. `first_pass` covers the first pass of
    the trace, `all` also its repetitions.
    """

    first_pass: float
    all: float


@dataclass(frozen=True, slots=True)
class PolicyReport:
    """Metrics of one policy set. Ratios are from 0 to 1; `tick_s` and `wall_s` are real durations.

    Args:
        queueing_s: total waiting time of each job, including after preemption.
        jct_s: time from submission to completion, of completed jobs; `jct_elastic_s` of those with 2 or more GPUs in
            the trace; `jct_bound_s` is the mean if every job ran at its maximum without waiting.
        makespan_s: time from the first submission to the last completion.
        idle_while_waiting_gpu_hours: GPUs that training could use and does not, while a job waits.
        loaned_gpu_hours: GPU time from offer to return.
        unused_loan_gpu_hours: GPU time of lent nodes that no job held, beyond the minimum duration of a loan and
            two full passes.
        recalls_late: nodes returned after their deadline.
        recall_outcomes: receipts of recalls by outcome; a recall that is open at the end has none.
        preemption_ratio: fraction of jobs preempted at least once.
        collateral_gpus: GPUs that jobs gave up in a recall beyond those of nodes that they had to leave.
        lost_gpu_hours: work that was computed and lost; `lost_ratio` as a fraction of all computed work.
        deadlines_met_ratio: fraction of jobs with a deadline that met it; None if no job has one.
        rejected: jobs rejected by the policy.
        incomplete_saves: times that workers were killed at their deadline while they saved. Their work since the last
            checkpoint is in `lost_gpu_hours`.
        unserved_gpu_hours: demand that no inference pod served, up to the GPUs of the pools.
        violations: dropped decisions that violated an invariant. `violated` describes the first of each invariant.
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
    unused_loan_gpu_hours: float
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
    recall_outcomes: Mapping[str, int] = field(default_factory=dict)
    incomplete_saves: int = 0
    unserved_gpu_hours: float = 0.0


PolicyResult = tuple[PolicyReport, PolicySeries]


@dataclass(frozen=True, slots=True)
class SimulationReport:
    """Metrics and series of all policy sets under one seed. `ebbtide simulate -o json` prints the metrics."""

    seed: int
    policies: tuple[PolicyReport, ...]
    series: tuple[PolicySeries, ...]

    @classmethod
    def from_results(cls, seed: int, results: Iterable[PolicyResult]) -> SimulationReport:
        reports, series = zip(*results, strict=True)
        return cls(seed, reports, series)

    def to_json(self) -> dict[str, Any]:
        """Return the metrics as JSON values."""
        reports = [asdict(report) | {"violated": list(report.violated)} for report in self.policies]
        return {"seed": self.seed, "policies": reports}


def compute_ratio(part: float, whole: float) -> float:
    """Return `part / whole`, or 0 if `whole` is 0."""
    return part / whole if whole else 0.0


def compute_mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed) if listed else 0.0
