"""Jobs that want GPUs of one model, each with the counts that it may have and its speed on them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scheduler.domain.gpu_shape import canonical_counts
from scheduler.domain.job import Job
from scheduler.domain.reason import Reason, ReasonCode
from scheduler.domain.scaling_curve import LinearCurve
from scheduler.domain.snapshot import Snapshot
from scheduler.policies.allotment import capacity_by_kind, wants_gpus
from scheduler.policies.speed import gpu_model, least_gpus, linear_step_times_s, node_sizes, packed

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Contender:
    """`counts`: [1 + options] 0 for nothing, then GPUs, rising; `speeds`: [1 + options] steps/s on them. `steps`: to
    go, for a job of unknown length as many again as it has done."""

    job: Job
    counts: Ints
    speeds: Floats
    steps: float

    @property
    def base(self) -> int:
        """The smallest count; 0 where there is none at all."""
        return int(self.counts[1]) if len(self.counts) > 1 else 0

    def waits_for_plan(self) -> Reason:
        least, most = self.job.spec.min_gpus, self.job.spec.max_gpus
        return Reason(ReasonCode.WAITING_FOR_PLAN, f"no count from {least} to {most} has a plan yet")


Speeds = Callable[[Snapshot, Job, Mapping[str, int]], tuple[Ints, Floats]]
"""Counts and speeds of a job, in a fleet of nodes of these sizes."""


def contenders_by_model(snapshot: Snapshot, capacity: int, speeds: Speeds) -> list[tuple[int, list[Contender]]]:
    """For each GPU model what training has of it, at most `capacity`, and the jobs whose speed is judged on it.

    The published policies know one GPU model: a job that may run on several contends for the one it is judged on.
    """
    sizes, gpus = node_sizes(snapshot), Counter[str]()
    for (gpu, _), count in capacity_by_kind(snapshot).items():
        gpus[gpu] += count
    groups: defaultdict[str, list[Contender]] = defaultdict(list)
    for job in filter(wants_gpus, snapshot.jobs.values()):
        steps = job.remaining_steps(snapshot.now_s)
        work = steps if steps is not None else max(1.0, job.steps_at(snapshot.now_s))
        one = Contender(job, *speeds(snapshot, job, sizes), work)
        groups[gpu_model(snapshot, job, sizes) or ""].append(one)
    return [(min(capacity, gpus[gpu]), groups[gpu]) for gpu in sorted(groups)]


def by_curve(*, thrifty: bool = True) -> Speeds:
    """Counts with a plan, holes left out, at the speed of the job's curve; where `thrifty`, only those that are faster
    than every smaller one. Equal curves and ranges are read once."""
    seen: dict[tuple[str, str | None, int, int], tuple[Ints, Floats]] = {}

    def speeds(snapshot: Snapshot, job: Job, sizes: Mapping[str, int]) -> tuple[Ints, Floats]:
        spec, gpu = job.spec, gpu_model(snapshot, job, sizes)
        key = (job.curve_key, gpu, spec.min_gpus, spec.max_gpus)
        if key not in seen:
            counts, steps_per_s = _read(snapshot, job, sizes[gpu] if gpu else 0, gpu or "")
            pays = np.append(True, steps_per_s[1:] > np.maximum.accumulate(steps_per_s)[:-1]) if thrifty else ...
            seen[key] = counts[pays], steps_per_s[pays]
        counts, on_curve = seen[key]
        return counts, on_curve / job.curve_correction

    return speeds


def by_linear_law(snapshot: Snapshot, job: Job, sizes: Mapping[str, int]) -> tuple[Ints, Floats]:
    """Every count of the range, each GPU worth as much as any other of the job's, whatever its curve says."""
    step_s = linear_step_times_s(snapshot, job, sizes)(1)
    counts = np.append(0, np.arange(least_gpus(snapshot, job, sizes), job.spec.max_gpus + 1 if step_s else 0))
    return counts, counts / (step_s or 1.0)


def _read(snapshot: Snapshot, job: Job, node_gpus: int, gpu: str) -> tuple[Ints, Floats]:
    least, most, curve = job.spec.min_gpus, job.spec.max_gpus, snapshot.curve(job)
    if isinstance(curve, LinearCurve):
        counts = np.append(0, np.arange(least, most + 1))
        return counts, counts.astype(float)
    found = [(0, 0.0)]
    for count in canonical_counts(least, most, node_gpus) if node_gpus else ():
        if plan := curve.plan(packed(gpu, count, node_gpus)):
            found.append((count, 1.0 / plan.iteration_time_s))
    return np.array([count for count, _ in found]), np.array([speed for _, speed in found])
