"""Observes a simulation and builds its report. The work per tick does not depend on the size of the cluster."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from scheduler.domain import gpu_sets
from scheduler.domain.decisions import PreemptJob, ReasonCode, RejectJob, ResizeJob
from scheduler.domain.fleet import DemandReading, Forecast, Loan, LoanState, Node, Pool, PoolKind, get_shortages
from scheduler.domain.job import Job
from scheduler.domain.job_state import WAITING_STATES, JobState
from scheduler.domain.snapshot import Snapshot
from scheduler.executors.simulated_nodes import UnservedSteps
from scheduler.executors.simulated_run import RunWork
from scheduler.scheduling.policies.lending import unused_loan_ends_s
from scheduler.scheduling.policies.lending_promise import find_working_quantile
from scheduler.scheduling.policies.settings import PolicySettings
from scheduler.simulator.demand import DemandChange
from scheduler.simulator.engine import Scenario, TickRecord
from scheduler.simulator.inference_shortages import InferenceShortages, compute_step_means, sum_unserved_gpu_s
from scheduler.simulator.report import (
    HOUR_S,
    Distribution,
    FloatArray,
    PolicyReport,
    PolicyResult,
    PolicySeries,
    StepFunction,
    TickTimes,
    UsageRatio,
    compute_interval_edges,
    compute_interval_means,
    compute_mean,
    compute_quantiles,
    compute_ratio,
)

_DEADLINE_TOLERANCE_S = 1e-6


class LoanStatistics:
    """Counts of loans and recalls, updated from the snapshots around each tick."""

    def __init__(self, pools: Iterable[Pool], nodes: Iterable[Node], settings: PolicySettings) -> None:
        self._nodes = {node.name: node for node in nodes}
        self._settings = settings
        self._pools = {pool.name: pool for pool in pools if pool.kind is PoolKind.INFERENCE}
        self.loans = 0
        self.recalls = 0
        self.recalls_late = 0
        self.loaned_gpu_s = 0.0
        self.unused_gpu_s = 0.0
        self.lent_nodes = StepFunction()

    def record_tick(self, before: Snapshot, after: Snapshot) -> None:
        if before.loans is after.loans or before.loans == after.loans:
            return
        now_s, loans_before, loans = after.now_s, _select_effective(before), _select_effective(after)
        self.lent_nodes.set_value(now_s, len(loans))
        for name, loan in loans_before.items():
            if name not in loans or loans[name].id != loan.id:
                self._record_return(loan, now_s)
        for name, loan in loans.items():
            earlier = loans_before.get(name)
            if earlier is loan:
                continue
            if earlier is None or earlier.id != loan.id:
                self.loans += 1
            elif earlier.unused_since_s is not None and loan.unused_since_s is None:
                self._record_unused(earlier, before.now_s)
            recalled_before = earlier is not None and earlier.state is LoanState.RECALLED
            self.recalls += loan.state is LoanState.RECALLED and not recalled_before

    def finish(self, last: Snapshot) -> None:
        """Account for loans that are open at the end of the simulation."""
        for loan in _select_effective(last).values():
            self._record_unused(loan, last.now_s)
            self.loaned_gpu_s += (last.now_s - loan.offered_at_s) * loan.count_gpus(self._nodes[loan.node])

    def _record_return(self, loan: Loan, now_s: float) -> None:
        self.loaned_gpu_s += (now_s - loan.offered_at_s) * loan.count_gpus(self._nodes[loan.node])
        self._record_unused(loan, now_s)
        self.recalls_late += loan.return_by_s is not None and now_s > loan.return_by_s + _DEADLINE_TOLERANCE_S

    def _record_unused(self, loan: Loan, until_s: float) -> None:
        """Account for the time without a job until a recall, as far as a loan may not be unused that long."""
        end_s = until_s if loan.recalled_at_s is None else loan.recalled_at_s
        excess_s = end_s - unused_loan_ends_s(loan, self._pools[loan.pool], self._settings)
        self.unused_gpu_s += max(0.0, excess_s) * loan.count_gpus(self._nodes[loan.node])


def _select_effective(snapshot: Snapshot) -> dict[str, Loan]:
    """Return the loans that take nodes from inference. Proposals do not."""
    return {name: loan for name, loan in snapshot.loans.items() if loan.is_in_effect}


@dataclass(frozen=True, slots=True)
class _RunTable:
    """Times and GPUs of all runs, one entry per run. GPUs are split into those owned by training and lent ones."""

    since_s: FloatArray
    until_s: FloatArray
    kept_until_s: FloatArray
    owned: FloatArray
    lent: FloatArray

    @classmethod
    def from_work(cls, work: Iterable[RunWork], owned_nodes: Collection[str]) -> _RunTable:
        rows = []
        for run in work:
            owned = sum(len(indices) for name, indices in run.gpus.items() if name in owned_nodes)
            rows.append((run.since_s, run.until_s, run.kept_until_s, owned, gpu_sets.count(run.gpus) - owned))
        return cls(*np.array(rows, dtype=np.float64).reshape(-1, 5).T)


class ReportRecorder:
    """Accumulator of report metrics that the jobs themselves do not contain."""

    def __init__(self, scenario: Scenario, settings: PolicySettings) -> None:
        self._scenario = scenario
        self._loan_statistics = LoanStatistics(scenario.pools, scenario.nodes, settings)
        self._shortages = InferenceShortages(pool.name for pool in scenario.pools if pool.kind is PoolKind.INFERENCE)
        kinds = {pool.name: pool.kind for pool in scenario.pools}
        self._training_nodes = {node.name for node in scenario.nodes if kinds[node.pool] is PoolKind.TRAINING}
        self._lending = {pool.name: pool.lending for pool in scenario.pools if pool.kind is PoolKind.INFERENCE}
        self._capacity = {
            name: float(sum(node.gpus for node in scenario.nodes if node.pool == name)) for name in self._lending
        }
        self._training_gpus = sum(node.gpus for node in scenario.nodes if node.name in self._training_nodes)
        last_s = scenario.submissions[-1].at_s if scenario.submissions else scenario.start_s
        self._window_s = np.array((scenario.start_s, last_s))
        self._tick_s = array("d")
        self._idle_gpus = 0
        self._idle_since_s = scenario.start_s
        self._idle_gpu_s = 0.0
        self._collateral_gpus = 0
        self._rejected = 0
        self._demand: dict[str, float] = {}
        self._forecasts: Mapping[str, Forecast] = {}
        self._readings: Mapping[str, DemandReading] = {}
        self._queued_jobs, self._demand_gpus, self._forecast_gpus = StepFunction(), StepFunction(), StepFunction()

    def on_demand_change(self, change: DemandChange) -> None:
        self._demand[change.pool] = min(change.gpus, self._capacity[change.pool])
        self._demand_gpus.set_value(change.at_s, sum(self._demand.values()))
        self._shortages.record_demand_change(change)

    def on_tick(self, tick: TickRecord) -> None:
        report, after = tick.report, tick.after
        now_s, index = report.now_s, after.index
        self._tick_s.append(tick.wall_s)
        unplaced = sum(after.jobs[job_id].state in WAITING_STATES for job_id in index.unsettled)
        queued = len(index.waiting) + unplaced
        self._queued_jobs.set_value(now_s, queued)
        self._idle_gpu_s += self._idle_gpus * (now_s - self._idle_since_s)
        self._idle_since_s = now_s
        self._idle_gpus = max(0, sum(index.training_gpus.values()) - tick.occupied_gpus) if queued else 0
        self._loan_statistics.record_tick(tick.before, after)
        if after.forecasts is not self._forecasts:
            self._forecasts, self._readings = after.forecasts, after.demand
            self._forecast_gpus.set_value(now_s, sum(map(self._get_forecast_gpus, self._lending)))
        for decision in report.decisions:
            if isinstance(decision, RejectJob):
                self._rejected += 1
            elif isinstance(decision, PreemptJob | ResizeJob) and decision.reason.code is ReasonCode.NODE_RECALLED:
                self._collateral_gpus += _count_collateral_gpus(tick, decision)

    def build_report(
        self,
        policy: str,
        last: Snapshot,
        ended: Iterable[Job],
        work: Sequence[RunWork],
        unserved: Mapping[str, UnservedSteps] = MappingProxyType({}),
    ) -> PolicyResult:
        """Return the report.

        Args:
            ended: jobs that were removed before the last snapshot.
            unserved: demand without a serving pod by inference pool, as steps over time.
        """
        self._loan_statistics.finish(last)
        jobs = [*ended, *(job.advance_to(last.now_s) for job in last.jobs.values())]
        done = [job for job in jobs if job.state is JobState.SUCCEEDED]
        jct_s = {job.id: job.state_since_s - job.submitted_at_s for job in done}
        submissions, start_s = self._scenario.submissions, self._scenario.start_s
        runs = _RunTable.from_work(work, self._training_nodes)
        lost_gpu_s = float(((runs.until_s - runs.kept_until_s) * (runs.owned + runs.lent)).sum())
        computed_gpu_s = float(((runs.until_s - runs.since_s) * (runs.owned + runs.lent)).sum())
        report = PolicyReport(
            policy=policy,
            jobs=len(submissions),
            completed=len(done),
            queueing_s=Distribution.from_values([job.account.waited_s for job in jobs]),
            jct_s=Distribution.from_values(list(jct_s.values())),
            jct_elastic_s=Distribution.from_values(
                [jct_s[s.job_id] for s in submissions if s.trace_gpus >= 2 and s.job_id in jct_s]
            ),
            jct_bound_s=compute_mean(s.run_time_s_min for s in submissions),
            makespan_s=max((job.state_since_s for job in done), default=start_s) - start_s,
            usage_ratio=self._compute_usage(runs, unserved),
            idle_while_waiting_gpu_hours=self._idle_gpu_s / HOUR_S,
            loaned_gpu_hours=self._loan_statistics.loaned_gpu_s / HOUR_S,
            unused_loan_gpu_hours=self._loan_statistics.unused_gpu_s / HOUR_S,
            loans=self._loan_statistics.loans,
            recalls=self._loan_statistics.recalls,
            recalls_late=self._loan_statistics.recalls_late,
            preemptions=sum(job.account.preemptions for job in jobs),
            preemption_ratio=compute_ratio(sum(job.account.preemptions > 0 for job in jobs), len(jobs)),
            resizes=sum(job.account.resizes for job in jobs),
            collateral_gpus=self._collateral_gpus,
            lost_gpu_hours=lost_gpu_s / HOUR_S,
            lost_ratio=compute_ratio(lost_gpu_s, computed_gpu_s),
            inference_short_intervals_ratio=self._shortages.compute_ratio(unserved, end_s=last.now_s),
            ticks=len(self._tick_s),
            tick_s=TickTimes.from_values(self._tick_s),
            wall_s=0.0,
            deadlines_met_ratio=_compute_deadlines_met_ratio(jobs, jct_s),
            rejected=self._rejected,
            incomplete_saves=sum(run.is_save_incomplete for run in work),
            unserved_gpu_hours=sum_unserved_gpu_s(unserved, start_s=start_s, end_s=last.now_s) / HOUR_S,
        )
        edges_s = compute_interval_edges(start_s, last.now_s)
        return report, self._build_series(policy, edges_s, runs, unserved, list(jct_s.values()))

    def _get_forecast_gpus(self, pool: str) -> float:
        """Return the forecast demand of a pool at its working quantile, or its current demand without a forecast."""
        forecast = self._forecasts.get(pool)
        if forecast is None:
            return self._demand.get(pool, 0.0)
        level = find_working_quantile(self._lending[pool], get_shortages(self._readings, pool))
        return min(self._capacity[pool], forecast.demand_at(level))

    def _compute_useful_gpus(
        self, runs: _RunTable, unserved: Mapping[str, UnservedSteps], edges_s: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """Return useful GPUs per interval: on nodes of training, and on inference nodes including served demand."""
        at_s = np.concatenate((runs.since_s, runs.kept_until_s))
        owned, lent = (
            compute_interval_means(at_s, np.concatenate((gpus, -gpus)), edges_s) for gpus in (runs.owned, runs.lent)
        )
        served = self._demand_gpus.compute_means(edges_s)
        for steps in unserved.values():
            served = served - compute_step_means(steps, edges_s)
        return owned, lent + served

    def _compute_usage(self, runs: _RunTable, unserved: Mapping[str, UnservedSteps]) -> UsageRatio:
        if self._window_s[0] == self._window_s[1]:
            return UsageRatio(0.0, 0.0, 0.0)
        owned, lent = (float(gpus[0]) for gpus in self._compute_useful_gpus(runs, unserved, self._window_s))
        serving = sum(self._capacity.values())
        both = compute_ratio(owned + lent, self._training_gpus + serving)
        return UsageRatio(compute_ratio(owned, self._training_gpus), compute_ratio(lent, serving), both)

    def _build_series(
        self,
        policy: str,
        edges_s: FloatArray,
        runs: _RunTable,
        unserved: Mapping[str, UnservedSteps],
        jct_s: list[float],
    ) -> PolicySeries:
        owned, lent = self._compute_useful_gpus(runs, unserved, edges_s)
        serving = sum(self._capacity.values())
        return PolicySeries(
            policy=policy,
            start_s=float(edges_s[0]),
            step_s=float(edges_s[1] - edges_s[0]),
            submitting_s=float(self._window_s[1] - self._window_s[0]),
            queued_jobs=tuple(self._queued_jobs.compute_means(edges_s).tolist()),
            training_usage_ratio=tuple((owned / self._training_gpus).tolist()),
            inference_usage_ratio=tuple((lent / serving).tolist()) if serving else (),
            inference_gpus=serving,
            inference_nodes=len(self._scenario.nodes) - len(self._training_nodes),
            lent_nodes=tuple(self._loan_statistics.lent_nodes.compute_means(edges_s).tolist()),
            demand_gpus=tuple(self._demand_gpus.compute_means(edges_s).tolist()),
            forecast_gpus=tuple(self._forecast_gpus.compute_means(edges_s).tolist()),
            jct_s=compute_quantiles(jct_s),
        )


def _compute_deadlines_met_ratio(jobs: Iterable[Job], jct_s: Mapping[str, float]) -> float | None:
    met = [
        jct_s.get(job.id, np.inf) <= job.spec.deadline_s + _DEADLINE_TOLERANCE_S
        for job in jobs
        if job.spec.deadline_s is not None
    ]
    return sum(met) / len(met) if met else None


def _count_collateral_gpus(tick: TickRecord, decision: PreemptJob | ResizeJob) -> int:
    """Count GPUs that the job gives up on nodes that it could have kept."""
    before = tick.before.jobs.get(decision.job_id)
    if before is None:
        return 0
    kept = decision.gpus if isinstance(decision, ResizeJob) else gpu_sets.NO_GPUS
    given_up = gpu_sets.difference(before.allocation.target, kept)
    nodes = tick.after.nodes
    return sum(len(given_up[name]) for name in given_up if not tick.after.must_vacate(nodes[name]))
