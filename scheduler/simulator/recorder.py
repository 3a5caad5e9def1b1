"""Recorder: watches a simulation and makes its report. What it does at a tick does not grow with the cluster."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from scheduler.domain import gpus as gpu_sets
from scheduler.domain.decision import PreemptJob, RejectJob, ResizeJob
from scheduler.domain.fleet import PoolKind
from scheduler.domain.forecast import Forecast
from scheduler.domain.job import Job
from scheduler.domain.job_state import WAITING, JobState
from scheduler.domain.reason import ReasonCode
from scheduler.domain.snapshot import Snapshot
from scheduler.executors.simulated_run import Work
from scheduler.simulator.engine import Scenario
from scheduler.simulator.loan_book import LoanBook
from scheduler.simulator.report import HOUR_S, Played, PolicyReport, Spread, TickTimes, UsageRatio, mean, ratio
from scheduler.simulator.series import FloatArray, PolicySeries, StepLine, interval_edges, interval_means, quantiles
from scheduler.simulator.ticked import Ticked
from scheduler.simulator.traces import DemandChange

_ROUNDING_S = 1e-6


@dataclass(frozen=True, slots=True)
class _Runs:
    """What every run computed, one entry a run: its times, and its GPUs by the home of their nodes."""

    since_s: FloatArray
    until_s: FloatArray
    kept_until_s: FloatArray
    owned: FloatArray
    lent: FloatArray

    @classmethod
    def of(cls, work: Iterable[Work], owned_nodes: Collection[str]) -> _Runs:
        rows = []
        for run in work:
            owned = sum(len(indices) for name, indices in run.gpus.items() if name in owned_nodes)
            rows.append((run.since_s, run.until_s, run.kept_until_s, owned, gpu_sets.count(run.gpus) - owned))
        return cls(*np.array(rows, dtype=np.float64).reshape(-1, 5).T)


class Recorder:
    """Figures that are not in the jobs themselves are added up tick by tick."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._loans = LoanBook(scenario.pools, scenario.nodes)
        kinds = {pool.name: pool.kind for pool in scenario.pools}
        self._owned = {node.name for node in scenario.nodes if kinds[node.pool] is PoolKind.TRAINING}
        self._lending = {pool.name: pool.lending for pool in scenario.pools if pool.kind is PoolKind.INFERENCE}
        self._capacity = {
            name: float(sum(node.gpus for node in scenario.nodes if node.pool == name)) for name in self._lending
        }
        self._owned_gpus = sum(node.gpus for node in scenario.nodes if node.name in self._owned)
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
        self._queued_line, self._demand_line, self._forecast_line = StepLine(), StepLine(), StepLine()

    def demand_changed(self, change: DemandChange) -> None:
        self._demand[change.pool] = min(change.gpus, self._capacity[change.pool])
        self._demand_line.step(change.at_s, sum(self._demand.values()))
        self._loans.demand_changed(change)

    def ticked(self, tick: Ticked) -> None:
        report, after = tick.report, tick.after
        now_s, ledger = report.now_s, after.ledger
        self._tick_s.append(tick.wall_s)
        unplaced = sum(after.jobs[job_id].state in WAITING for job_id in ledger.unsettled)
        queued = len(ledger.waiting) + unplaced
        self._queued_line.step(now_s, queued)
        self._idle_gpu_s += self._idle_gpus * (now_s - self._idle_since_s)
        self._idle_since_s = now_s
        self._idle_gpus = max(0, sum(ledger.serving.values()) - tick.occupied_gpus) if queued else 0
        self._loans.ticked(tick.before, after)
        if after.forecasts is not self._forecasts:
            self._forecasts = after.forecasts
            self._forecast_line.step(now_s, sum(map(self._foreseen_gpus, self._lending)))
        for decision in report.decisions:
            if isinstance(decision, RejectJob):
                self._rejected += 1
            elif isinstance(decision, PreemptJob | ResizeJob) and decision.reason.code is ReasonCode.NODE_RECALLED:
                self._collateral_gpus += _collateral_gpus(tick, decision)

    def report(self, policy: str, last: Snapshot, ended: Iterable[Job], work: Iterable[Work]) -> Played:
        """The report, once the simulation is over. `last` is its last state, `ended` every job that has left it."""
        self._loans.finish(last)
        jobs = [*ended, *(job.settled(last.now_s) for job in last.jobs.values())]
        done = [job for job in jobs if job.state is JobState.SUCCEEDED]
        jct_s = {job.id: job.state_since_s - job.submitted_at_s for job in done}
        submissions, start_s = self._scenario.submissions, self._scenario.start_s
        runs = _Runs.of(work, self._owned)
        lost_gpu_s = float(((runs.until_s - runs.kept_until_s) * (runs.owned + runs.lent)).sum())
        computed_gpu_s = float(((runs.until_s - runs.since_s) * (runs.owned + runs.lent)).sum())
        report = PolicyReport(
            policy=policy,
            jobs=len(submissions),
            completed=len(done),
            queueing_s=Spread.of([job.account.waited_s for job in jobs]),
            jct_s=Spread.of(list(jct_s.values())),
            jct_elastic_s=Spread.of([jct_s[s.job_id] for s in submissions if s.trace_gpus >= 2 and s.job_id in jct_s]),
            jct_bound_s=mean(s.run_time_s_min for s in submissions),
            makespan_s=max((job.state_since_s for job in done), default=start_s) - start_s,
            usage_ratio=self._usage(runs),
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
            deadlines_met_ratio=_deadlines_met_ratio(jobs, jct_s),
            rejected=self._rejected,
        )
        return report, self._series(policy, interval_edges(start_s, last.now_s), runs, list(jct_s.values()))

    def _foreseen_gpus(self, pool: str) -> float:
        """What the forecast says that the pool may need; without one, what it needs now."""
        forecast, level = self._forecasts.get(pool), self._lending[pool].quantile
        return min(self._capacity[pool], forecast.at(level)) if forecast else self._demand.get(pool, 0.0)

    def _useful_gpus(self, runs: _Runs, edges_s: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Useful work between edges, in GPUs: on nodes that training owns, and on those of inference."""
        at_s = np.concatenate((runs.since_s, runs.kept_until_s))
        owned, lent = (interval_means(at_s, np.concatenate((gpus, -gpus)), edges_s) for gpus in (runs.owned, runs.lent))
        return owned, lent + self._demand_line.means(edges_s)

    def _usage(self, runs: _Runs) -> UsageRatio:
        if self._window_s[0] == self._window_s[1]:
            return UsageRatio(0.0, 0.0, 0.0)
        owned, lent = (float(gpus[0]) for gpus in self._useful_gpus(runs, self._window_s))
        serving = sum(self._capacity.values())
        both = ratio(owned + lent, self._owned_gpus + serving)
        return UsageRatio(ratio(owned, self._owned_gpus), ratio(lent, serving), both)

    def _series(self, policy: str, edges_s: FloatArray, runs: _Runs, jct_s: list[float]) -> PolicySeries:
        owned, lent = self._useful_gpus(runs, edges_s)
        serving = sum(self._capacity.values())
        return PolicySeries(
            policy=policy,
            start_s=float(edges_s[0]),
            step_s=float(edges_s[1] - edges_s[0]),
            submitting_s=float(self._window_s[1] - self._window_s[0]),
            queued_jobs=tuple(self._queued_line.means(edges_s).tolist()),
            training_usage_ratio=tuple((owned / self._owned_gpus).tolist()),
            inference_usage_ratio=tuple((lent / serving).tolist()) if serving else (),
            inference_gpus=serving,
            inference_nodes=len(self._scenario.nodes) - len(self._owned),
            lent_nodes=tuple(self._loans.lent_line.means(edges_s).tolist()),
            demand_gpus=tuple(self._demand_line.means(edges_s).tolist()),
            forecast_gpus=tuple(self._forecast_line.means(edges_s).tolist()),
            jct_s=quantiles(jct_s),
        )


def _deadlines_met_ratio(jobs: Iterable[Job], jct_s: Mapping[str, float]) -> float | None:
    met = [
        jct_s.get(job.id, np.inf) <= job.spec.deadline_s + _ROUNDING_S
        for job in jobs
        if job.spec.deadline_s is not None
    ]
    return sum(met) / len(met) if met else None


def _collateral_gpus(tick: Ticked, decision: PreemptJob | ResizeJob) -> int:
    """GPUs that the job gives up although their nodes need not be left."""
    before = tick.before.jobs.get(decision.job_id)
    if before is None:
        return 0
    kept = decision.gpus if isinstance(decision, ResizeJob) else gpu_sets.NO_GPUS
    given_up = gpu_sets.minus(before.allocation.target, kept)
    nodes = tick.after.nodes
    return sum(len(given_up[name]) for name in given_up if not tick.after.must_be_left(nodes[name]))
