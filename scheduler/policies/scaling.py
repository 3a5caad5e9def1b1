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
from scheduler.policies.speed import least_gpus, node_sizes, remaining_s, step_times_s


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
    """GPUs for each elastic job that may change now.

    `spare` free GPUs are there beyond all base demand, that of the jobs in `starting` included. Either they alone
    are dealt out, or with them all that the running jobs hold above their minimum: whichever saves more time once
    each disturbed job has paid twice for its reconfiguration. Jobs in `starting` pay nothing.
    """
    sizes, starters = node_sizes(snapshot), frozenset(starting)
    groups: dict[str, list[Item]] = {}
    present: dict[str, Item] = {}
    for job in _changeable(snapshot, starters, settings):
        if items := _items(snapshot, job, sizes):
            groups[job.id] = items
            if job.allocation.target_gpus:
                present[job.id] = _present_item(snapshot, job)
    price_s = 2.0 * settings.reconfiguration_s
    growing = _deal(_from_present(groups, present), present, spare, price_s)
    held = sum(item.gpus - groups[job_id][0].gpus for job_id, item in present.items())
    if held <= 0:
        return growing
    anew = _deal(groups, present, spare + held, price_s)
    return max(growing, anew, key=lambda counts: _saved_s(counts, groups, present, price_s))


def least_gain_first(snapshot: Snapshot, missing: int, settings: PolicySettings) -> Mapping[str, int]:
    """Smaller counts for running jobs that free `missing` flexible GPUs in all, or as many as there are.

    Whole flexible parts are taken, where a GPU gains its job least, so that few jobs are disturbed; only the last
    job gives up a part.
    """
    sizes = node_sizes(snapshot)
    offers: list[tuple[float, str, int, int]] = []
    for job in snapshot.jobs.values():
        if job.state is not JobState.RUNNING or job.intent is not Intent.RUN or not job.spec.is_elastic:
            continue
        present, least = job.allocation.target_gpus, least_gpus(snapshot, job, sizes)
        if present <= least:
            continue
        lost_s = remaining_s(snapshot, job, least, sizes) - _present_item(snapshot, job).remaining_s
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


def _deal(
    groups: Mapping[str, list[Item]], present: Mapping[str, Item], budget: int, price_s: float
) -> Mapping[str, int]:
    """As `fill_knapsack`, but a running job that would save less than `price_s` by growing stays as it is, and the
    others share what it would have got."""
    open_groups, pinned = dict(groups), dict[str, int]()
    while True:
        counts = fill_knapsack(open_groups, budget)
        idle = [job_id for job_id in present if _grows_in_vain(job_id, counts, groups, present, price_s)]
        if not idle:
            return {**counts, **pinned}
        for job_id in idle:
            pinned[job_id] = present[job_id].gpus
            budget -= pinned[job_id] - open_groups.pop(job_id)[0].gpus


def _grows_in_vain(
    job_id: str,
    counts: Mapping[str, int],
    groups: Mapping[str, list[Item]],
    present: Mapping[str, Item],
    price_s: float,
) -> bool:
    now, count = present[job_id], counts.get(job_id, 0)
    return count > now.gpus and now.remaining_s - _remaining_at(groups[job_id], count) < price_s


def _saved_s(
    counts: Mapping[str, int], groups: Mapping[str, list[Item]], present: Mapping[str, Item], price_s: float
) -> float:
    """Run time that the counts save in all, the price of each change of a running job taken off."""
    saved_s = 0.0
    for job_id, count in counts.items():
        now = present.get(job_id)
        if now is None:
            saved_s += groups[job_id][0].remaining_s - _remaining_at(groups[job_id], count)
        elif count != now.gpus:
            saved_s += now.remaining_s - _remaining_at(groups[job_id], count) - price_s
    return saved_s


def _remaining_at(items: Iterable[Item], gpus: int) -> float:
    return next(item.remaining_s for item in items if item.gpus == gpus)


def _from_present(groups: Mapping[str, list[Item]], present: Mapping[str, Item]) -> dict[str, list[Item]]:
    """The same groups without counts below the present ones."""
    kept = dict(groups)
    for job_id, now in present.items():
        kept[job_id] = [now, *(i for i in groups[job_id] if i.gpus > now.gpus and i.remaining_s < now.remaining_s)]
    return kept


def _work(snapshot: Snapshot, job: Job) -> float:
    """Steps to go; for a job of unknown length as many again as it has done."""
    steps = job.remaining_steps(snapshot.now_s)
    return steps if steps is not None else max(1.0, job.steps_at(snapshot.now_s))


def _present_item(snapshot: Snapshot, job: Job) -> Item:
    """What the job has now. Its own plan says how fast that is: its GPUs may lie otherwise than a curve assumes."""
    return Item(job.allocation.target_gpus, _work(snapshot, job) * job.step_time_s())


def _items(snapshot: Snapshot, job: Job, sizes: Mapping[str, int]) -> list[Item]:
    """The counts that the job can have with its remaining time then, ascending; only gains are kept."""
    work, on_curve_s = _work(snapshot, job), step_times_s(snapshot, job, sizes)
    present = job.allocation.target_gpus
    items: list[Item] = []
    for gpus in sorted({*range(least_gpus(snapshot, job, sizes), job.spec.max_gpus + 1), present} - {0}):
        step_s = job.step_time_s() if gpus == present else on_curve_s(gpus)
        if step_s is not None and (not items or work * step_s < items[-1].remaining_s):
            items.append(Item(gpus, work * step_s))
    return items


def _hull(job_id: str, items: list[Item]) -> list[Segment]:
    """The upper concave hull of time saved over GPUs, as segments of falling slope."""
    corners = [items[0]]
    for item in items[1:]:
        while len(corners) > 1 and _slope(corners[-1], item) > _slope(corners[-2], corners[-1]):
            corners.pop()
        corners.append(item)
    return [Segment(_slope(low, high), job_id, low.gpus, high.gpus) for low, high in pairwise(corners)]


def _slope(low: Item, high: Item) -> float:
    return (low.remaining_s - high.remaining_s) / (high.gpus - low.gpus)
