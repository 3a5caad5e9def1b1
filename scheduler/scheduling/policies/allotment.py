"""Allotment: what each job that wants to run should hold now. Policy sets that preempt by an order decide by one.

Jobs that want GPUs of one model, each with the counts that it may have and its speed on them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from scheduler.domain import gpu_sets
from scheduler.domain.decisions import Reason, ReasonCode
from scheduler.domain.gpu_sets import canonical_gpu_counts
from scheduler.domain.job import Intent, Job
from scheduler.domain.job_state import JobState
from scheduler.domain.scaling_curve import LinearCurve
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.snapshot_index import GpuKind
from scheduler.scheduling.policies.settings import PolicySettings
from scheduler.scheduling.policies.speed import gpu_model, linear_step_times_s, min_feasible_gpus, node_sizes, packed


@dataclass(frozen=True, slots=True)
class Allotment:
    """`gpus`: what each job that wants to run should hold now, in order of precedence; absent or 0: it waits, with the
    reason in `waiting`. `valid_until_s`: when time alone will change it; infinite where only an event does."""

    gpus: Mapping[str, int]
    waiting: Mapping[str, Reason]
    valid_until_s: float = inf


Allot = Callable[[Snapshot, int, PolicySettings], Allotment]
"""The allotment of so many GPUs: those on nodes that training may use now."""


@dataclass(frozen=True, slots=True)
class RankedJob:
    """Where a job stands in an order: the smaller `key`, the earlier. `ground` is the figure that put it there: its
    name with the unit, its value, and the words that follow it."""

    job: Job
    sort_key: tuple[float, ...]
    measure: tuple[str, float, str]


def wants_gpus(job: Job) -> bool:
    """The job runs or waits for GPUs. One that was preempted a moment ago counts: it keeps its place in the order."""
    waits = job.state in (JobState.QUEUED, JobState.PREEMPTED)
    return (waits or job.is_placed) and job.intent is Intent.RUN


def capacity_by_kind(snapshot: Snapshot) -> Counter[GpuKind]:
    """GPUs of nodes that serve training, and those in use on nodes that take nothing new but need not be left."""
    found = Counter(snapshot.index.training_gpus)
    for job in snapshot.jobs.values():
        for name, indices in job.allocation.target.items():
            node = snapshot.nodes.get(name)
            if node is not None and not snapshot.serves_training(node) and not snapshot.must_vacate(node):
                found[node.gpu, snapshot.is_lent(node)] += len(indices)
    return found


def held_by_kind(snapshot: Snapshot, job: Job) -> Counter[GpuKind]:
    """The GPUs that a job has to run on, those of nodes that training owns first."""
    found: Counter[GpuKind] = Counter()
    nodes = [snapshot.nodes[name] for name in job.allocation.target if name in snapshot.nodes]
    for node in sorted(nodes, key=snapshot.is_lent):
        found[node.gpu, snapshot.is_lent(node)] += len(job.allocation.target[node.name])
    return found


def allot_in_order(snapshot: Snapshot, capacity: int, ranked_jobs: Iterable[RankedJob]) -> Allotment:
    """Each job its smallest count or nothing, in order, passing over whoever does not fit into what is left.

    Priority comes first. Of equals a running job stays, then the one submitted first goes first. A running job is
    counted where it runs, since it keeps its GPUs; one that waits may take any model that it could run on.
    """
    every = capacity_by_kind(snapshot)
    left, sizes, choices = Counter(every), node_sizes(snapshot), _KindsByRequest(every)
    gpus: dict[str, int] = {}
    waiting: dict[str, Reason] = {}
    for position, rank in enumerate(sorted(ranked_jobs, key=_precedence_key)):
        job, kinds = rank.job, choices.of(rank.job)
        held = held_by_kind(snapshot, job) if job.allocation.target_gpus >= job.spec.min_gpus else None
        for model in _sort_models(left, kinds) if held is None else [None]:
            need = min_feasible_gpus(snapshot, job, sizes, model)
            within = [kind for kind in kinds if model in (None, kind[0])]
            most = sum([min(left[kind], held[kind]) if held else left[kind] for kind in within])
            if need <= min(most, capacity):
                _deduct(need, within, left, held)
                gpus[job.id], capacity = need, capacity - need
                break
        else:
            waiting[job.id] = _waiting_reason(rank, position, _sum_kinds(left, kinds), _sum_kinds(every, kinds))
    return Allotment(gpus, waiting)


class _KindsByRequest:
    """The kinds of GPU that a job may have, worked out once for all jobs with the same wishes."""

    def __init__(self, every: Iterable[GpuKind]) -> None:
        self._every = sorted(every)
        self._known: dict[tuple[str, bool], list[GpuKind]] = {}

    def of(self, job: Job) -> list[GpuKind]:
        wish = gpu, fungible = job.spec.gpu, job.spec.fungible
        if wish not in self._known:
            self._known[wish] = [kind for kind in self._every if gpu in ("", kind[0]) and (fungible or not kind[1])]
        return self._known[wish]


def _precedence_key(ranked: RankedJob) -> tuple[float | str, ...]:
    job = ranked.job
    return (-job.spec.priority, *ranked.sort_key, not job.is_placed, job.submitted_at_s, job.id)


def _sort_models(counts: Counter[GpuKind], kinds: Iterable[GpuKind]) -> list[str]:
    """GPU models, the one with most GPUs first."""
    totals: dict[str, int] = {}
    for gpu, lent in kinds:
        totals[gpu] = totals.get(gpu, 0) + counts[gpu, lent]
    return sorted(totals, key=lambda gpu: (-totals[gpu], gpu)) if len(totals) > 1 else list(totals)


def _sum_kinds(counts: Counter[GpuKind], kinds: Iterable[GpuKind]) -> int:
    return sum([counts[kind] for kind in kinds])


def _deduct(wanted: int, kinds: Iterable[GpuKind], left: Counter[GpuKind], held: Counter[GpuKind] | None) -> None:
    for kind in kinds:
        part = min(wanted, left[kind] if held is None else min(left[kind], held[kind]))
        left[kind] -= part
        wanted -= part


def _waiting_reason(ranked: RankedJob, position: int, left: int, every: int) -> Reason:
    name, figure, words = ranked.measure
    need = ranked.job.spec.min_gpus
    numbers = {"needed_gpus": float(need), "free_gpus": float(left), "position": position + 1.0, name: figure}
    if need > every:
        detail = f"needs {need} {ranked.job.spec.gpu or 'GPUs'}, more than all nodes have that it may use now"
        return Reason(ReasonCode.NO_MATCHING_FLAVOR, detail, numbers)
    detail = f"{figure:,.0f} {words}, number {position + 1} in order; needs {gpu_sets.format_gpu_count(need)}, {left} left for it"
    return Reason(ReasonCode.INSUFFICIENT_GPUS, detail, numbers)


Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Candidate:
    """`counts`: [1 + options] 0 for nothing, then GPUs, rising; `speeds`: [1 + options] steps/s on them. `steps`: to
    go, for a job of unknown length as many again as it has done."""

    job: Job
    counts: Ints
    speeds: Floats
    steps: float

    @property
    def smallest_count(self) -> int:
        """The smallest count; 0 where there is none at all."""
        return int(self.counts[1]) if len(self.counts) > 1 else 0

    def missing_plan_reason(self) -> Reason:
        least, most = self.job.spec.min_gpus, self.job.spec.max_gpus
        return Reason(ReasonCode.WAITING_FOR_PLAN, f"no count from {least} to {most} has a plan yet")


Speeds = Callable[[Snapshot, Job, Mapping[str, int]], tuple[Ints, Floats]]
"""Counts and speeds of a job, in a fleet of nodes of these sizes."""


def candidates_by_model(snapshot: Snapshot, capacity: int, speeds: Speeds) -> list[tuple[int, list[Candidate]]]:
    """For each GPU model what training has of it, at most `capacity`, and the jobs whose speed is judged on it.

    The published policies know one GPU model: a job that may run on several contends for the one it is judged on.
    """
    sizes, gpus = node_sizes(snapshot), Counter[str]()
    for (gpu, _), count in capacity_by_kind(snapshot).items():
        gpus[gpu] += count
    groups: defaultdict[str, list[Candidate]] = defaultdict(list)
    for job in filter(wants_gpus, snapshot.jobs.values()):
        steps = job.remaining_steps(snapshot.now_s)
        work = steps if steps is not None else max(1.0, job.steps_at(snapshot.now_s))
        one = Candidate(job, *speeds(snapshot, job, sizes), work)
        groups[gpu_model(snapshot, job, sizes) or ""].append(one)
    return [(min(capacity, gpus[gpu]), groups[gpu]) for gpu in sorted(groups)]


def curve_speeds(*, requires_speedup: bool = True) -> Speeds:
    """Counts with a plan, holes left out, at the speed of the job's curve; where `thrifty`, only those that are faster
    than every smaller one. Equal curves and ranges are read once."""
    seen: dict[tuple[str, str | None, int, int], tuple[Ints, Floats]] = {}

    def speeds(snapshot: Snapshot, job: Job, sizes: Mapping[str, int]) -> tuple[Ints, Floats]:
        spec, gpu = job.spec, gpu_model(snapshot, job, sizes)
        key = (job.curve_key, gpu, spec.min_gpus, spec.max_gpus)
        if key not in seen:
            counts, steps_per_s = _read_curve(snapshot, job, sizes[gpu] if gpu else 0, gpu or "")
            pays = (
                np.append(True, steps_per_s[1:] > np.maximum.accumulate(steps_per_s)[:-1]) if requires_speedup else ...
            )
            seen[key] = counts[pays], steps_per_s[pays]
        counts, on_curve = seen[key]
        return counts, on_curve / job.curve_correction

    return speeds


def linear_speeds(snapshot: Snapshot, job: Job, sizes: Mapping[str, int]) -> tuple[Ints, Floats]:
    """Every count of the range, each GPU worth as much as any other of the job's, whatever its curve says."""
    step_s = linear_step_times_s(snapshot, job, sizes)(1)
    counts = np.append(0, np.arange(min_feasible_gpus(snapshot, job, sizes), job.spec.max_gpus + 1 if step_s else 0))
    return counts, counts / (step_s or 1.0)


def _read_curve(snapshot: Snapshot, job: Job, node_gpus: int, gpu: str) -> tuple[Ints, Floats]:
    least, most, curve = job.spec.min_gpus, job.spec.max_gpus, snapshot.curve(job)
    if isinstance(curve, LinearCurve):
        counts = np.append(0, np.arange(least, most + 1))
        return counts, counts.astype(float)
    found = [(0, 0.0)]
    for count in canonical_gpu_counts(least, most, node_gpus) if node_gpus else ():
        if plan := curve.plan_for(packed(gpu, count, node_gpus)):
            found.append((count, 1.0 / plan.iteration_time_s))
    return np.array([count for count, _ in found]), np.array([speed for _, speed in found])
