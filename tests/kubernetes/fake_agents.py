"""Fake agents and ranks: they follow the run log and complete one step per pass, without computing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from scheduler.domain.observation import AgentReport, BegunRun, RankPhase, RankReport, RankStatus
from scheduler.domain.snapshot import Snapshot
from scheduler.kubernetes.api_objects import JOB_LABEL, Object, is_terminating, labels_of, uid_of
from scheduler.store.protocol import RunLog
from tests.kubernetes.fake_kubelet import FakeKubelet


@dataclass
class Work:
    """Progress of one job's ranks, which save at every step."""

    step: int = 0
    finished: bool = False


HEARTBEAT_S = 5.0
MASTER_PORT = 29_500


class FakeAgents:
    """One fake agent per running agent pod.

    A job works until `finish`, or for `steps` steps, and saves before it leaves.
    """

    def __init__(self, kubelet: FakeKubelet, run_log: RunLog, *, steps: int = 10**9) -> None:
        self.steps = steps
        self._told: dict[str, AgentReport] = {}
        self._kubelet = kubelet
        self._run_log = run_log
        self._work: dict[str, Work] = {}
        self._ended: dict[tuple[str, int], RankPhase] = {}
        self._killed: set[tuple[str, int]] = set()
        self.began: list[tuple[str, int]] = []

    def finish(self, job_id: str) -> None:
        """Let the job's ranks succeed."""
        self._work.setdefault(job_id, Work()).finished = True

    def step(self, desired: Snapshot, now_s: float) -> None:
        """Let all ranks follow the run log and their notices, then let every agent report."""
        pods = {uid_of(pod): pod for pod in self._kubelet.pods.snapshot().values() if _runs(pod)}
        newest = {(run.job_id, run.generation): run for run in self._run_log.list_begun_runs() if run.end is None}
        for key, run in newest.items():
            self._go_on(key, run, pods, desired)
            if run.kill_at_s <= now_s:
                self._killed.add(key)
        for uid, pod in pods.items():
            job_id, node = labels_of(pod)[JOB_LABEL], pod["spec"]["nodeName"]
            mine = [run for run in newest.values() if run.pods.get(node) == uid]
            report = self._report(job_id, node, uid, mine[-1] if mine else None, now_s)
            report = _with_preparation(report, desired)
            if _is_news(self._told.get(uid), report):
                self._told[uid] = report
                self._run_log.record_reports(report)

    def _go_on(self, key: tuple[str, int], run: BegunRun, pods: Mapping[str, Object], desired: Snapshot) -> None:
        if key in self._ended:
            return
        if key not in self.began:
            self.began.append(key)
        work = self._work.setdefault(run.job_id, Work())
        work.step += 1
        job = desired.jobs.get(run.job_id)
        reported = job is None or job.allocation.generation != run.generation or not job.allocation.target
        leaving = any(is_terminating(pods[uid]) for uid in run.pods.values() if uid in pods)
        if work.finished or work.step >= self.steps:
            self._ended[key] = RankPhase.SUCCEEDED
        elif reported or leaving:
            self._ended[key] = RankPhase.LEFT

    def _report(self, job_id: str, node: str, uid: str, run: BegunRun | None, now_s: float) -> AgentReport:
        if run is None:
            return AgentReport(job_id, node, uid, now_s)
        key = (job_id, run.generation)
        phase = self._ended.get(key)
        exit_code = 0 if phase is not None else -9 if key in self._killed else None
        step = self._work[job_id].step
        status = RankStatus(phase or RankPhase.RUNNING, step=step, checkpoint_step=step, loss=1.0 / step)
        ranks = tuple(RankReport(rank, exit_code, status) for rank, (where, _) in enumerate(run.seats) if where == node)
        return AgentReport(job_id, node, uid, now_s, run.generation, ranks, since_s=run.begun_at_s)


def _with_preparation(report: AgentReport, desired: Snapshot) -> AgentReport:
    """Return the report of an agent that prepares at once the generation that its job wants on its node."""
    job = desired.jobs.get(report.job_id)
    if job is None or report.node not in job.allocation.target or job.allocation.generation <= report.generation:
        return report
    prepared = job.allocation.generation
    return replace(report, prepared=prepared, address=f"{report.node}.test", master_port=MASTER_PORT)


def _is_news(before: AgentReport | None, report: AgentReport) -> bool:
    if before is None or report.at_s - before.at_s >= HEARTBEAT_S or before.generation != report.generation:
        return True
    if before.prepared != report.prepared:
        return True
    return [rank.exit_code for rank in before.ranks] != [rank.exit_code for rank in report.ranks]


def _runs(pod: Object) -> bool:
    return JOB_LABEL in labels_of(pod) and pod["status"].get("phase") == "Running"
