"""Makes the events of a fault case happen: faults of world and hosts, and commands of owners and administrators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from scheduler.domain.commands import (
    AddNode,
    CancelJob,
    ChangeJob,
    ChangeQueue,
    CheckpointJob,
    CommandBody,
    CordonNode,
    DeleteQueue,
    FreezeResizes,
    RecallAll,
    RemoveNode,
    ReportProgress,
    ResumeJob,
    ResumeLending,
    ScaleJob,
    SuspendJob,
    UncordonNode,
)
from scheduler.domain.fleet import Node
from scheduler.domain.job_queue import JobQueue
from scheduler.simulator.campaign.case import CaseEvent, CaseEventKind
from scheduler.simulator.campaign.generation import QUEUES
from scheduler.simulator.campaign.hardware import fit_gpus
from scheduler.simulator.campaign.host import Host

if TYPE_CHECKING:
    from scheduler.simulator.campaign.run import CaseRun

T = TypeVar("T")
_OOM_BYTES = 81 * 2**30
_ARMED = {
    CaseEventKind.OBSERVE_ERROR,
    CaseEventKind.CONVERGE_ERROR,
    CaseEventKind.COMMIT_CONFLICT,
    CaseEventKind.COMMIT_REFUSED,
    CaseEventKind.COMMIT_UNANSWERED,
    CaseEventKind.LEADER_CRASH,
    CaseEventKind.PAUSE_BEFORE_COMMIT,
    CaseEventKind.PAUSE_AFTER_COMMIT,
}
"""Faults that wait for the next opportunity on the leader's host, and are counted there."""


class CaseInjector:
    """Injects the events of one run. `fallible_jobs` are those that a fault may have made fail for good."""

    def __init__(self, run: CaseRun) -> None:
        self._run = run
        self.fallible_jobs: set[str] = set()
        self._down: set[str] = set()

    def inject(self, event: CaseEvent) -> None:
        """Let the event happen. It is counted if it has an effect."""
        if event.kind in _ARMED:
            self._leader(event).faults.armed.add(event.kind)
        elif self._disturb_world(event) or self._disturb_host(event) or self._command(event):
            self._run.counts[event.kind] += 1

    def _disturb_world(self, event: CaseEvent) -> bool:
        world = self._run.world
        running = sorted(world.list_running_jobs())
        match event.kind:
            case CaseEventKind.NODE_LOSS:
                return self._lose_node(event)
            case CaseEventKind.WORKER_CRASH:
                return bool(running) and world.crash_job(_pick(running, event))
            case CaseEventKind.OUT_OF_MEMORY if running:
                self.fallible_jobs.add(job_id := _pick(running, event))
                return world.run_out_of_memory(job_id, peak_bytes=_OOM_BYTES)
            case CaseEventKind.SLOW_CHECKPOINT:
                return bool(running) and world.delay_save(_pick(running, event), event.amount)
            case CaseEventKind.STALE_REPORT if running:
                job = self._run.snapshot.jobs.get(_pick(running, event))
                if job is not None and job.allocation.generation > 1:
                    stale = job.allocation.generation - 1
                    self._run.send(ReportProgress(job.id, stale, 1e12, checkpoint_steps=1e12))
                    return True
            case CaseEventKind.DUPLICATE_REPORT if running:
                return self._report_twice(event, _pick(running, event))
            case CaseEventKind.DUPLICATE_COMMAND:
                command = _pick(self._run.sent, event)
                if self._run.ask(lambda: self._run.store.send(command)):
                    self._run.checks.record(world.now_s, "command-repeated", f"{command.id} was accepted twice")
                return True
        return False

    def _report_twice(self, event: CaseEvent, job_id: str) -> bool:
        """Report the progress that is known now, and again when the job may have moved on."""
        run = self._run
        job = run.snapshot.jobs.get(job_id)
        if job is None or job.is_ended:
            return False
        generation, steps, saved = job.allocation.generation, job.progress.steps, job.progress.checkpoint_steps
        report = ReportProgress(job_id, generation, steps, checkpoint_steps=saved)
        run.send(report)
        run.at(run.world.now_s + event.amount, lambda: run.send(report))
        return True

    def _lose_node(self, event: CaseEvent) -> bool:
        run = self._run
        name = _pick(run.case.nodes, event).name
        if name in self._down:
            return False
        self._down.add(name)
        run.world.fail_node(name)

        def restore() -> None:
            self._down.discard(name)
            run.world.restore_node(name)

        run.at(min(run.world.now_s + event.amount, run.case.faults_end_s), restore)
        return True

    def _disturb_host(self, event: CaseEvent) -> bool:
        host, now_s = self._leader(event), self._run.world.now_s
        match event.kind:
            case CaseEventKind.STORE_OUTAGE:
                for each in self._run.hosts:
                    each.faults.store_down_until_s = now_s + event.amount
            case CaseEventKind.SLOW_COMMIT:
                host.faults.slow_commit_s = event.amount
            case CaseEventKind.STALE_OBSERVATION:
                host.faults.stale_observations = 1 + int(3 * event.pick)
            case CaseEventKind.LOST_REPORT:
                if running := sorted(self._run.world.list_running_jobs()):
                    host.faults.lost_reports_of = _pick(running, event)
                    host.faults.reports_lost_until_s = now_s + event.amount
            case CaseEventKind.STALE_RUN:
                if running := sorted(self._run.world.list_running_jobs()):
                    host.faults.stale_run_of = _pick(running, event)
            case CaseEventKind.LEADER_PAUSE:
                host.pause(event.amount)
                return True
            case CaseEventKind.CLOCK_FORWARD:
                host.clock.jump(event.amount)
                return True
            case CaseEventKind.CLOCK_BACK:
                host.clock.jump(-event.amount)
                return True
        return False

    def _leader(self, event: CaseEvent) -> Host:
        hosts = self._run.hosts
        return next((host for host in hosts if host.controller.is_leader), _pick(hosts, event))

    def _command(self, event: CaseEvent) -> bool:
        live = sorted(job.id for job in self._run.snapshot.jobs.values() if not job.is_ended)
        if live and self._command_owner(event, _pick(live, event)):
            return True
        match event.kind:
            case CaseEventKind.DRAIN:
                name = _pick(self._run.case.nodes, event).name
                return self._send_and_undo(event, CordonNode(name, drain=True), UncordonNode(name))
            case CaseEventKind.ADD_NODE if absent := self._list_absent_nodes():
                self._run.send(AddNode(_pick(absent, event)))
                return True
            case CaseEventKind.REMOVE_NODE if known := sorted(self._run.snapshot.nodes):
                return self._remove_node(event, _pick(known, event))
            case CaseEventKind.RECALL_ALL:
                return self._send_and_undo(event, RecallAll(), ResumeLending())
            case CaseEventKind.FREEZE_RESIZES:
                return self._send_and_undo(event, FreezeResizes(True), FreezeResizes(False))
            case CaseEventKind.CHANGE_QUOTA if queues := sorted(self._run.snapshot.queues):
                limit = max(event.high, sum(n.gpus for n in self._run.case.nodes if n.pool == "training"))
                self._run.send(ChangeQueue(JobQueue(_pick(queues, event), min(event.low, limit), limit)))
                return True
            case CaseEventKind.DELETE_QUEUE if queues := sorted(self._run.snapshot.queues):
                self._run.send(DeleteQueue(_pick(queues, event)))
                return True
        return False

    def _list_absent_nodes(self) -> list[Node]:
        case, known = self._run.case, self._run.snapshot.nodes
        return [node for node in (*case.nodes, *case.spares) if node.name not in known]

    def _remove_node(self, event: CaseEvent, name: str) -> bool:
        """Remove the node at once, which is refused while it is in use, or drain it before. It comes back later."""
        run = self._run
        node = next(each for each in (*run.case.nodes, *run.case.spares) if each.name == name)
        if event.low % 2:
            run.send(CordonNode(name, drain=True))
            run.at(run.world.now_s + event.amount / 2.0, lambda: run.send(RemoveNode(name)))
        else:
            run.send(RemoveNode(name))

        def restore() -> None:
            run.send(AddNode(node))
            run.send(UncordonNode(name))

        run.at(min(run.world.now_s + event.amount, run.case.faults_end_s), restore)
        return True

    def _command_owner(self, event: CaseEvent, job_id: str) -> bool:
        run = self._run
        match event.kind:
            case CaseEventKind.CANCEL:
                run.send(CancelJob(job_id))
            case CaseEventKind.SCALE:
                low = fit_gpus(run.snapshot.jobs[job_id].spec, run.case.nodes, event.low)
                run.send(ScaleJob(job_id, low, max(low, event.high)))
            case CaseEventKind.CHANGE:
                run.send(ChangeJob(job_id, queue=_pick((*QUEUES, "default", "new"), event), priority=event.low % 6))
            case CaseEventKind.CHECKPOINT:
                run.send(CheckpointJob(job_id))
            case CaseEventKind.SUSPEND:
                return self._send_and_undo(event, SuspendJob(job_id), ResumeJob(job_id))
            case _:
                return False
        return True

    def _send_and_undo(self, event: CaseEvent, do: CommandBody, undo: CommandBody) -> bool:
        run = self._run
        run.send(do)
        run.at(min(run.world.now_s + event.amount, run.case.faults_end_s), lambda: run.send(undo))
        return True


def _pick(among: Sequence[T], event: CaseEvent) -> T:
    return among[int(event.pick * len(among))]
