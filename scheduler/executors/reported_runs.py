"""Runs derived from the reports of node agents, where the executor sees no processes. Pure.

An executor with remote agents, whose reports are in the RunLog, does in each pass:

    for reported in compute_reported_runs(begun_runs, reports, agents, desired.jobs, now_s):
        record reported.kill_order if it changed     # agents kill the remaining ranks
        record reported.run if it has just ended
    master = find_prepared_master(job, placement, reports)
    if master is not None and can_begin(job, begun_runs, reports, agents):
        record build_begun_run(job, placement, agents, now_s, master=master)

`agents` are the live agents: (job, node) to the id that the agent sends in its reports (`pod`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from scheduler.domain import gpu_sets
from scheduler.domain.gpu_sets import NO_GPUS, Gpus, RankPlacement
from scheduler.domain.job import Job
from scheduler.domain.job_resources import MEMORY
from scheduler.domain.observation import (
    AgentReport,
    BegunRun,
    FailureCause,
    KillOrder,
    RankPhase,
    RankReport,
    RankStatus,
    Run,
    RunPhase,
    Straggler,
)
from scheduler.domain.program import SETUP_TIMEOUT_S
from scheduler.domain.quantities import format_resource
from scheduler.domain.run_document import MasterAddress
from scheduler.executors import run_outcome
from scheduler.executors.hang_diagnosis import PlacedRank, diagnose_hang
from scheduler.executors.rank_slots import RankSlot, assign_rank_slots
from scheduler.executors.run_outcome import RankView, RunOutcome
from scheduler.executors.stragglers import find_straggler

FIRST_STATUS_TIMEOUT_S = 10.0
"""Time after all ranks are reported until a job without any status counts as one that never writes a status."""
TEARDOWN_TIMEOUT_S = 10.0
"""Time that ranks have to exit after rank 0's final status, or after a rank reports its failure."""
START_LAG_S = 5.0
"""Time after the kill deadline in which an agent may still report ranks that it was just asked to start."""

AgentKey = tuple[str, str]
"""(job id, node)."""

_KILLED_EXIT_CODE = -9
_DEADLINE_REASON = "it was killed at its deadline"
_JOB_GONE_REASON = "its job is gone"
_SUPERSEDED_REASON = "the run ended after the backup from which the database was restored"


@dataclass(frozen=True, slots=True)
class AgentEnd:
    """How an agent ended. `is_fault`: it exited by itself, which is the job's fault."""

    reason: str
    is_fault: bool = False
    cause: FailureCause | None = None


NO_AGENT_ENDS: Mapping[str, AgentEnd] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class ReportedRun:
    """A begun run as observed, and its kill order from now on."""

    begun: BegunRun
    run: Run
    kill_order: KillOrder | None

    @property
    def has_just_ended(self) -> bool:
        return self.begun.end is None and self.run.phase in run_outcome.ENDED_PHASES


@dataclass(frozen=True, slots=True)
class _RankState:
    """A rank of a begun run: its slot, its report, and its state."""

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
    """Return all begun runs in order, ended ones included. `ends` are known ends of agents, by `pod`."""
    rank_report = {(report.job_id, report.node): report for report in reports}
    reported = []
    for run in begun:
        if run.end is not None:
            reported.append(ReportedRun(run, run.end, run.doom))
            continue
        run_reports = {
            node: rank_report[key]
            for node in run.gpus
            if _belongs_to_run(run, rank_report.get(key := (run.job_id, node)))
        }
        live, run_ends = agents, ends
        if superseded := {node for node in run.gpus if _is_superseded(run, rank_report.get((run.job_id, node)))}:
            live = {key: agent for key, agent in agents.items() if key[1] not in superseded}
            run_ends = {run.pods[node]: AgentEnd(_SUPERSEDED_REASON) for node in superseded} | dict(ends)
        ranks = [
            _evaluate_rank(run, slot, run_reports.get(slot.node), live, now_s) for slot in assign_rank_slots(run.seats)
        ]
        leave_by_s = _leave_by_s(run, jobs.get(run.job_id))
        reported.append(_evaluate_run(run, ranks, run_reports, now_s, leave_by_s=leave_by_s, ends=run_ends))
    return tuple(reported)


def can_begin(
    job: Job, begun: Iterable[BegunRun], reports: Iterable[AgentReport], agents: Mapping[AgentKey, str]
) -> bool:
    """Return whether the job's target generation may begin.

    Each node needs an agent that has reported. No rank of an older generation may be alive, all older ends must be
    recorded, and none of them may be a success.
    """
    allocation = job.allocation
    if not allocation.target or allocation.plan is None:
        return False
    for run in begun:
        if run.job_id != job.id:
            continue
        if run.generation >= allocation.generation or run.end is None or run.end.phase is RunPhase.SUCCEEDED:
            return False
    live_reports = [
        report for report in reports if report.job_id == job.id and agents.get((job.id, report.node)) == report.pod
    ]
    if any(report.has_living_ranks for report in live_reports):
        return False
    return allocation.target.keys() <= {report.node for report in live_reports}


def find_prepared_master(job: Job, seats: RankPlacement, reports: Iterable[AgentReport]) -> MasterAddress | None:
    """Return where rank 0 will serve the store of the job's target generation. None: a node has not prepared it.

    The port is 0 if the preparation failed. The run begins nevertheless, so that its end is reported with the reason.
    """
    prepared = {
        report.node: report
        for report in reports
        if report.job_id == job.id and report.prepared == job.allocation.generation
    }
    if not job.allocation.target.keys() <= prepared.keys():
        return None
    first = prepared[seats[0][0]]
    return MasterAddress(first.address, first.master_port) if first.address else None


def describe_setups(job: Job, reports: Iterable[AgentReport]) -> str:
    """Return which nodes run the setup command of the job's target generation, empty if none does."""
    generation = job.allocation.generation
    nodes = sorted(report.node for report in reports if report.job_id == job.id and report.setting_up == generation)
    if not nodes:
        return ""
    others = f" and {len(nodes) - 1} more nodes run" if len(nodes) > 1 else " runs"
    return f"node {nodes[0]}{others} its setup command, for at most {SETUP_TIMEOUT_S:.0f} s"


def build_begun_run(
    job: Job,
    seats: RankPlacement,
    agents: Mapping[AgentKey, str],
    now_s: float,
    *,
    master: MasterAddress | None = None,
    in_pods: bool = False,
) -> BegunRun:
    """Return the job's target generation as a begun run, bound to the current agents."""
    allocation = job.allocation
    assert allocation.plan is not None, "a job with a target has a plan"
    return BegunRun(
        job_id=job.id,
        generation=allocation.generation,
        gpus=allocation.target,
        seats=seats,
        begun_at_s=now_s,
        pods={node: agents[job.id, node] for node in allocation.target},
        plan=allocation.plan,
        frozen_layers=job.freezing.layers,
        master=master,
        in_pods=in_pods,
    )


def _belongs_to_run(run: BegunRun, report: AgentReport | None) -> bool:
    return report is not None and (report.pod, report.generation) == (run.pods[report.node], run.generation)


def _is_superseded(run: BegunRun, report: AgentReport | None) -> bool:
    """Return whether the run's agent reports that it no longer has this run of a restored database.

    It has a generation that began after the backup, or none. Restoring deletes all reports, so the report is newer.
    """
    return (
        run.is_restored
        and report is not None
        and report.pod == run.pods[report.node]
        and report.generation != run.generation
    )


def _evaluate_rank(
    run: BegunRun, slot: RankSlot, report: AgentReport | None, agents: Mapping[AgentKey, str], now_s: float
) -> _RankState:
    """Return the rank's state. A rank without an agent that can report it counts as killed."""
    rank_report = next((each for each in report.ranks if each.rank == slot.rank), None) if report else None
    status, code = (rank_report.status, rank_report.exit_code) if rank_report else (None, None)
    is_agent_alive = agents.get((run.job_id, slot.node)) == run.pods[slot.node]
    has_no_outcome = code is None and not (status is not None and status.is_terminal)
    if code is None and not is_agent_alive:
        code = _KILLED_EXIT_CODE
    elif rank_report is None and now_s >= run.kill_at_s + START_LAG_S:
        code = _KILLED_EXIT_CODE  # never started, and never handed out again
    return _RankState(
        slot, rank_report, RankView(slot.rank, status, code), is_lost=has_no_outcome and not is_agent_alive
    )


def _evaluate_run(
    run: BegunRun,
    ranks: list[_RankState],
    reports: Mapping[str, AgentReport],
    now_s: float,
    *,
    leave_by_s: float | None,
    ends: Mapping[str, AgentEnd],
) -> ReportedRun:
    rank_views = [rank.view for rank in ranks]
    terminated = any(report.terminated for report in reports.values())
    saved = any(report.saved for report in reports.values())
    checkpoint_at_s = max(
        (report.checkpoint_at_s for report in reports.values() if report.checkpoint_at_s is not None), default=None
    )
    agent_end = next((_find_agent_end(run, rank, ends) for rank in ranks if rank.is_lost), None)
    has_machines = run.master is not None and not run.is_restored
    lost_nodes = {rank.placement.node for rank in ranks if rank.is_lost} if has_machines else set()
    kill_order = _merge_kill_orders(
        run.doom,
        _compute_kill_order(ranks, reports, agent_end, now_s, lost_nodes=lost_nodes),
        deadline_order=_deadline_kill_order(leave_by_s, now_s),
    )
    statuses = {view.rank: view.status for view in rank_views if view.status is not None}
    if any(view.exit_code is None for view in rank_views):
        outcome = RunOutcome(_find_live_phase(ranks, reports, is_leaving=leave_by_s is not None, now_s=now_s))
        live = run_outcome.build_run(
            *_key(run),
            outcome,
            statuses,
            gpus=_find_occupied_gpus(ranks),
            checkpoint_at_s=checkpoint_at_s,
            reported_at_s=_find_report_time_s(run, reports),
            straggler=_find_straggler(run, statuses),
            lacks_session=outcome.phase is RunPhase.RUNNING and not statuses,
        )
        return ReportedRun(run, live, kill_order)
    order = kill_order or KillOrder(now_s)
    outcome = run_outcome.classify_outcome(
        rank_views, fault=order.fault, killed_because=order.loss, terminated=terminated, saved=saved
    )
    if outcome.phase is not RunPhase.FAILED:
        suspects = order.suspects if outcome.phase is RunPhase.LOST else ()
        gone = run_outcome.build_run(*_key(run), outcome, statuses, suspects=suspects, checkpoint_at_s=checkpoint_at_s)
        return ReportedRun(run, gone, kill_order)
    ended = run_outcome.build_run(
        *_key(run),
        outcome,
        statuses,
        cause=order.cause or _find_cause(ranks, reports.values(), agent_end),
        suspects=order.suspects,
        permanent_fault=order.permanent_fault,
        ran_s=_find_run_time_s(reports.values()),
        checkpoint_at_s=checkpoint_at_s,
    )
    return ReportedRun(run, ended, kill_order)


def _find_report_time_s(run: BegunRun, reports: Mapping[str, AgentReport]) -> float | None:
    """Return when the node of rank 0 reported last; None if it has not."""
    report = reports.get(run.seats[0][0])
    return None if report is None else report.at_s


def _find_straggler(run: BegunRun, statuses: Mapping[int, RankStatus]) -> Straggler | None:
    """Return the straggler of a run, None on GPUs of several models: their speeds differ by nature."""
    if len({stage.gpu for stage in run.plan.stages}) > 1:
        return None
    probes = {rank: status.probe_s for rank, status in statuses.items() if status.probe_s is not None}
    return find_straggler(probes, [node for node, _ in run.seats])


def _find_run_time_s(reports: Collection[AgentReport]) -> float | None:
    """Return the time from the first to the last report about the run, or None without any."""
    if not reports:
        return None
    return max(0.0, max(report.at_s for report in reports) - min(report.since_s for report in reports))


def _compute_kill_order(
    ranks: list[_RankState],
    reports: Mapping[str, AgentReport],
    agent_end: AgentEnd | None,
    now_s: float,
    *,
    lost_nodes: Collection[str],
) -> KillOrder | None:
    """Return the kill order that follows from reports and ends alone, or None.

    Args:
        lost_nodes: nodes of machines that were lost with their ranks. Pods end for many other reasons.
    """
    rank_views = [rank.view for rank in ranks]
    if agent_end is not None and agent_end.is_fault:
        return KillOrder(now_s, fault=agent_end.reason)
    if agent_end is not None:
        return KillOrder(now_s, loss=agent_end.reason, suspects=tuple(sorted(lost_nodes)))
    if killed := next((report for report in reports.values() if report.killed), None):
        return KillOrder(now_s, loss=killed.killed, suspects=(killed.node,) if killed.machine_fault else ())
    if failed := next((report for report in reports.values() if report.failure), None):
        return KillOrder(now_s, fault=failed.failure, permanent_fault=failed.permanent_fault)
    terminated = any(report.terminated for report in reports.values())
    saved = any(report.saved for report in reports.values())
    if faulty_ranks := run_outcome.find_faulty_ranks(rank_views, terminated=terminated, saved=saved):
        has_died = any(view.exit_code is not None for view in faulty_ranks)
        culprit = faulty_ranks[0]
        kill_at_s = now_s if has_died else now_s + TEARDOWN_TIMEOUT_S
        rank_report = next(rank.report for rank in ranks if rank.view is culprit)
        log_tail = rank_report.tail if rank_report else ""
        fault, permanent_fault = (
            _describe_memory_death(reports.values()) + run_outcome.describe_fault(culprit, log_tail),
            run_outcome.find_permanent_fault(culprit, log_tail),
        )
        return KillOrder(kill_at_s, fault=fault, is_hearsay=_is_hearsay(culprit), permanent_fault=permanent_fault)
    has_ended_rank = any(view.exit_code is not None for view in rank_views)
    if run_outcome.find_final_phase(rank_views) or (saved and has_ended_rank):
        return KillOrder(now_s + TEARDOWN_TIMEOUT_S)
    return _hang_kill_order(ranks, now_s)


def _describe_memory_death(reports: Iterable[AgentReport]) -> str:
    """Return what to say before the fault of a run in which the kernel has killed a process at the memory limit."""
    for report in reports:
        if report.exceeded_memory is not None:
            limit = format_resource(MEMORY, report.exceeded_memory)
            return f"on node {report.node} the job needed more than its limit of {limit} (resources.memory): "
    return ""


def _hang_kill_order(ranks: list[_RankState], now_s: float) -> KillOrder | None:
    """Return the order to kill a hung run. A hang is a fault, which counts as a retry: most are in the program."""
    living = [rank for rank in ranks if rank.view.exit_code is None]
    hang = diagnose_hang(PlacedRank(rank.placement.rank, rank.placement.node, rank.report) for rank in living)
    if hang is None:
        return None
    return KillOrder(now_s, fault=hang.reason, cause=FailureCause.HANG, suspects=hang.suspects)


def _is_hearsay(culprit: RankView) -> bool:
    status = culprit.status
    return status is not None and status.phase is RankPhase.FAILED and status.cause is None


def _merge_kill_orders(
    old: KillOrder | None, new: KillOrder | None, *, deadline_order: KillOrder | None
) -> KillOrder | None:
    """Merge kill orders.

    The first reason stands, unless it was hearsay that an agent's end explains; the earlier deadline wins.
    """
    if old is None or new is None:
        kill_order = old or new
    elif old.is_hearsay and new.loss:
        kill_order = new
    elif old.fault or old.loss:
        kill_order = replace(old, by_s=min(old.by_s, new.by_s))
    else:
        kill_order = replace(new, by_s=min(old.by_s, new.by_s))
    if deadline_order is None:
        return kill_order
    if kill_order is None or not (kill_order.fault or kill_order.loss):
        return replace(
            deadline_order, by_s=min(deadline_order.by_s, math.inf if kill_order is None else kill_order.by_s)
        )
    return replace(kill_order, by_s=min(deadline_order.by_s, kill_order.by_s))


def _leave_by_s(run: BegunRun, job: Job | None) -> float | None:
    """Return the deadline for leaving; None if the run may stay, minus infinity if the job is gone."""
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
    ranks: list[_RankState], reports: Mapping[str, AgentReport], *, is_leaving: bool, now_s: float
) -> RunPhase:
    all_reported = all(rank.report is not None for rank in ranks)
    within_first_status_timeout = (
        not all_reported or now_s < max(report.since_s for report in reports.values()) + FIRST_STATUS_TIMEOUT_S
    )
    return run_outcome.find_live_phase(
        [rank.view for rank in ranks], is_leaving=is_leaving, within_first_status_timeout=within_first_status_timeout
    )


def _find_occupied_gpus(ranks: list[_RankState]) -> Gpus:
    """Return GPUs of ranks that are alive or may still start."""
    gpus = NO_GPUS
    for rank in ranks:
        if rank.view.exit_code is None:
            gpus = gpu_sets.union(gpus, {rank.placement.node: (rank.placement.gpu,)})
    return gpus


def _find_agent_end(run: BegunRun, rank: _RankState, ends: Mapping[str, AgentEnd]) -> AgentEnd:
    node = rank.placement.node
    return ends.get(run.pods[node]) or AgentEnd(f"the agent of node {node} is gone")


def _find_cause(
    ranks: list[_RankState], reports: Iterable[AgentReport], agent_end: AgentEnd | None
) -> FailureCause | None:
    if agent_end is not None and agent_end.cause is not None:
        return agent_end.cause
    counts = {rank.placement.rank: rank.report.oom_kills for rank in ranks if rank.report is not None}
    return run_outcome.find_failure_cause(
        [rank.view for rank in ranks],
        oom_kills=lambda view: counts.get(view.rank),
        has_exceeded_memory=any(report.exceeded_memory is not None for report in reports),
    )


def _key(run: BegunRun) -> tuple[str, int]:
    return run.job_id, run.generation
