"""Allotment: the GPUs that each job should hold now. Policy sets that preempt by an order decide by an allotment."""

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

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Speeds = Callable[[Snapshot, Job, Mapping[str, int]], tuple[Ints, Floats]]
"""Return counts and speeds of a job in a fleet with nodes of these sizes."""


@dataclass(frozen=True, slots=True)
class Allotment:
    """The GPUs that each job should hold.

    Attributes:
        gpus: by job, in order of precedence; a job that is absent or at 0 waits, with the reason in `waiting`.
        valid_until_s: when the allotment changes by time alone; infinite if only an event can change it.
    """

    gpus: Mapping[str, int]
    waiting: Mapping[str, Reason]
    valid_until_s: float = inf


Allot = Callable[[Snapshot, int, PolicySettings], Allotment]
"""Return the allotment of this many GPUs, which are on nodes that training may use now."""


@dataclass(frozen=True, slots=True)
class RankedJob:
    """A job's place in an order: smaller `sort_key` first.

    `measure` is the figure behind it: name with unit, value, words for it.
    """

    job: Job
    sort_key: tuple[float, ...]
    measure: tuple[str, float, str]


def wants_gpus(job: Job) -> bool:
    """Return whether the job runs or waits for GPUs.

    A job that was just preempted counts, so that it keeps its place.
    """
    waits = job.state in (JobState.QUEUED, JobState.PREEMPTED)
    return (waits or job.is_placed) and job.intent is Intent.RUN


def capacity_by_kind(snapshot: Snapshot) -> Counter[GpuKind]:
    """Count the GPUs of nodes that serve training, and GPUs in use on closed nodes that need not be vacated."""
    found = Counter(snapshot.index.training_gpus)
    for job in snapshot.jobs.values():
        for name, indices in job.allocation.target.items():
            node = snapshot.nodes.get(name)
            if node is not None and not snapshot.serves_training(node) and not snapshot.must_vacate(node):
                found[node.gpu, snapshot.is_lent(node)] += len(indices)
    return found


def held_by_kind(snapshot: Snapshot, job: Job) -> Counter[GpuKind]:
    """Count the GPUs that a job holds by kind, those of nodes that training owns first."""
    found: Counter[GpuKind] = Counter()
    nodes = [snapshot.nodes[name] for name in job.allocation.target if name in snapshot.nodes]
    for node in sorted(nodes, key=snapshot.is_lent):
        found[node.gpu, snapshot.is_lent(node)] += len(job.allocation.target[node.name])
    return found


def allot_in_order(snapshot: Snapshot, capacity: int, ranked_jobs: Iterable[RankedJob]) -> Allotment:
    """Give each job its smallest count or nothing, in order, passing over jobs that do not fit into the rest.

    Priority comes first. Among equals, running jobs come first, then the earliest submission. A running job counts
    where it runs, since it keeps its GPUs; a waiting job may take any model that it can run on.
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
            available = sum([min(left[kind], held[kind]) if held else left[kind] for kind in within])
            if need <= min(available, capacity):
                _deduct(need, within, left, held)
                gpus[job.id], capacity = need, capacity - need
                break
        else:
            waiting[job.id] = _waiting_reason(rank, position, _sum_kinds(left, kinds), _sum_kinds(every, kinds))
    return Allotment(gpus, waiting)


class _KindsByRequest:
    """The kinds of GPU that a job may have, computed once for all jobs with the same request."""

    def __init__(self, every: Iterable[GpuKind]) -> None:
        self._every = sorted(every)
        self._known: dict[tuple[str, bool], list[GpuKind]] = {}

    def of(self, job: Job) -> list[GpuKind]:
        wish = gpu, fungible = job.spec.gpu, job.accepts_lent_nodes
        if wish not in self._known:
            self._known[wish] = [kind for kind in self._every if gpu in ("", kind[0]) and (fungible or not kind[1])]
        return self._known[wish]


def _precedence_key(ranked: RankedJob) -> tuple[float | str, ...]:
    job = ranked.job
    return (-job.spec.priority, *ranked.sort_key, not job.is_placed, job.submitted_at_s, job.id)


def _sort_models(counts: Counter[GpuKind], kinds: Iterable[GpuKind]) -> list[str]:
    """Return GPU models, the one with most GPUs first."""
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
        needed = gpu_sets.format_gpu_count(need, ranked.job.spec.gpu)
        detail = f"needs {needed}; only {every} are on nodes that this job can use"
        return Reason(ReasonCode.NO_MATCHING_FLAVOR, detail, numbers)
    place = f"position {position + 1} with {figure:,.0f} {words}"
    detail = f"{place}; needs {gpu_sets.format_gpu_count(need)}, {left} free for this job"
    return Reason(ReasonCode.INSUFFICIENT_GPUS, detail, numbers)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A job that wants GPUs of one model, with the counts that it may have and its speed on them.

    `counts` [1 + options] is 0 for nothing, then GPUs, ascending; `speeds` [1 + options] is steps/s. `steps` is the
    remaining work; a job of unknown length is assumed to need as many steps again as it has done, or as its service on
    the smallest count would have made if that is more: work that a preemption loses counts, too, because the job would
    otherwise remain the shortest and be started and preempted without end.
    """

    job: Job
    counts: Ints
    speeds: Floats
    steps: float

    @property
    def smallest_count(self) -> int:
        """The smallest count; 0 if there is none."""
        return int(self.counts[1]) if len(self.counts) > 1 else 0

    def missing_plan_reason(self) -> Reason:
        min_gpus, max_gpus = self.job.spec.min_gpus, self.job.spec.max_gpus
        return Reason(ReasonCode.WAITING_FOR_PLAN, f"no count from {min_gpus} to {max_gpus} has a plan yet")


def candidates_by_model(snapshot: Snapshot, capacity: int, speeds: Speeds) -> list[tuple[int, list[Candidate]]]:
    """Return, for each GPU model, the GPUs of training, at most `capacity`, and the jobs whose speed is measured on it.

    The published policies know one GPU model, so a job that can run on several contends only for that one.
    """
    sizes, gpus = node_sizes(snapshot), Counter[str]()
    for (gpu, _), count in capacity_by_kind(snapshot).items():
        gpus[gpu] += count
    groups: defaultdict[str, list[Candidate]] = defaultdict(list)
    for job in filter(wants_gpus, snapshot.jobs.values()):
        counts, steps_per_s = speeds(snapshot, job, sizes)
        if job.is_fixed and job.allocation.target_gpus in counts:
            allowed = (counts == 0) | (counts == job.allocation.target_gpus)
            counts, steps_per_s = counts[allowed], steps_per_s[allowed]
        candidate = Candidate(job, counts, steps_per_s, _remaining_steps(snapshot, job, counts, steps_per_s))
        groups[gpu_model(snapshot, job, sizes) or ""].append(candidate)
    return [(min(capacity, gpus[gpu]), groups[gpu]) for gpu in sorted(groups)]


def _remaining_steps(snapshot: Snapshot, job: Job, counts: Ints, speeds: Floats) -> float:
    """Return the remaining steps of a job, as `Candidate` states them."""
    if (steps := job.remaining_steps(snapshot.now_s)) is not None:
        return steps
    served = job.account.gpu_s / float(counts[1]) * float(speeds[1]) if len(counts) > 1 else 0.0
    return max(1.0, job.steps_at(snapshot.now_s), served)


def curve_speeds(*, requires_speedup: bool = True) -> Speeds:
    """Return speeds by the jobs' curves, only for counts with a plan.

    Equal curves and ranges are read once.

    Args:
        requires_speedup: keep only counts that are faster than every smaller one.
    """
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
        return counts, on_curve * _speed_factor(snapshot, job, gpu) / job.curve_correction

    return speeds


def linear_speeds(snapshot: Snapshot, job: Job, sizes: Mapping[str, int]) -> tuple[Ints, Floats]:
    """Return every count of the range, each GPU worth as much as any other, whatever the job's curve says."""
    step_s = linear_step_times_s(snapshot, job, sizes)(1)
    counts = np.append(0, np.arange(min_feasible_gpus(snapshot, job, sizes), job.spec.max_gpus + 1 if step_s else 0))
    return counts, counts / (step_s or 1.0)


def _speed_factor(snapshot: Snapshot, job: Job, gpu: str | None) -> float:
    """Return the relative speed of a GPU model for a job without a model, and 1 for others: their curve contains it."""
    curve = snapshot.curve(job)
    return curve.speed_on(gpu).value if gpu and isinstance(curve, LinearCurve) else 1.0


def _read_curve(snapshot: Snapshot, job: Job, node_gpus: int, gpu: str) -> tuple[Ints, Floats]:
    min_gpus, max_gpus, curve = job.spec.min_gpus, job.spec.max_gpus, snapshot.curve(job)
    if isinstance(curve, LinearCurve):
        counts = np.append(0, np.arange(min_gpus, max_gpus + 1))
        return counts, counts.astype(float)
    found = [(0, 0.0)]
    for count in canonical_gpu_counts(min_gpus, max_gpus, node_gpus) if node_gpus else ():
        if plan := curve.plan_for(packed(gpu, count, node_gpus)):
            found.append((count, 1.0 / plan.iteration_time_s))
    return np.array([count for count, _ in found]), np.array([speed for _, speed in found])
