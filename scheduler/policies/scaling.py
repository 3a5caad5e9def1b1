"""How many GPUs each elastic job should have: a multiple-choice knapsack over the gains of the scaling curves.

Phase 2 of Lyra (EuroSys'23, section 5.2): a group per elastic job, item k has k GPUs, its value is the
reduction of the job's completion time. Lyra's values are linear in k; ours follow the curve and pay for the
reconfiguration. The greedy on the concave hull is exact but for the last item that does not fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from scheduler.domain.job import Intent, Job
from scheduler.domain.job_state import JobState
from scheduler.domain.snapshot import Snapshot
from scheduler.policies.settings import PolicySettings
from scheduler.policies.speed import least_gpus, node_sizes, remaining_s, step_time_s


@dataclass(frozen=True, slots=True)
class Item:
    """Having `gpus` GPUs, with the job's remaining run time then."""

    gpus: int
    remaining_s: float


@dataclass(frozen=True, slots=True)
class Segment:
    """One step up a job's hull: from `low` to `high` GPUs, worth `slope` seconds a GPU."""

    slope: float
    job_id: str
    low: int
    high: int


def flexible_counts(
    snapshot: Snapshot, starting: Iterable[str], spare: int, settings: PolicySettings
) -> Mapping[str, int]:
    """GPUs for each elastic job that may change now, at least its minimum.

    `spare` free GPUs are there beyond all base demand, that of the jobs in `starting` included; what the jobs in
    question hold above their minimum is dealt out anew with them. Jobs in `starting` pay no reconfiguration; a
    running job keeps its count where the change would not pay for itself.
    """
    sizes = node_sizes(snapshot)
    starters = frozenset(starting)
    groups: dict[str, list[Item]] = {}
    budget = spare
    for job in _changeable(snapshot, starters, settings):
        if items := _items(snapshot, job, sizes):
            groups[job.id] = items
            budget += max(0, job.allocation.target_gpus - items[0].gpus)
    counts = fill_knapsack(groups, budget)
    return {job_id: _worth_changing(snapshot, job_id, count, groups, settings) for job_id, count in counts.items()}


def least_gain_first(snapshot: Snapshot, missing: int, settings: PolicySettings) -> Mapping[str, int]:
    """Smaller counts for running jobs that free `missing` flexible GPUs in all, or as many as there are.

    Whole flexible parts are taken, where a GPU gains its job least, so that few jobs are disturbed; only the last
    job gives up a part.
    """
    sizes = node_sizes(snapshot)
    offers: list[tuple[float, str, int, int]] = []
    for job in snapshot.jobs.values():
        present, least = job.allocation.target_gpus, job.spec.min_gpus
        if job.state is not JobState.RUNNING or job.intent is not Intent.RUN or present <= least:
            continue
        lost_s = remaining_s(snapshot, job, least, sizes) - remaining_s(snapshot, job, present, sizes)
        offers.append(((lost_s + settings.reconfiguration_s) / (present - least), job.id, present, least))
    counts: dict[str, int] = {}
    for _, job_id, present, least in sorted(offers):
        if missing <= 0:
            break
        counts[job_id] = max(least, present - missing)
        missing -= present - counts[job_id]
    return counts


def _changeable(snapshot: Snapshot, starting: frozenset[str], settings: PolicySettings) -> list[Job]:
    """Elastic jobs that start now, or that have run undisturbed for the resize pause; those at their minimum need
    not wait for it."""

    def rested(job: Job) -> bool:
        pause_over = snapshot.now_s - job.state_since_s >= settings.resize_pause_s
        return job.state is JobState.RUNNING and (pause_over or job.allocation.target_gpus <= job.spec.min_gpus)

    return [
        job
        for job in snapshot.jobs.values()
        if job.spec.is_elastic and job.intent is Intent.RUN and (job.id in starting or rested(job))
    ]


def fill_knapsack(groups: Mapping[str, list[Item]], budget: int) -> Mapping[str, int]:
    """Counts that cut the sum of remaining times most, at most `budget` GPUs above the first item of each group.

    Takes the segments of all hulls in descending slope. A segment that no longer fits ends its own job's climb.
    """
    counts = {job_id: items[0].gpus for job_id, items in groups.items()}
    segments = [segment for job_id, items in groups.items() for segment in _hull(job_id, items)]
    for segment in sorted(segments, key=lambda s: (-s.slope, s.job_id, s.low)):
        if budget <= 0:
            break
        weight = segment.high - segment.low
        if counts[segment.job_id] == segment.low and weight <= budget:
            counts[segment.job_id] = segment.high
            budget -= weight
    return counts


def _items(snapshot: Snapshot, job: Job, sizes: Mapping[str, int]) -> list[Item]:
    """The counts that the job can have with its remaining time then, ascending; only gains are kept."""
    steps = job.remaining_steps(snapshot.now_s)
    work = steps if steps is not None else max(1.0, job.progress.steps)
    items: list[Item] = []
    for gpus in range(least_gpus(snapshot, job, sizes), job.spec.max_gpus + 1):
        step_s = step_time_s(snapshot, job, gpus, sizes)
        if step_s is not None and (not items or work * step_s < items[-1].remaining_s):
            items.append(Item(gpus, work * step_s))
    return items


def _hull(job_id: str, items: list[Item]) -> list[Segment]:
    """The upper concave hull of time saved over GPUs, as segments of falling slope."""
    corners = [items[0]]
    for item in items[1:]:
        while len(corners) > 1 and _slope(corners[-1], item) >= _slope(corners[-2], corners[-1]):
            corners.pop()
        corners.append(item)
    return [Segment(_slope(low, high), job_id, low.gpus, high.gpus) for low, high in pairwise(corners)]


def _slope(low: Item, high: Item) -> float:
    return (low.remaining_s - high.remaining_s) / (high.gpus - low.gpus)


def _worth_changing(
    snapshot: Snapshot, job_id: str, count: int, groups: Mapping[str, list[Item]], settings: PolicySettings
) -> int:
    """`count`, or the present count where growing to `count` saves less than twice what the change costs."""
    present = snapshot.jobs[job_id].allocation.target_gpus
    if present == 0 or count <= present:
        return count
    remaining = {item.gpus: item.remaining_s for item in groups[job_id]}
    if present not in remaining:
        return count
    saved_s = remaining[present] - remaining[count]
    return count if saved_s >= 2.0 * settings.reconfiguration_s else present
