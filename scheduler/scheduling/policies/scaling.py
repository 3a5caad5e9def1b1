"""Scaling: the number of GPUs of each elastic job.

A multiple-choice knapsack over the gains of the scaling curves determines it.

This is phase 2 of Lyra (EuroSys'23, section 5.2): a group per elastic job, in which item k has k GPUs. Lyra's value is
the seconds by which k GPUs shorten the job under linear scaling. That favors long jobs, which keep the GPUs for long.
Our value is the rate at which the job approaches its end, one over its remaining time: a GPU goes where it brings an
end nearest. Jobs with little remaining work therefore go first, like shortest remaining time first for jobs of one
size. Speeds follow the curve, and the remaining time of a running job includes the price of its reconfiguration.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from math import inf

from scheduler.domain.job import SPEED_MEASUREMENT_S_MIN, Intent, Job
from scheduler.domain.job_state import JobState
from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.domain.scaling_curve import ScalingCurve
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling.policies.knapsack import Item, solve_knapsack
from scheduler.scheduling.policies.settings import PolicySettings
from scheduler.scheduling.policies.speed import (
    efficient_gpus,
    gpu_model,
    linear_step_times_s,
    node_sizes,
    remaining_s,
    step_times_s,
)

DEADLINE_RATE = 1.0
"""Value of meeting a deadline, in the unit of ends per second of a job, which is at most 1."""


def flexible_counts(
    snapshot: Snapshot, starting: Iterable[str], spare: int, settings: PolicySettings
) -> Mapping[str, int]:
    """Return GPUs for each elastic job whose number should change now, and for those that start.

    `spare` free GPUs are available beyond all base demand, including that of the jobs in `starting`. They are
    distributed together with all that running jobs hold above their minimum. For a running job, any other number than
    its current one takes `gain_factor` times its reconfiguration longer; jobs in `starting` pay nothing. A count that
    meets a job's deadline is worth more than any count that does not.
    """
    sizes, starters = node_sizes(snapshot), frozenset(starting)
    if spare <= 0 and not snapshot.index.above_minimum:
        return {}
    running = [job for job in list_resizable_jobs(snapshot, settings) if not _is_mixed(job)]
    if not starters and not any(_may_change(job) for job in running):
        return {}
    starting_jobs = [snapshot.jobs[job_id] for job_id in sorted(starters)]
    if (
        _count_wanted_gpus(snapshot, starting_jobs) <= spare
    ):  # enough for all: jobs that want no more keep what they have
        running = [job for job in running if _may_change(job)]
    groups, budget = dict[str, list[Item]](), spare
    for job in (*starting_jobs, *running):
        items = _items(snapshot, job, sizes, settings)
        if len(items) > 1:
            groups[job.id] = items
            budget += max(0, job.allocation.target_gpus - items[0].gpus)
    counts = solve_knapsack(groups, budget)
    return {
        job_id: count
        for job_id, count in counts.items()
        if job_id in starters or count != snapshot.jobs[job_id].allocation.target_gpus
    }


def least_gain_first(snapshot: Snapshot, missing: int, settings: PolicySettings) -> Mapping[str, int]:
    """Return smaller counts for running jobs that free `missing` flexible GPUs, or as many as there are.

    Whole flexible parts are taken where a GPU gains its job least, so that few jobs are disturbed; only the last job
    gives up a part.
    """
    sizes = node_sizes(snapshot)
    offers: list[tuple[float, str, int, int]] = []
    for job in snapshot.jobs.values():
        current_gpus, min_gpus = job.allocation.target_gpus, efficient_gpus(snapshot, job, sizes)
        if job.state is not JobState.RUNNING or job.intent is not Intent.RUN or current_gpus <= min_gpus:
            continue
        now_s = remaining_work(snapshot, job) * job.step_time_s()
        then_s = remaining_s(snapshot, job, min_gpus, sizes) + settings.reconfiguration_s_for(job)
        lost = completion_rate(snapshot, job, now_s) - completion_rate(snapshot, job, then_s)
        offers.append((lost / (current_gpus - min_gpus), job.id, current_gpus, min_gpus))
    counts: dict[str, int] = {}
    for _, job_id, current_gpus, min_gpus in sorted(offers):
        if missing <= 0:
            break
        counts[job_id] = max(min_gpus, current_gpus - missing)
        missing -= current_gpus - counts[job_id]
    return counts


def estimate_arrivals(snapshot: Snapshot, settings: PolicySettings) -> int:
    """Return the GPUs that jobs are expected to start on until the next full pass: as many as in the last period.

    Growing jobs leave them free, and a job that must shrink frees them too, so that a series of arrivals does not
    disturb one job each.
    """
    since_s, jobs = snapshot.now_s - settings.full_pass_period_s, snapshot.jobs
    running = map(jobs.__getitem__, snapshot.index.running)
    starts_s = ((job, job.account.first_started_at_s) for job in running)
    return sum(job.spec.min_gpus for job, start_s in starts_s if start_s is not None and start_s > since_s)


def expect_no_arrivals(snapshot: Snapshot, settings: PolicySettings) -> int:
    """Return 0: every free GPU is distributed."""
    return 0


def list_resizable_jobs(snapshot: Snapshot, settings: PolicySettings) -> list[Job]:
    """Return elastic jobs that were not resized during the resize pause.

    Jobs at their minimum need not wait for it.
    """
    ledger, now_s = snapshot.index, snapshot.now_s
    return [
        job
        for job in ledger.sort_by_submission(ledger.elastic)
        if job.intent is Intent.RUN
        and (
            now_s - job.state_since_s >= settings.resize_pause_s_for(job)
            or job.allocation.target_gpus <= job.spec.min_gpus
        )
    ]


def _count_wanted_gpus(snapshot: Snapshot, starters: Iterable[Job]) -> int:
    """Return the GPUs that all jobs together could take beyond what they have or start on."""
    growable = map(snapshot.jobs.__getitem__, snapshot.index.below_maximum)
    more = sum(job.spec.max_gpus - job.allocation.target_gpus for job in growable)
    return more + sum(job.spec.max_gpus - job.spec.min_gpus for job in starters)


def _is_mixed(job: Job) -> bool:
    """Return whether the job holds GPUs of several models, unless a view shows only those of its home model."""
    plan = job.allocation.plan
    return plan is not None and plan.is_mixed and plan.world_size == job.allocation.target_gpus


def _may_change(job: Job) -> bool:
    """Return whether the job may want more GPUs, or fewer because its curve may be faster there."""
    return job.spec.has_profile or job.allocation.target_gpus < job.spec.max_gpus


def remaining_work(snapshot: Snapshot, job: Job) -> float:
    """Return the remaining steps; a job of unknown length is assumed to need as many again as it has done."""
    steps = job.remaining_steps(snapshot.now_s)
    return steps if steps is not None else max(1.0, job.steps_at(snapshot.now_s))


def _items(snapshot: Snapshot, job: Job, sizes: Mapping[str, int], settings: PolicySettings) -> list[Item]:
    """Return the job's useful counts with its remaining time, ascending; counts without a gain are left out.

    The current count is judged by the current plan, because its GPUs may be placed differently than a curve assumes. A
    job whose plan is outdated could also be re-planned on its GPUs, for the price of a resize.
    """
    law = linear_step_times_s if settings.linear_scaling else step_times_s
    work, on_curve_s = remaining_work(snapshot, job), law(snapshot, job, sizes)
    current = job.allocation.target_gpus
    price_s = settings.gain_factor * settings.reconfiguration_s_for(job) if current else 0.0
    items: list[Item] = []
    best_s = inf
    for gpus in _candidate_counts(snapshot, job, sizes):
        step_s = job.step_time_s() if gpus == current else on_curve_s(gpus)
        if step_s is None:
            continue
        time_s = work * step_s + (0.0 if gpus == current else price_s)
        if gpus == current and job.needs_new_plan and (replanned_s := on_curve_s(gpus)) is not None:
            time_s = min(time_s, work * replanned_s + price_s)
        if time_s < best_s:
            best_s = time_s
            items.append(Item(gpus, -completion_rate(snapshot, job, time_s)))
    return items


def completion_rate(snapshot: Snapshot, job: Job, remaining_s: float) -> float:
    """Return the ends of the job per second, plus `DEADLINE_RATE` if it would end by its deadline."""
    in_time = job.spec.deadline_s is not None and snapshot.now_s + remaining_s <= job.deadline_at_s
    return 1.0 / (1.0 + remaining_s) + (DEADLINE_RATE if in_time else 0.0)


def _candidate_counts(snapshot: Snapshot, job: Job, sizes: Mapping[str, int]) -> list[int]:
    """Return the counts to consider, and the current one.

    These are the counts for which the curve has a plan. A linear curve gives every count up to two nodes, half nodes
    beyond, and the ends of the range.
    """
    model, curve, current = gpu_model(snapshot, job, sizes), snapshot.curve(job), job.allocation.target_gpus
    node = sizes[model] if model else 8
    min_gpus, max_gpus = efficient_gpus(snapshot, job, sizes), job.spec.max_gpus
    if isinstance(curve, ScalingCurve):
        planned = curve.packed_plans(model, node) if model else ()
        return sorted({count for count in planned if min_gpus <= count <= max_gpus} | {current} - {0})
    return sorted({*_linear_counts(min_gpus, max_gpus, node), current} - {0})


@lru_cache(maxsize=4096)
def _linear_counts(min_gpus: int, max_gpus: int, node: int) -> frozenset[int]:
    half = max(1, node // 2)
    beyond = range(-(-max(min_gpus, 2 * node) // half) * half, max_gpus + 1, half)
    return frozenset({*range(min_gpus, min(max_gpus, 2 * node) + 1), *beyond, min_gpus, max_gpus})


def time_saved_s(job: Job, plan: ParallelPlan, work: float) -> float:
    """Return the seconds by which `plan` shortens the remaining `work` steps, without the reconfiguration.

    The current speed is the measured one, because frozen layers speed up the current plan too.
    """
    return work * (job.step_time_s() - plan.iteration_time_s * job.curve_correction)


def replan_ready_at_s(job: Job, settings: PolicySettings) -> float:
    """Return when a job whose plan is outdated may be re-planned.

    It must have run undisturbed for the resize pause, and long enough since a freeze that its new speed is known.
    """
    return max(job.state_since_s + settings.resize_pause_s_for(job), job.freezing.at_s + SPEED_MEASUREMENT_S_MIN)


def is_worthwhile(job: Job, plan: ParallelPlan, work: float, settings: PolicySettings) -> bool:
    """Return whether `plan` saves `gain_factor` times the reconfiguration, as any voluntary resize must."""
    return time_saved_s(job, plan, work) > settings.gain_factor * settings.reconfiguration_s_for(job)
