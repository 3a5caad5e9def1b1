"""How begun runs stand by what node agents report of their ranks, where no process of them can be seen. Pure.

An executor whose agents report over the network (RunLog holds what they said) does in each look:

    for seen in reported_runs(log.begun(), log.reports(), agents, desired.jobs, now_s):
        if seen.doom is not None and seen.doom != seen.begun.doom: log.doom(..., seen.doom)  # agents kill what is left
        if seen.has_just_ended: log.end(seen.run)                                  # before anything else of it is lost
    if may_begin(job, log.begun_of(job.id), log.reports(), agents): log.begin(begun_run(job, seats, agents, now_s))

`agents` tells which agents are still there: by (job, node) the id that the agent there gives in its reports (`pod`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from scheduler.domain import gpu_sets
from scheduler.domain.gpu_sets import NO_GPUS, Gpus, RankPlacement
from scheduler.domain.job import Job
from scheduler.domain.observation import (
    AgentReport,
    BegunRun,
    FailureCause,
    KillOrder,
    RankPhase,
    RankReport,
    Run,
    RunPhase,
)
from scheduler.executors import run_outcome
from scheduler.executors.rank_launch import RankSlot, assign_rank_slots
from scheduler.executors.run_outcome import RankView, RunOutcome

FIRST_STATUS_TIMEOUT_S = 10.0
"""So long after all ranks were reported without a word from any, the script is one that never says anything."""
TEARDOWN_TIMEOUT_S = 10.0
"""So long after rank 0's last word, or a rank's word that it failed, the ranks may take to end."""
START_LAG_S = 5.0
"""So long after its end was due an agent that was told of a run just before may still say that it started ranks."""

AgentKey = tuple[str, str]
"""Job id and node."""

_KILLED_EXIT_CODE = -9
_DEADLINE_REASON = "it was killed at its deadline"
_JOB_GONE_REASON = "its job is gone"


@dataclass(frozen=True, slots=True)
class AgentEnd:
    """How an agent ended that is gone. `is_fault`: by itself, which is its job's fault, not killed from outside."""

    reason: str
    is_fault: bool = False
    cause: FailureCause | None = None


NO_AGENT_ENDS: Mapping[str, AgentEnd] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class ReportedRun:
    """`run` as it is seen, `doom` as it should be from now on."""

    begun: BegunRun
    run: Run
    kill_order: KillOrder | None

    @property
    def has_just_ended(self) -> bool:
        return self.begun.end is None and self.run.phase in run_outcome.ENDED_PHASES


@dataclass(frozen=True, slots=True)
class _RankState:
    """One rank of a begun run: where it sits, what was reported of it, and how it stands by that."""

    placement: RankSlot
    report: RankReport | None
    view: RankView
    is_lost: bool


def compute_reported_runs(
    begun: Iterable[BegunRun],
    reports: Iterable[AgentReport],
    agents: Mapping[AgentKey, str],
    jobs: Mapping[str, Job],
    now_s: float,
    *,
    ends: Mapping[str, AgentEnd] = NO_AGENT_ENDS,
) -> tuple[ReportedRun, ...]:
    """All begun runs, ended ones too, in their order.

    `jobs` are the desired ones, `ends` tells by `pod` how agents ended that are gone, as far as that is known.
    """
    told = {(report.job_id, report.node): report for report in reports}
    seen = []
    for run in begun:
        if run.end is not None:
            seen.append(ReportedRun(run, run.end, run.doom))
            continue
        own = {node: told[key] for node in run.gpus if _belongs_to_run(run, told.get(key := (run.job_id, node)))}
        ranks = [
            _evaluate_rank(run, place, own.get(place.node), agents, now_s) for place in assign_rank_slots(run.seats)
        ]
        leave_by_s = _leave_by_s(run, jobs.get(run.job_id))
        seen.append(_evaluate_run(run, ranks, own, now_s, leave_by_s=leave_by_s, ends=ends))
    return tuple(seen)


def can_begin(
    job: Job, begun: Iterable[BegunRun], reports: Iterable[AgentReport], agents: Mapping[AgentKey, str]
) -> bool:
    """Whether the job's target generation may be begun now: each of its nodes has an agent that has reported, no rank
    of an older generation lives anywhere, how those ended is written down, and none of them has finished the job."""
    allocation = job.allocation
    if not allocation.target or allocation.plan is None:
        return False
    for run in begun:
        if run.job_id != job.id:
            continue
        if run.generation >= allocation.generation or run.end is None or run.end.phase is RunPhase.SUCCEEDED:
            return False
    there = [
        report for report in reports if report.job_id == job.id and agents.get((job.id, report.node)) == report.pod
    ]
    if any(report.has_living_ranks for report in there):
        return False
    return allocation.target.keys() <= {report.node for report in there}


def build_begun_run(job: Job, seats: RankPlacement, agents: Mapping[AgentKey, str], now_s: float) -> BegunRun:
    """The job's target generation as it is begun, for the agents that are there now and no others."""
    allocation = job.allocation
    assert allocation.plan is not None, "a target comes with its plan"
    return BegunRun(
        job_id=job.id,
        generation=allocation.generation,
        gpus=allocation.target,
        seats=seats,
        begun_at_s=now_s,
        pods={node: agents[job.id, node] for node in allocation.target},
        plan=allocation.plan,
        frozen_layers=job.freezing.layers,
    )


def _belongs_to_run(run: BegunRun, report: AgentReport | None) -> bool:
    return report is not None and (report.pod, report.generation) == (run.pods[report.node], run.generation)


def _evaluate_rank(
    run: BegunRun, place: RankSlot, report: AgentReport | None, agents: Mapping[AgentKey, str], now_s: float
) -> _RankState:
    """A rank that nobody can speak for any more counts as killed."""
    told = next((each for each in report.ranks if each.rank == place.rank), None) if report else None
    status, code = (told.status, told.exit_code) if told else (None, None)
    is_there = agents.get((run.job_id, place.node)) == run.pods[place.node]
    has_no_word = code is None and not (status is not None and status.is_terminal)
    if code is None and not is_there:
        code = _KILLED_EXIT_CODE
    elif told is None and now_s >= run.kill_at_s + START_LAG_S:
        code = _KILLED_EXIT_CODE  # it was never started, and nobody hands it out any more
    return _RankState(place, told, RankView(place.rank, status, code), is_lost=has_no_word and not is_there)


def _evaluate_run(
    run: BegunRun,
    ranks: list[_RankState],
    reports: Mapping[str, AgentReport],
    now_s: float,
    *,
    leave_by_s: float | None,
    ends: Mapping[str, AgentEnd],
) -> ReportedRun:
    views = [rank.view for rank in ranks]
    terminated = any(report.terminated for report in reports.values())
    lost = next((_find_agent_end(run, rank, ends) for rank in ranks if rank.is_lost), None)
    doom = _merge_kill_orders(
        run.doom, _compute_kill_order(ranks, reports, lost, now_s), killed=_deadline_kill_order(leave_by_s, now_s)
    )
    statuses = {view.rank: view.status for view in views if view.status is not None}
    if any(view.exit_code is None for view in views):
        verdict = RunOutcome(_find_live_phase(ranks, reports, asked=leave_by_s is not None, now_s=now_s))
        gpus = _find_occupied_gpus(ranks)
        return ReportedRun(run, run_outcome.build_run(*_key(run), verdict, statuses, gpus=gpus), doom)
    said = doom or KillOrder(now_s)
    verdict = run_outcome.classify_outcome(views, fault=said.fault, killed_because=said.loss, terminated=terminated)
    cause = _find_cause(ranks, lost) if verdict.phase is RunPhase.FAILED else None
    return ReportedRun(run, run_outcome.build_run(*_key(run), verdict, statuses, cause=cause), doom)


def _compute_kill_order(
    ranks: list[_RankState], reports: Mapping[str, AgentReport], lost: AgentEnd | None, now_s: float
) -> KillOrder | None:
    """What its ranks' words and ends alone say now of why and by when the rest of them has to end."""
    views = [rank.view for rank in ranks]
    if lost is not None:
        return KillOrder(now_s, fault=lost.reason) if lost.is_fault else KillOrder(now_s, loss=lost.reason)
    if killed := next((report.killed for report in reports.values() if report.killed), ""):
        return KillOrder(now_s, loss=killed)
    if failure := next((report.failure for report in reports.values() if report.failure), ""):
        return KillOrder(now_s, fault=failure)
    terminated = any(report.terminated for report in reports.values())
    if faulty := run_outcome.find_faulty_ranks(views, terminated=terminated):
        has_died = any(view.exit_code is not None for view in faulty)
        blamed = faulty[0]
        by_s = now_s if has_died else now_s + TEARDOWN_TIMEOUT_S
        told = next(rank.report for rank in ranks if rank.view is blamed)
        fault = run_outcome.describe_fault(blamed, told.tail if told else "")
        return KillOrder(by_s, fault=fault, is_hearsay=_is_hearsay(blamed))
    return KillOrder(now_s + TEARDOWN_TIMEOUT_S) if run_outcome.find_final_phase(views) else None


def _is_hearsay(blamed: RankView) -> bool:
    status = blamed.status
    return status is not None and status.phase is RankPhase.FAILED and status.cause is None


def _merge_kill_orders(old: KillOrder | None, fresh: KillOrder | None, *, killed: KillOrder | None) -> KillOrder | None:
    """What was said first stands, but for hearsay that an agent's end explains; the earlier end counts."""
    if old is None or fresh is None:
        doom = old or fresh
    elif old.is_hearsay and fresh.loss:
        doom = fresh
    elif old.fault or old.loss:
        doom = replace(old, by_s=min(old.by_s, fresh.by_s))
    else:
        doom = replace(fresh, by_s=min(old.by_s, fresh.by_s))
    if killed is None:
        return doom
    if doom is None or not (doom.fault or doom.loss):
        return replace(killed, by_s=min(killed.by_s, math.inf if doom is None else doom.by_s))
    return replace(doom, by_s=min(killed.by_s, doom.by_s))


def _leave_by_s(run: BegunRun, job: Job | None) -> float | None:
    """By when its ranks have to have left; None while they may stay, minus infinity where the job is gone."""
    if job is None:
        return -math.inf
    allocation = job.allocation
    if allocation.target and allocation.generation == run.generation:
        return None
    return math.inf if allocation.leave_by_s is None else allocation.leave_by_s


def _deadline_kill_order(leave_by_s: float | None, now_s: float) -> KillOrder | None:
    if leave_by_s is None or now_s < leave_by_s:
        return None
    return KillOrder(now_s, loss=_DEADLINE_REASON if math.isfinite(leave_by_s) else _JOB_GONE_REASON)


def _find_live_phase(
    ranks: list[_RankState], reports: Mapping[str, AgentReport], *, asked: bool, now_s: float
) -> RunPhase:
    all_reported = all(rank.report is not None for rank in ranks)
    patient = not all_reported or now_s < max(report.since_s for report in reports.values()) + FIRST_STATUS_TIMEOUT_S
    return run_outcome.find_live_phase(
        [rank.view for rank in ranks], is_leaving=asked, within_first_status_timeout=patient
    )


def _find_occupied_gpus(ranks: list[_RankState]) -> Gpus:
    """GPUs of ranks that live, or that may yet be started."""
    gpus = NO_GPUS
    for rank in ranks:
        if rank.view.exit_code is None:
            gpus = gpu_sets.union(gpus, {rank.placement.node: (rank.placement.gpu,)})
    return gpus


def _find_agent_end(run: BegunRun, rank: _RankState, ends: Mapping[str, AgentEnd]) -> AgentEnd:
    node = rank.placement.node
    return ends.get(run.pods[node]) or AgentEnd(f"the agent of node {node} is gone")


def _find_cause(ranks: list[_RankState], lost: AgentEnd | None) -> FailureCause | None:
    if lost is not None and lost.cause is not None:
        return lost.cause
    counts = {rank.placement.rank: rank.report.oom_kills for rank in ranks if rank.report is not None}
    return run_outcome.find_failure_cause([rank.view for rank in ranks], oom_kills=lambda view: counts.get(view.rank))


def _key(run: BegunRun) -> tuple[str, int]:
    return run.job_id, run.generation
