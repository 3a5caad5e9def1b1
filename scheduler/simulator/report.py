"""The report of a simulation: the JSON that other programs read, and the figures in it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from scheduler.simulator.series import PolicySeries

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and percentiles (linear between ranks); all zero where there is nothing to measure."""

    mean: float
    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
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
    def of(cls, values: Sequence[float]) -> TickTimes:
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
class ShortRatio:
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
    queueing_s: Spread
    jct_s: Spread
    jct_elastic_s: Spread
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
    inference_short_intervals_ratio: ShortRatio
    ticks: int
    tick_s: TickTimes
    wall_s: float
    deadlines_met_ratio: float | None
    rejected: int
    violations: int = 0
    violated: tuple[str, ...] = ()


Played = tuple[PolicyReport, PolicySeries]


@dataclass(frozen=True, slots=True)
class SimulationReport:
    """What `ebbtide simulate -o json` prints, and beside it `series`, what happened over time, policy by policy."""

    seed: int
    policies: tuple[PolicyReport, ...]
    series: tuple[PolicySeries, ...]

    @classmethod
    def of(cls, seed: int, played: Iterable[Played]) -> SimulationReport:
        reports, series = zip(*played, strict=True)
        return cls(seed, reports, series)

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        reports = [asdict(report) | {"violated": list(report.violated)} for report in self.policies]
        return {"seed": self.seed, "policies": reports}


def ratio(part: float, whole: float) -> float:
    """`part / whole`, and 0 where there is no whole."""
    return part / whole if whole else 0.0


def mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed) if listed else 0.0
