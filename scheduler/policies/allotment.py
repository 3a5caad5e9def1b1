"""Allotment: what each job that wants to run should hold now. Policy sets that preempt by an order decide by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import inf

from scheduler.domain import gpus as gpu_sets
from scheduler.domain.job import Intent, Job
from scheduler.domain.job_state import JobState
from scheduler.domain.ledger import Kind
from scheduler.domain.reason import Reason, ReasonCode
from scheduler.domain.snapshot import Snapshot
from scheduler.policies.settings import PolicySettings
from scheduler.policies.speed import least_gpus, node_sizes


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
class Rank:
    """Where a job stands in an order: the smaller `key`, the earlier. `ground` is the figure that put it there: its
    name with the unit, its value, and the words that follow it."""

    job: Job
    key: tuple[float, ...]
    ground: tuple[str, float, str]


def wants_gpus(job: Job) -> bool:
    """The job runs or waits for GPUs. One that was preempted a moment ago counts: it keeps its place in the order."""
    waits = job.state in (JobState.QUEUED, JobState.PREEMPTED)
    return (waits or job.is_placed) and job.intent is Intent.RUN


def capacity_by_kind(snapshot: Snapshot) -> Counter[Kind]:
    """GPUs of nodes that serve training, and those in use on nodes that take nothing new but need not be left."""
    found = Counter(snapshot.ledger.serving)
    for job in snapshot.jobs.values():
        for name, indices in job.allocation.target.items():
            node = snapshot.nodes.get(name)
            if node is not None and not snapshot.serves_training(node) and not snapshot.must_be_left(node):
                found[node.gpu, snapshot.is_lent(node)] += len(indices)
    return found


def held_by_kind(snapshot: Snapshot, job: Job) -> Counter[Kind]:
    """The GPUs that a job has to run on, those of nodes that training owns first."""
    found: Counter[Kind] = Counter()
    nodes = [snapshot.nodes[name] for name in job.allocation.target if name in snapshot.nodes]
    for node in sorted(nodes, key=snapshot.is_lent):
        found[node.gpu, snapshot.is_lent(node)] += len(job.allocation.target[node.name])
    return found


def allot_in_order(snapshot: Snapshot, capacity: int, ranks: Iterable[Rank]) -> Allotment:
    """Each job its smallest count or nothing, in order, passing over whoever does not fit into what is left.

    Priority comes first. Of equals a running job stays, then the one submitted first goes first. A running job is
    counted where it runs, since it keeps its GPUs; one that waits may take any model that it could run on.
    """
    every = capacity_by_kind(snapshot)
    left, sizes, choices = Counter(every), node_sizes(snapshot), _Choices(every)
    gpus: dict[str, int] = {}
    waiting: dict[str, Reason] = {}
    for position, rank in enumerate(sorted(ranks, key=_precedence)):
        job, kinds = rank.job, choices.of(rank.job)
        held = held_by_kind(snapshot, job) if job.allocation.target_gpus >= job.spec.min_gpus else None
        for model in _models(left, kinds) if held is None else [None]:
            need = least_gpus(snapshot, job, sizes, model)
            within = [kind for kind in kinds if model in (None, kind[0])]
            most = sum([min(left[kind], held[kind]) if held else left[kind] for kind in within])
            if need <= min(most, capacity):
                _take(need, within, left, held)
                gpus[job.id], capacity = need, capacity - need
                break
        else:
            waiting[job.id] = _why(rank, position, _total(left, kinds), _total(every, kinds))
    return Allotment(gpus, waiting)


class _Choices:
    """The kinds of GPU that a job may have, worked out once for all jobs with the same wishes."""

    def __init__(self, every: Iterable[Kind]) -> None:
        self._every = sorted(every)
        self._known: dict[tuple[str, bool], list[Kind]] = {}

    def of(self, job: Job) -> list[Kind]:
        wish = gpu, fungible = job.spec.gpu, job.spec.fungible
        if wish not in self._known:
            self._known[wish] = [kind for kind in self._every if gpu in ("", kind[0]) and (fungible or not kind[1])]
        return self._known[wish]


def _precedence(rank: Rank) -> tuple[float | str, ...]:
    job = rank.job
    return (-job.spec.priority, *rank.key, not job.is_placed, job.submitted_at_s, job.id)


def _models(counts: Counter[Kind], kinds: Iterable[Kind]) -> list[str]:
    """GPU models, the one with most GPUs first."""
    totals: dict[str, int] = {}
    for gpu, lent in kinds:
        totals[gpu] = totals.get(gpu, 0) + counts[gpu, lent]
    return sorted(totals, key=lambda gpu: (-totals[gpu], gpu)) if len(totals) > 1 else list(totals)


def _total(counts: Counter[Kind], kinds: Iterable[Kind]) -> int:
    return sum([counts[kind] for kind in kinds])


def _take(wanted: int, kinds: Iterable[Kind], left: Counter[Kind], held: Counter[Kind] | None) -> None:
    for kind in kinds:
        part = min(wanted, left[kind] if held is None else min(left[kind], held[kind]))
        left[kind] -= part
        wanted -= part


def _why(rank: Rank, position: int, left: int, every: int) -> Reason:
    name, figure, words = rank.ground
    need = rank.job.spec.min_gpus
    numbers = {"needed_gpus": float(need), "free_gpus": float(left), "position": position + 1.0, name: figure}
    if need > every:
        detail = f"needs {need} {rank.job.spec.gpu or 'GPUs'}, more than all nodes have that it may use now"
        return Reason(ReasonCode.NO_MATCHING_FLAVOR, detail, numbers)
    detail = (
        f"{figure:,.0f} {words}, number {position + 1} in order; needs {gpu_sets.counted(need)}, {left} left for it"
    )
    return Reason(ReasonCode.INSUFFICIENT_GPUS, detail, numbers)
