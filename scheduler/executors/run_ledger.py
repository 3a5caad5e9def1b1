"""Bookkeeping of runs whose ranks are started by remote agents: what has begun, must be killed, and has ended.

The records are in the run log, where the API finds them for the agents. Starting the ranks of a generation is recorded
before any agent may start them, so it happens once, under any leader.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeVar

from scheduler.domain.job import Job
from scheduler.domain.job_state import JobState
from scheduler.domain.observation import AgentReport, BegunRun, Run
from scheduler.domain.snapshot import Snapshot
from scheduler.executors.reported_runs import (
    NO_AGENT_ENDS,
    AgentEnd,
    AgentKey,
    build_begun_run,
    can_begin,
    compute_reported_runs,
    find_prepared_master,
)
from scheduler.store.protocol import RunLog

logger = logging.getLogger(__name__)

_RecordT = TypeVar("_RecordT", AgentReport, BegunRun)

STARTABLE_STATES = (JobState.STARTING, JobState.RESIZING)
"""States of jobs whose target generation may not have begun yet."""


class RunLedger:
    """The leader's side of the run log. `epoch` returns the leader's epoch, which fences all writes."""

    def __init__(self, run_log: RunLog, *, epoch: Callable[[], int]) -> None:
        self._log = run_log
        self._epoch = epoch
        self._reported: Mapping[str, int] = {}

    def list_begun_runs(self) -> tuple[BegunRun, ...]:
        return self._log.list_begun_runs()

    def list_reports(self) -> tuple[AgentReport, ...]:
        return self._log.list_reports()

    def update_runs(
        self,
        find_agents: Callable[[Sequence[BegunRun]], Mapping[AgentKey, str]],
        jobs: Mapping[str, Job],
        now_s: float,
        *,
        ends: Mapping[str, AgentEnd] = NO_AGENT_ENDS,
    ) -> Mapping[str, Sequence[Run]]:
        """Return the begun runs by job, as reported by agents. Record new kill orders and ends.

        Args:
            find_agents: returns the live agents of runs; `ends` are known ends of agents (see reported_runs).

        Raises:
            FencedError: a newer leader has written.
        """
        begun, reports = self._log.list_begun_runs(), self._log.list_reports()
        oldest_first = sorted(reports, key=lambda report: report.generation)
        self._reported = {report.job_id: report.generation for report in oldest_first}
        runs_by_job: dict[str, list[Run]] = {}
        for reported in compute_reported_runs(begun, reports, find_agents(begun), jobs, now_s, ends=ends):
            run = reported.run
            if reported.kill_order is not None and reported.kill_order != reported.begun.doom:
                self._log.record_kill_order(run.job_id, run.generation, reported.kill_order, epoch=self._epoch())
            if reported.has_just_ended:
                self._log.record_end(run, epoch=self._epoch())
            runs_by_job.setdefault(run.job_id, []).append(run)
        return runs_by_job

    def begin_generations(
        self,
        desired: Snapshot,
        begun: Sequence[BegunRun],
        find_agents: Callable[[Sequence[Job]], Mapping[AgentKey, str]],
        now_s: float,
        *,
        in_pods: bool = False,
    ) -> None:
        """Begin each generation that all its nodes have prepared and whose older ranks are all gone.

        Args:
            find_agents: returns the live agents of jobs.

        Raises:
            FencedError: a newer leader has written.
        """
        waiting = [job for job in desired.jobs.values() if job.state in STARTABLE_STATES and job.allocation.target]
        if not waiting:
            return
        agents = find_agents(waiting)
        reports_by_job = _group_by_job(self.list_reports())
        runs_by_job = _group_by_job(begun)
        for job in waiting:
            seats, reports = desired.rank_placement(job.allocation), reports_by_job.get(job.id, ())
            master = find_prepared_master(job, seats, reports)
            if master is not None and can_begin(job, runs_by_job.get(job.id, ()), reports, agents):
                self._begin(build_begun_run(job, seats, agents, now_s, master=master, in_pods=in_pods))

    def _begin(self, run: BegunRun) -> None:
        """Record that the ranks of this generation may start, once."""
        if self._log.begin_run(run, epoch=self._epoch()):
            logger.info("%s: generation %d may start its ranks", run.job_id, run.generation)

    def prune(self, desired: Snapshot, begun: Collection[BegunRun]) -> None:
        """Delete records of jobs that are gone, begun or not, and of generations before a running one.

        Raises:
            FencedError: a newer leader has written.
        """
        for run in begun:
            job = desired.jobs.get(run.job_id)
            if job is None or (job.state is JobState.RUNNING and run.generation < job.allocation.generation):
                self._log.delete_runs(run.job_id, up_to_generation=run.generation, epoch=self._epoch())
        for job_id in self._reported.keys() - desired.jobs.keys() - {run.job_id for run in begun}:
            self._log.delete_runs(job_id, up_to_generation=self._reported[job_id], epoch=self._epoch())


def _group_by_job(records: Iterable[_RecordT]) -> Mapping[str, Sequence[_RecordT]]:
    found: dict[str, list[_RecordT]] = {}
    for record in records:
        found.setdefault(record.job_id, []).append(record)
    return found
