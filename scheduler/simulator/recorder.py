"""Recorder: watches a simulation and makes its report."""

from __future__ import annotations

from collections.abc import Iterable

from scheduler.domain import gpus as gpu_sets
from scheduler.domain.decision import PreemptJob, ResizeJob
from scheduler.domain.fleet import Node, Pool, PoolKind
from scheduler.domain.job import Job
from scheduler.domain.job_state import WAITING, JobState
from scheduler.domain.reason import ReasonCode
from scheduler.domain.snapshot import Snapshot
from scheduler.executors.simulated_run import Work
from scheduler.simulator.engine import Scenario
from scheduler.simulator.loan_book import LoanBook
from scheduler.simulator.report import HOUR_S, PolicyReport, Spread, TickTimes, UsageRatio, mean, ratio
from scheduler.simulator.ticked import Ticked
from scheduler.simulator.traces import DemandChange


class Recorder:
    """Figures that are not in the jobs themselves are added up tick by tick."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._loans = LoanBook(scenario.pools, scenario.nodes)
        self._home = {node.name: node for node in scenario.nodes}
        self._owned_gpus = _gpus_of_kind(scenario.pools, scenario.nodes, PoolKind.TRAINING)
        self._inference_gpus = _gpus_of_kind(scenario.pools, scenario.nodes, PoolKind.INFERENCE)
        last_s = scenario.submissions[-1].at_s if scenario.submissions else 0.0
        self._window_s = (scenario.start_s, last_s)
        self._tick_s: list[float] = []
        self._idle_gpus = 0
        self._idle_since_s = scenario.start_s
        self._idle_gpu_s = 0.0
        self._collateral_gpus = 0
        self._demand: dict[str, DemandChange] = {}
        self._demand_gpu_s = 0.0

    def demand_changed(self, change: DemandChange) -> None:
        self._settle_demand(change.pool, change.at_s)
        self._demand[change.pool] = change
        self._loans.demand_changed(change)

    def ticked(self, tick: Ticked) -> None:
        self._tick_s.append(tick.wall_s)
        now_s = tick.report.now_s
        self._idle_gpu_s += self._idle_gpus * (now_s - self._idle_since_s)
        self._idle_since_s, self._idle_gpus = now_s, _idle_while_waiting(tick)
        self._loans.ticked(tick.before, tick.after)
        for decision in tick.report.decisions:
            if isinstance(decision, PreemptJob | ResizeJob) and decision.reason.code is ReasonCode.NODE_RECALLED:
                self._collateral_gpus += _collateral_gpus(tick, decision)

    def report(self, policy: str, last: Snapshot, ended: Iterable[Job], work: Iterable[Work]) -> PolicyReport:
        """The report, once the simulation is over. `last` is its last state, `ended` every job that has left it."""
        self._loans.finish(last)
        for pool in self._demand:
            self._settle_demand(pool, last.now_s)
        jobs = [*ended, *(job.settled(last.now_s) for job in last.jobs.values())]
        done = [job for job in jobs if job.state is JobState.SUCCEEDED]
        jct_s = {job.id: job.state_since_s - job.submitted_at_s for job in done}
        submissions = self._scenario.submissions
        listed = tuple(work)
        lost_gpu_s = sum((w.until_s - w.kept_until_s) * gpu_sets.count(w.gpus) for w in listed)
        computed_gpu_s = sum((w.until_s - w.since_s) * gpu_sets.count(w.gpus) for w in listed)
        return PolicyReport(
            policy=policy,
            jobs=len(submissions),
            completed=len(done),
            queueing_s=Spread.of([job.account.waited_s for job in jobs]),
            jct_s=Spread.of(list(jct_s.values())),
            jct_elastic_s=Spread.of([jct_s[s.job_id] for s in submissions if s.trace_gpus >= 2 and s.job_id in jct_s]),
            jct_bound_s=mean(s.run_time_s_min for s in submissions),
            makespan_s=max((job.state_since_s for job in done), default=self._window_s[0]) - self._window_s[0],
            usage_ratio=self._usage(listed),
            idle_while_waiting_gpu_hours=self._idle_gpu_s / HOUR_S,
            loaned_gpu_hours=self._loans.loaned_gpu_s / HOUR_S,
            loans=self._loans.loans,
            recalls=self._loans.recalls,
            recalls_late=self._loans.recalls_late,
            preemptions=sum(job.account.preemptions for job in jobs),
            preemption_ratio=ratio(sum(job.account.preemptions > 0 for job in jobs), len(jobs)),
            resizes=sum(job.account.resizes for job in jobs),
            collateral_gpus=self._collateral_gpus,
            lost_gpu_hours=lost_gpu_s / HOUR_S,
            lost_ratio=ratio(lost_gpu_s, computed_gpu_s),
            inference_short_intervals_ratio=self._loans.short_ratio(),
            ticks=len(self._tick_s),
            tick_s=TickTimes.of(self._tick_s),
            wall_s=0.0,
        )

    def _settle_demand(self, pool: str, now_s: float) -> None:
        change = self._demand.get(pool)
        if change is not None:
            capacity = sum(node.gpus for node in self._home.values() if node.pool == pool)
            self._demand_gpu_s += self._in_window_s(change.at_s, now_s) * min(change.gpus, capacity)

    def _usage(self, work: Iterable[Work]) -> UsageRatio:
        """Useful work by the home of the GPUs it ran on."""
        kinds = {pool.name: pool.kind for pool in self._scenario.pools}
        useful_gpu_s = {PoolKind.TRAINING: 0.0, PoolKind.INFERENCE: self._demand_gpu_s}
        for run in work:
            kept_s = self._in_window_s(run.since_s, run.kept_until_s)
            for name, indices in run.gpus.items():
                useful_gpu_s[kinds[self._home[name].pool]] += kept_s * len(indices)
        length_s = self._window_s[1] - self._window_s[0]
        owned_gpu_s, inference_gpu_s = self._owned_gpus * length_s, self._inference_gpus * length_s
        return UsageRatio(
            training=ratio(useful_gpu_s[PoolKind.TRAINING], owned_gpu_s),
            inference=ratio(useful_gpu_s[PoolKind.INFERENCE], inference_gpu_s),
            overall=ratio(sum(useful_gpu_s.values()), owned_gpu_s + inference_gpu_s),
        )

    def _in_window_s(self, since_s: float, until_s: float) -> float:
        return max(0.0, min(until_s, self._window_s[1]) - max(since_s, self._window_s[0]))


def _gpus_of_kind(pools: Iterable[Pool], nodes: Iterable[Node], kind: PoolKind) -> int:
    names = {pool.name for pool in pools if pool.kind is kind}
    return sum(node.gpus for node in nodes if node.pool in names)


def _idle_while_waiting(tick: Ticked) -> int:
    """GPUs that training may use and nobody occupies, where some job waits."""
    jobs = tick.after.jobs
    if not any(jobs[job_id].state in WAITING for job_id in tick.report.waiting if job_id in jobs):
        return 0
    usable = sum(node.gpus for node in tick.after.nodes.values() if tick.after.serves_training(node))
    return max(0, usable - tick.occupied_gpus)


def _collateral_gpus(tick: Ticked, decision: PreemptJob | ResizeJob) -> int:
    """GPUs that the job gives up although their nodes need not be left."""
    before = tick.before.jobs.get(decision.job_id)
    if before is None:
        return 0
    kept = decision.gpus if isinstance(decision, ResizeJob) else gpu_sets.NO_GPUS
    given_up = gpu_sets.minus(before.allocation.target, kept)
    nodes = tick.after.nodes
    return sum(len(given_up[name]) for name in given_up if not tick.after.must_be_left(nodes[name]))
