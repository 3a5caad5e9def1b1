"""Receipts of recalls, kept up to date by each tick from its observation and its decisions.

A tick opens one receipt per recall that it decides, and adds to open receipts what it observed. Nothing here influences
a decision. A node has at most one open receipt.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from scheduler.domain import gpu_sets
from scheduler.domain.decisions import (
    CancelRecall,
    Decision,
    LendNode,
    NodeDecision,
    PreemptJob,
    RecallNode,
    RejectJob,
    ResizeJob,
    ReturnNode,
    StartJob,
)
from scheduler.domain.events import Event, EventCode
from scheduler.domain.fleet import LoanState
from scheduler.domain.gpu_sets import NO_GPUS, Gpus
from scheduler.domain.observation import Observation, RunPhase
from scheduler.domain.recall_receipts import SERVING_WAIT_S, JobExit, LeavingJob, RecallOutcome, RecallReceipt
from scheduler.domain.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class RecallUpdate:
    """Receipts after a tick: the open ones by node, those whose outcome became known, and the complete ones."""

    open: Mapping[str, RecallReceipt]
    settled: tuple[RecallReceipt, ...] = ()
    closed: tuple[RecallReceipt, ...] = ()


def update_receipts(
    before: Snapshot,
    observation: Observation,
    observed: Snapshot,
    events: Iterable[Event],
    decisions: Iterable[Decision],
) -> RecallUpdate:
    """Return the receipts after a tick.

    Args:
        before: the snapshot that the tick loaded, with the open receipts.
        observed: the snapshot with the observation and the commands of the tick applied, before its decisions.
        events: events of the observation, from which lost work is read.
        decisions: the decisions of the tick that were applied, in order.
    """
    decided = tuple(decisions)
    if not before.recalls and not any(isinstance(each, RecallNode) for each in decided):
        return RecallUpdate(before.recalls)
    tracker = _RecallTracker(before, observed)
    tracker.observe(observation, events)
    for decision in decided:
        tracker.apply(decision)
    return tracker.finish()


class _RecallTracker:
    """The receipts of one tick while its observation and then its decisions are added."""

    def __init__(self, before: Snapshot, observed: Snapshot) -> None:
        self._before = before.recalls
        self._observed = observed
        self._now_s = observed.now_s
        self._generation = before.generation + 1
        self._open = dict(before.recalls)
        self._closed: list[RecallReceipt] = []
        self._targets: dict[str, Gpus] = {}  # of jobs with a decision in this tick

    def observe(self, observation: Observation, events: Iterable[Event]) -> None:
        is_unsettled = any(receipt.outcome is None for receipt in self._open.values())
        runs = observation.runs if is_unsettled else ()
        leaving = {run.job_id for run in runs if run.phase is RunPhase.LEAVING}
        losses = self._share_losses(events)
        for node, receipt in tuple(self._open.items()):
            if receipt.outcome is not None:
                self._await_serving(receipt)
                continue
            jobs = tuple(self._observe_job(receipt, job, observation, leaving) for job in receipt.jobs)
            jobs = tuple(_add_losses(job, losses.get((node, job.job_id), ())) for job in jobs)
            is_freed = receipt.freed_at_s is None and node not in self._observed.index.holders
            freed_at_s = self._now_s if is_freed else receipt.freed_at_s
            if jobs != receipt.jobs or freed_at_s != receipt.freed_at_s:
                self._open[node] = replace(receipt, jobs=jobs, freed_at_s=freed_at_s)
            loan = self._observed.loans.get(node)
            if loan is None or loan.id != receipt.loan_id or loan.state is LoanState.LOST:
                self._close(self._open[node].settle(RecallOutcome.LOST, self._now_s))

    def apply(self, decision: Decision) -> None:
        """Add a decision that was applied."""
        match decision:
            case RecallNode():
                self._open[decision.node] = self._build_receipt(decision)
            case CancelRecall(node=node) if node in self._open:
                self._close(self._open[node].settle(RecallOutcome.CANCELLED, self._now_s))
            case ReturnNode(node=node) if node in self._open:
                self._open[node] = self._open[node].settle_return(self._now_s)
            case LendNode(node=node) if node in self._open:
                self._close(self._open[node])
        if not isinstance(decision, NodeDecision | RejectJob):
            target = decision.gpus if isinstance(decision, StartJob | ResizeJob) else NO_GPUS
            self._decide_exits(decision.job_id, target, _classify_exit(decision, self._get_target(decision.job_id)))
            self._targets[decision.job_id] = target

    def finish(self) -> RecallUpdate:
        unchanged = len(self._open) == len(self._before) and all(
            self._before.get(node) is receipt for node, receipt in self._open.items()
        )
        known = {receipt.id for receipt in self._before.values() if receipt.outcome is not None}
        current = (*self._closed, *self._open.values())
        settled = tuple(each for each in current if each.outcome is not None and each.id not in known)
        return RecallUpdate(self._before if unchanged else self._open, settled, tuple(self._closed))

    def _await_serving(self, receipt: RecallReceipt) -> None:
        """Close the receipt of a returned node once inference uses returned GPUs, or can no longer do so in time."""
        node = self._observed.nodes.get(receipt.node)
        assert receipt.settled_at_s is not None
        if node is not None and node.inference_gpus > node.gpus - receipt.gpus:
            self._close(receipt, serving_at_s=self._now_s)
        elif node is None or self._now_s - receipt.settled_at_s >= SERVING_WAIT_S:
            self._close(receipt)

    def _close(self, receipt: RecallReceipt, *, serving_at_s: float | None = None) -> None:
        del self._open[receipt.node]
        self._closed.append(receipt.close(self._now_s, serving_at_s=serving_at_s))

    def _build_receipt(self, decision: RecallNode) -> RecallReceipt:
        node, loan = self._observed.nodes[decision.node], self._observed.loans[decision.node]
        holders = self._observed.index.holders.get(node.name, {})
        jobs = tuple(self._list_job(job_id, node.name) for job_id in sorted(set(holders.values())))
        return RecallReceipt(
            id=f"{loan.id}-{self._generation}",
            loan_id=loan.id,
            node=node.name,
            pool=loan.pool,
            gpus=loan.count_gpus(node),
            code=decision.reason.code,
            detail=decision.reason.detail,
            asked_at_s=self._now_s,
            return_by_s=decision.return_by_s,
            jobs=jobs,
            choice=decision.choice,
            freed_at_s=None if jobs else self._now_s,
        )

    def _list_job(self, job_id: str, node: str) -> LeavingJob:
        job = self._observed.jobs[job_id]
        listed = LeavingJob(
            job_id,
            job.owner,
            job.owner_key,
            job.spec.queue,
            gpus=len(job.allocation.held[node]),
            checkpoint_steps=job.progress.checkpoint_steps,
        )
        if node in self._get_target(job_id):
            return listed
        order = self._generation if job_id in self._targets else job.allocation.asked_at_generation
        return replace(listed, exit=JobExit.LEAVING, decided_at_s=self._now_s, order_generation=order)

    def _get_target(self, job_id: str) -> Gpus:
        """Return the GPUs that the job is to hold after the decisions so far."""
        job = self._observed.jobs.get(job_id)
        return self._targets.get(job_id, NO_GPUS if job is None else job.allocation.target)

    def _decide_exits(self, job_id: str, target: Gpus, job_exit: JobExit) -> None:
        for node, receipt in self._open.items():
            if receipt.outcome is None and node not in target:
                jobs = tuple(
                    replace(job, exit=job_exit, decided_at_s=self._now_s, order_generation=self._generation)
                    if job.job_id == job_id and job.exit is None and job.left_at_s is None
                    else job
                    for job in receipt.jobs
                )
                if jobs != receipt.jobs:
                    self._open[node] = replace(receipt, jobs=jobs)

    def _observe_job(
        self, receipt: RecallReceipt, listed: LeavingJob, observation: Observation, leaving: set[str]
    ) -> LeavingJob:
        if listed.left_at_s is not None:
            return listed
        job, node = self._observed.jobs.get(listed.job_id), receipt.node
        if listed.exit is None and (job is None or node not in job.allocation.target):
            listed = replace(listed, exit=JobExit.ENDED, decided_at_s=self._now_s)
        if listed.order_generation and listed.acknowledged_at_s is None:
            is_in_effect = observation.converged_generation >= listed.order_generation
            if is_in_effect or listed.job_id in leaving:
                listed = replace(listed, acknowledged_at_s=self._now_s)
        if job is not None and not listed.saved and job.progress.checkpoint_steps > listed.checkpoint_steps:
            listed = replace(listed, saved=True)
        if job is None or node not in job.allocation.held:
            listed = replace(listed, left_at_s=self._now_s)
        return listed

    def _share_losses(self, events: Iterable[Event]) -> Mapping[tuple[str, str], list[Mapping[str, float]]]:
        """Return, by node and job, the numbers of lost work, shared between the nodes by the job's GPUs there."""
        shares: defaultdict[tuple[str, str], list[Mapping[str, float]]] = defaultdict(list)
        for event in events if self._open else ():
            if event.code is not EventCode.JOB_LOST_WORK:
                continue
            gpus = {
                node: job.gpus
                for node, receipt in self._open.items()
                for job in receipt.jobs
                if receipt.outcome is None and job.job_id == event.subject and job.left_at_s is None
            }
            for node, count in gpus.items():
                share = count / sum(gpus.values())
                shares[node, event.subject].append({name: share * number for name, number in event.numbers.items()})
        return shares


def _classify_exit(decision: Decision, held: Gpus) -> JobExit:
    """Return how the decision makes a job leave a node, given the GPUs that it was to hold before."""
    if isinstance(decision, PreemptJob):
        return JobExit.PREEMPTED
    if isinstance(decision, ResizeJob):
        return JobExit.SHRANK if gpu_sets.count(decision.gpus) < gpu_sets.count(held) else JobExit.MOVED
    return JobExit.ENDED


def _add_losses(job: LeavingJob, losses: Sequence[Mapping[str, float]]) -> LeavingJob:
    """Add work that the job lost by leaving. Work of a run that ended by itself is not lost by the recall."""
    if not losses or job.exit in (None, JobExit.ENDED):
        return job
    lost_steps = sum(loss.get("steps", 0.0) for loss in losses)
    lost_gpu_s = sum(loss.get("gpu_s", 0.0) for loss in losses)
    return replace(job, lost_steps=job.lost_steps + lost_steps, lost_gpu_s=job.lost_gpu_s + lost_gpu_s)
