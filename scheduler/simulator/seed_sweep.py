"""Simulations under several seeds in parallel processes, and confidence intervals of their metrics."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from scheduler.runtime.process_pool import ProcessPool
from scheduler.scheduling.policy_sets import PolicySet
from scheduler.simulator.report import PolicyResult, SimulationReport
from scheduler.simulator.simulate import (
    DEFAULT_OPTIONS,
    PolicySelection,
    ProgressCallback,
    SimulationInputs,
    SimulationOptions,
    build_scenario,
    resolve_policy_sets,
    run_policy,
)
from scheduler.simulator.throughput_curves import CurveCache

if TYPE_CHECKING:
    from ctypes import c_longlong
    from multiprocessing.sharedctypes import SynchronizedArray

    Counts = SynchronizedArray[c_longlong]

CONFIDENCE = 0.95
_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class SweepReport:
    """Reports of all seeds, and metrics over all of them, as printed by `ebbtide simulate --seeds -o json`."""

    runs: tuple[SimulationReport, ...]

    def to_json(self) -> dict[str, Any]:
        """Return metrics as JSON values: means over the seeds with Student's 95% confidence interval.

        `differences` are the same for the difference to the first policy under the same seed, which removes the effect
        of the seed itself.
        """
        runs = [run.to_json() for run in self.runs]
        by_policy = [
            [flatten_metrics(report) for report in reports]
            for reports in zip(*(r["policies"] for r in runs), strict=True)
        ]
        first = by_policy[0]
        return {
            "seeds": [run.seed for run in self.runs],
            "policies": [
                {
                    "policy": report.policy,
                    "figures": _summarize_over_seeds(flats, lambda name, seed: 0.0),
                    "differences": _summarize_over_seeds(flats, lambda name, seed: first[seed][name]) if at else {},
                }
                for at, (report, flats) in enumerate(zip(self.runs[0].policies, by_policy, strict=True))
            ],
            "runs": runs,
        }


def flatten_metrics(report: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the numbers of a report by path, such as `queueing_s.mean`."""
    found: dict[str, float] = {}
    for name, value in report.items():
        if isinstance(value, Mapping):
            found |= flatten_metrics(value, f"{prefix}{name}.")
        elif isinstance(value, int | float):
            found[prefix + name] = value
    return found


def _summarize_over_seeds(
    flats: Sequence[Mapping[str, float]], baseline: Callable[[str, int], float]
) -> dict[str, dict[str, float]]:
    return {
        name: compute_confidence_interval([one[name] - baseline(name, seed) for seed, one in enumerate(flats)])
        for name in flats[0]
    }


def compute_confidence_interval(values: Sequence[float]) -> dict[str, float]:
    """Return the mean of two or more values and its 95% confidence interval, assuming a normal distribution."""
    mean, deviation = fmean(values), stdev(values)
    half = compute_student_t_bound(CONFIDENCE, len(values) - 1) * deviation / math.sqrt(len(values))
    return {"mean": mean, "low": mean - half, "high": mean + half}


def compute_student_t_bound(share: float, freedom: int) -> float:
    """Return the bound b with P(-b < t < b) = `share` for Student's t.

    The probability is a finite sum in theta = atan(t / sqrt(freedom)) (Abramowitz and Stegun 26.7.3, 26.7.4). It
    increases with theta, so that bisection finds the bound.
    """
    low, high = 0.0, math.pi / 2
    while high - low > 1e-15:
        theta = (low + high) / 2
        low, high = (theta, high) if _compute_probability(theta, freedom) < share else (low, theta)
    return math.tan(low) * math.sqrt(freedom)


def _compute_probability(theta: float, freedom: int) -> float:
    odd = freedom % 2
    term, total = (math.cos(theta) if odd else 1.0), 0.0
    for k in range(1 + odd, freedom, 2):
        total += term
        term *= k / (k + 1) * math.cos(theta) ** 2
    series = math.sin(theta) * total
    return 2 / math.pi * (theta + series) if odd else series


def simulate_seeds(
    inputs: SimulationInputs,
    policy: PolicySelection,
    seeds: Sequence[int],
    *,
    options: SimulationOptions = DEFAULT_OPTIONS,
    processes: int = 1,
    progress: ProgressCallback = lambda done, total: None,
) -> tuple[SimulationReport, ...]:
    """Run `simulate` under each seed. Each policy set under each seed is one task of a pool of `processes` processes.

    With more than one process, custom policy sets must consist of functions that another process can import.

    Raises:
        ValueError: jobs, demand, cluster and policies do not fit together, or a policy set cannot go to another
            process. The message names accepted values.
        PolicyError: a policy set raised an error.
    """
    sets = resolve_policy_sets(policy, inputs.cluster)
    tasks = [(seed, policies) for seed in seeds for policies in sets]
    context = _TaskContext(inputs, options, CurveCache(options.profiles))
    results = list(_run_tasks(context, tasks, min(processes, len(tasks)), progress))
    per_seed = (results[start : start + len(sets)] for start in range(0, len(results), len(sets)))
    return tuple(SimulationReport.from_results(seed, own) for seed, own in zip(seeds, per_seed, strict=True))


@dataclass(frozen=True, slots=True)
class _TaskContext:
    """Data shared by all tasks of a process: inputs, options, and the curves solved by earlier tasks."""

    inputs: SimulationInputs
    options: SimulationOptions
    curves: CurveCache

    def run(self, seed: int, policies: PolicySet, progress: Callable[[int], None]) -> PolicyResult:
        jobs, demand, cluster = self.inputs.jobs, self.inputs.demand, self.inputs.cluster
        scenario = build_scenario(jobs, demand, cluster, policies, seed=seed, curves=self.curves, options=self.options)
        return run_policy(scenario, policies, curves=self.curves, progress=progress)


def _run_tasks(
    context: _TaskContext, tasks: Sequence[tuple[int, PolicySet]], processes: int, progress: ProgressCallback
) -> Iterator[PolicyResult]:
    """Yield the result of each task in order."""
    jobs = len(context.inputs.jobs)
    total = jobs * len(tasks)
    if processes == 1:
        for number, task in enumerate(tasks):

            def report_progress(ended: int, before: int = number * jobs) -> None:
                progress(before + ended, total)

            yield context.run(*task, report_progress)
        return
    for _, policies in tasks:
        _check_picklable(policies)
    ended = get_context("spawn").Array("q", len(tasks))
    with ProcessPool(processes, _initialize_process, (context, ended)) as pool:
        waiting = futures = [pool.submit(_run_task, number, *task) for number, task in enumerate(tasks)]
        while waiting:
            done, not_done = wait(waiting, timeout=_POLL_S, return_when=FIRST_EXCEPTION)
            progress(sum(ended[:]), total)
            waiting = list(not_done)
            for future in done:
                future.result()
        yield from (future.result() for future in futures)


def _check_picklable(policies: PolicySet) -> None:
    try:
        pickle.dumps(policies)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"policy {policies.name} cannot be sent to another process: {error}. "
            "Build it from module-level functions, or use one process"
        ) from error


_process_state: tuple[_TaskContext, Counts]
"""In a process of the pool: its context, and the shared array with the number of ended jobs of each task."""


def _initialize_process(context: _TaskContext, ended: Counts) -> None:
    global _process_state
    _process_state = context, ended


def _run_task(number: int, seed: int, policies: PolicySet) -> PolicyResult:
    context, ended = _process_state
    return context.run(seed, policies, partial(ended.__setitem__, number))
