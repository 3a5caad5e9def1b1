"""Stage: start pending jobs in order, and explain why the others wait."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from scheduler.domain import gpu_sets
from scheduler.domain.decisions import Reason, ReasonCode, StartJob
from scheduler.domain.job import Job
from scheduler.domain.job_state import JobState
from scheduler.scheduling.cycle import GpuDemand, SchedulingCycle, StageReport
from scheduler.scheduling.gpu_budget import GpuBudget
from scheduler.scheduling.node_misfit import explain_node_misfit
from scheduler.scheduling.policies.job_order import is_overdue
from scheduler.scheduling.policies.preemption import QuotaReclaimer
from scheduler.scheduling.policies.quota import QuotaState
from scheduler.scheduling.stages.defragmentation import count_whole_nodes, defragment_for, reserve_emptied_nodes
from scheduler.scheduling.stages.quota_preemption import (
    QuotaWait,
    Reductions,
    StartLimits,
    cap_widths,
    hold_for_limit,
    reclaim_guarantee,
)
from scheduler.scheduling.target_selection import Target, extend_target, find_mixed_target

GpuOffer = tuple[str, int]
"""A GPU model, and a number of GPUs."""


@dataclass(frozen=True, slots=True)
class StartingReport(StageReport):
    """With the reductions that quotas require, and the quota state after all starts (None: no job was pending)."""

    reductions: Reductions = field(default_factory=dict)
    quota: QuotaState | None = None


def start_pending_jobs(cycle: SchedulingCycle, evacuation: StageReport) -> StartingReport:
    """Start pending jobs in the order of the policy set.

    GPUs are counted by kind first. A job that fits once flexible GPUs are given up keeps what is free, so that no later
    job takes it. No job delays the first one that has to wait; if that start cannot be predicted, no job passes one
    that is overdue. Counts do not show whether a job fits the distribution over nodes: a job that does not is passed
    over, and its GPUs are allocated again.
    """
    if not cycle.index.waiting:
        return StartingReport()
    return _StartingStage(cycle, evacuation.demands).run()


def start_job(cycle: SchedulingCycle, job: Job, width: int, min_gpus: int) -> Reason | None:
    """Start on `width` GPUs, or on the largest count down to `min_gpus` that fits. Return why the job cannot start."""
    target = extend_target(cycle, job, width, min_gpus)
    if target is None:
        return misfit_reason(cycle, job, min_gpus)
    _start_on(cycle, job, target)
    return None


def _start_on(cycle: SchedulingCycle, job: Job, target: Target) -> None:
    gpus, plan = target
    where = f"{gpu_sets.format_gpu_count(gpu_sets.count(gpus))} on {gpu_sets.format_gpus(gpus)}"
    reason = Reason(ReasonCode.FIRST_IN_ORDER, f"next in order; {where} as {plan.summarize()}")
    cycle.apply(StartJob(job.id, gpus, plan, reason))


def misfit_reason(cycle: SchedulingCycle, job: Job, need: int) -> Reason:
    """Return why a job cannot start although GPUs were counted for it, or because none fit."""
    usable = cycle.usable_gpus(job)
    free = sum(len(node.indices) for node in usable)
    numbers = {"needed_gpus": float(need), "free_gpus": float(free)}
    if free < need:
        detail = f"needs {gpu_sets.format_gpu_count(need, job.spec.gpu)}; {free} that it can use are free"
        return Reason(ReasonCode.NO_MATCHING_FLAVOR, detail, numbers)
    if any(missing.curve_key == job.curve_key for missing in cycle.missing_shapes):
        detail = f"{free} GPUs are free; waiting for a plan for their distribution over nodes"
        return Reason(ReasonCode.WAITING_FOR_PLAN, detail, numbers)
    spread = "+".join(str(len(node.indices)) for node in usable[:8]) + ("+..." if len(usable) > 8 else "")
    nodes = "1 node" if len(usable) == 1 else f"{len(usable)} nodes"
    detail = f"{free} GPUs are free on {nodes}; no parallel plan is feasible on {spread}"
    return Reason(ReasonCode.TOPOLOGY_PLACEMENT_FAILED, detail, numbers)


def release_reason(need: int, position: int) -> Reason:
    """Return the reason of a job for which running jobs give up GPUs."""
    detail = f"needs {gpu_sets.format_gpu_count(need)}; running jobs are releasing GPUs for it"
    numbers = {"needed_gpus": float(need), "position": float(position + 1)}
    return Reason(ReasonCode.WAITING_FOR_PREEMPTED_WORKLOADS, detail, numbers)


class _StartingStage:
    """The state of the stage between its passes over the queue."""

    def __init__(self, cycle: SchedulingCycle, moves: Mapping[str, GpuDemand]) -> None:
        self._cycle = cycle
        self._moves = moves
        self._waiting: dict[str, Reason] = {}
        self._misfits: set[str] = set()
        self._recheck_at_s = inf

    def _begin_pass(self) -> None:
        self._limits = StartLimits(self._cycle.snapshot.quota)
        self._quota = self._limits.planned
        self._budget = GpuBudget(self._cycle, self._moves)
        self._starters: dict[str, GpuOffer] = {}
        self._demands: dict[str, GpuDemand] = {}
        self._reductions: dict[str, tuple[int, Reason]] = {}
        self._short_of_gpus = False

    def run(self) -> StartingReport:
        cycle = self._cycle
        queue = cycle.policies.order(cycle.view, cycle.settings)
        reserve_emptied_nodes(cycle, queue)
        while True:
            self._begin_pass()
            self._allocate_gpus(self._quota.order_jobs(queue))
            self._start_jobs()
            failed = {job_id for job_id in self._starters if self._is_queued(job_id)}
            if not failed:
                break
            self._misfits |= failed
            queue = tuple(filter(self._is_queued, queue))
        self._start_on_mixed_models(queue)
        self._defragment([job_id for job_id in queue if job_id in self._misfits or job_id in self._demands])
        return StartingReport(self._waiting, self._demands, self._recheck_at_s, self._reductions, self._quota)

    def _is_queued(self, job_id: str) -> bool:
        return self._cycle.snapshot.jobs[job_id].state is JobState.QUEUED

    def _allocate_gpus(self, queue: Sequence[str]) -> None:
        """Choose the jobs that start, with a GPU model and count for each. All others wait, with a reason."""
        cycle, budget, quota = self._cycle, self._budget, self._quota
        reclaimer = QuotaReclaimer(cycle.view, quota, cycle.settings, cycle.settled_jobs) if quota else None
        short: list[Job] = []
        for position, job_id in enumerate(queue):
            job = cycle.snapshot.jobs[job_id]
            budget.begin_job(job)
            if job_id in self._misfits and self._blocks_queue(job):
                self._wait_behind(queue[position + 1 :], job_id)
                break
            if job_id in self._misfits:
                self._block_behind_overdue(job)
            elif reclaimer and (wait := hold_for_limit(budget, reclaimer, job)):
                self._record_quota_wait(job_id, wait)
            elif reason := self._find_node_misfit(job, position):
                self._waiting[job_id] = reason
            elif offer := budget.offer(job):
                self._start_or_hold(job, offer)
            elif pending := budget.pending_offer(job):
                quota.allocate(job, pending[1])
                self._demands[job_id] = budget.allocate_pending(job, *pending)
                self._waiting[job_id] = release_reason(pending[1], position)
            elif reclaimer and (wait := reclaim_guarantee(cycle, budget, reclaimer, job)):
                self._record_quota_wait(job_id, wait)
                self._short_of_gpus = True
            else:
                self._wait_in_line(job, position)
                short.append(job)
                if self._blocks_queue(job):
                    self._wait_behind(queue[position + 1 :], job_id)
                    break
        if len(short) == 1:
            self._offer_min_feasible(short[0])

    def _start_or_hold(self, job: Job, offer: GpuOffer) -> None:
        """Start the job on free GPUs, or keep them for it until running jobs have given up GPUs under its limit."""
        self._budget.allocate(job, *offer)
        if reason := self._limits.check(job, offer[1]):
            self._quota.allocate(job, offer[1])
            self._waiting[job.id] = reason
        else:
            self._limits.allocate(job, offer[1])
            self._starters[job.id] = offer

    def _find_node_misfit(self, job: Job, position: int) -> Reason | None:
        """Return why the job's pods can run on too few nodes. It then delays no other job, even in strict order."""
        budget = self._budget
        if not self._cycle.index.has_capacities or budget.could_ever_fit(job):
            return None
        need, free = budget.needed_gpus(job), budget.free_gpus(job)
        numbers = {"needed_gpus": float(need), "free_gpus": float(free), "position": float(position + 1)}
        return explain_node_misfit(self._cycle, job, budget.largest_pool(job), numbers)

    def _offer_min_feasible(self, job: Job) -> None:
        """Start the only job that waits on the fewest GPUs that are feasible: a slow start is better than none."""
        offer = self._budget.min_feasible_offer(job)
        if offer and not self._limits.check(job, offer[1]):
            self._starters[job.id] = offer
            self._limits.allocate(job, offer[1])
            self._short_of_gpus = False

    def _record_quota_wait(self, job_id: str, wait: QuotaWait) -> None:
        self._waiting[job_id] = wait.reason
        self._reductions |= wait.reductions
        self._recheck_at_s = min(self._recheck_at_s, wait.recheck_at_s)
        if wait.demand is not None:
            self._demands[job_id] = wait.demand

    def _wait_in_line(self, job: Job, position: int) -> None:
        """Let the job wait for GPUs that others use, and reserve its start if it is the first that waits."""
        budget = self._budget
        need, free = budget.needed_gpus(job), budget.free_gpus(job)
        numbers = {"needed_gpus": float(need), "free_gpus": float(free), "position": float(position + 1)}
        needed = f"needs {gpu_sets.format_gpu_count(need)}; {free} free"
        if (head := budget.blocking_job(job)) is not None:
            detail = f"{needed}; waits behind {head}, whose start it would delay"
            self._waiting[job.id] = Reason(ReasonCode.BEHIND_HEAD_OF_QUEUE, detail, numbers)
            return
        if not budget.could_ever_fit(job):
            most = budget.largest_pool(job)
            detail = f"needs {gpu_sets.format_gpu_count(need, job.spec.gpu)}; only {most} are in pools this job can use"
            self._waiting[job.id] = Reason(ReasonCode.NO_MATCHING_FLAVOR, detail, numbers)
            return
        detail = f"{needed}; number {position + 1} in the queue{self._describe_refusal(job)}"
        self._waiting[job.id] = Reason(ReasonCode.INSUFFICIENT_GPUS, detail, numbers)
        self._short_of_gpus = True
        budget.reserve_for(job)
        self._block_behind_overdue(job)

    def _describe_refusal(self, job: Job) -> str:
        """Say that slower GPUs are free on which the job would lose more time than it has waited."""
        refused = self._budget.refused_offer(job)
        return "" if refused is None else f"; on {refused[0]}, which is free, it would end {refused[1]:.0f} s later"

    def _blocks_queue(self, job: Job) -> bool:
        return self._cycle.policies.blocks_queue(self._cycle.view, job, self._cycle.settings)

    def _wait_behind(self, job_ids: Iterable[str], head: str) -> None:
        # One reason object for all: thousands of jobs may wait behind one in every tick.
        reason = Reason(ReasonCode.BEHIND_HEAD_OF_QUEUE, f"waits behind {head}, the head of the queue")
        self._waiting.update(dict.fromkeys(job_ids, reason))

    def _block_behind_overdue(self, job: Job) -> None:
        """Let no job pass an overdue one. With a reserved start this is not necessary."""
        if self._budget.has_reservation or not is_overdue(job, self._cycle.now_s, self._cycle.settings):
            return
        if self._budget.could_ever_fit(job):
            self._budget.block_behind(job)

    def _start_jobs(self) -> None:
        """Start the chosen jobs, wider than they must be if unallocated GPUs make them faster."""
        cycle, widths = self._cycle, dict[str, int]()
        for gpu in sorted({gpu for gpu, _ in self._starters.values()}):
            min_gpus_by_job = {job_id: count for job_id, (model, count) in self._starters.items() if model == gpu}
            wanted = self._compute_widths(min_gpus_by_job, self._budget.unallocated_gpus(gpu))
            widths |= cap_widths(cycle, self._limits, min_gpus_by_job, wanted)
        for job_id, (_, count) in self._starters.items():
            reason = start_job(cycle, cycle.snapshot.jobs[job_id], widths.get(job_id, count), count)
            self._record_start(job_id, reason)

    def _record_start(self, job_id: str, reason: Reason | None) -> None:
        if reason is None:
            self._waiting.pop(job_id, None)
        else:
            self._waiting[job_id] = reason

    def _compute_widths(self, min_gpus_by_job: Mapping[str, int], spare: int) -> Mapping[str, int]:
        """Return the widths of jobs that start: their minimum, unless GPUs are left and no job waits for them."""
        cycle = self._cycle
        if cycle.policies.scale is None or self._short_of_gpus or not min_gpus_by_job or spare <= 0:
            return {}
        wanted = cycle.policies.scale(cycle.view, min_gpus_by_job, spare, cycle.settings)
        widths: dict[str, int] = {}
        for job_id, count in min_gpus_by_job.items():
            widths[job_id] = min(max(wanted.get(job_id, count), count), count + spare)
            spare -= widths[job_id] - count
        return widths

    def _start_on_mixed_models(self, queue: Iterable[str]) -> None:
        """Start jobs that no single GPU model can hold on free GPUs of several models."""
        cycle = self._cycle
        if len(cycle.node_sizes) < 2:
            return
        for job_id in queue:
            job, reason = cycle.snapshot.jobs[job_id], self._waiting.get(job_id)
            if reason is None or reason.code is not ReasonCode.NO_MATCHING_FLAVOR or not self._is_queued(job_id):
                continue
            if limit := self._limits.check(job, job.spec.min_gpus):
                self._waiting[job_id] = limit
            elif target := find_mixed_target(cycle, job, job.spec.min_gpus):
                self._limits.allocate(job, gpu_sets.count(target[0]))
                _start_on(cycle, job, target)
                self._waiting.pop(job_id, None)

    def _defragment(self, queue: Iterable[str]) -> None:
        """Vacate whole nodes for the first job that needs them and lacks nothing else."""
        jobs = self._cycle.snapshot.jobs
        job = next((jobs[job_id] for job_id in queue if count_whole_nodes(self._cycle, jobs[job_id])), None)
        if job and (nodes := defragment_for(self._cycle, job)):
            self._demands.pop(job.id, None)
            detail = f"needs {nodes} whole nodes; running jobs are moving off them"
            numbers = {"needed_nodes": float(nodes)}
            self._waiting[job.id] = Reason(ReasonCode.WAITING_FOR_PREEMPTED_WORKLOADS, detail, numbers)
