"""Changes of allocation spans by one tick, written in the commit of the tick.

The held GPUs of each node are compared before and after the tick, so a job without a change costs nothing. Times are
those at which the job's account was settled. Therefore the spans of a job add up to the GPU-seconds of its account.
"""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.domain.allocation_span import AllocationSpan, SpanEnd, SpanEnding
from scheduler.domain.fleet import LoanState, NodeState, PoolKind
from scheduler.domain.job import Job
from scheduler.domain.job_state import NO_ALLOCATION, Allocation, JobState
from scheduler.domain.snapshot import Snapshot

_END_BY_STATE = {
    JobState.SUCCEEDED: SpanEnd.SUCCEEDED,
    JobState.FAILED: SpanEnd.FAILED,
    JobState.CANCELLED: SpanEnd.CANCELLED,
}
_END_OF_LEAVING = {JobState.PREEMPTED: SpanEnd.PREEMPTED, JobState.SUSPENDED: SpanEnd.SUSPENDED}
_RETRY_STATES = frozenset({JobState.QUEUED, JobState.PLANNING})


@dataclass(frozen=True, slots=True)
class SpanChanges:
    """Spans that ended, and those that began, perhaps of the same job on the same node."""

    ended: tuple[SpanEnding, ...] = ()
    begun: tuple[AllocationSpan, ...] = ()


def compute_span_changes(previous: Snapshot, snapshot: Snapshot) -> SpanChanges:
    """Return the spans that ended and began since `previous`. Call before ended jobs are archived."""
    if previous.jobs is snapshot.jobs:
        return SpanChanges()
    ended, begun = list[SpanEnding](), list[AllocationSpan]()
    for job_id, job in snapshot.jobs.items():
        before = previous.jobs.get(job_id)
        allocation = NO_ALLOCATION if before is None else before.allocation
        if allocation is job.allocation:
            continue
        at_s = job.account.settled_at_s
        for node in _find_ended_nodes(allocation, job.allocation):
            assert before is not None, "a job without a past holds no GPUs"
            ended.append(SpanEnding(job_id, node, at_s, _find_end(previous, snapshot, before, job, node)))
        begun += (_begin_span(snapshot, job, node, at_s) for node in _find_begun_nodes(allocation, job.allocation))
    return SpanChanges(tuple(ended), tuple(begun))


def _find_ended_nodes(before: Allocation, after: Allocation) -> list[str]:
    held = after.held
    return [node for node, gpus in before.held.items() if gpus != held.get(node) or _is_renewed(before, after, node)]


def _find_begun_nodes(before: Allocation, after: Allocation) -> list[str]:
    held = before.held
    return [node for node, gpus in after.held.items() if gpus != held.get(node) or _is_renewed(before, after, node)]


def _is_renewed(before: Allocation, after: Allocation, node: str) -> bool:
    """Tell whether a new generation runs on the node. A node that is only released keeps its span."""
    return after.generation != before.generation and node in after.target


def _begin_span(snapshot: Snapshot, job: Job, node_name: str, at_s: float) -> AllocationSpan:
    node, spec = snapshot.nodes[node_name], job.spec
    return AllocationSpan(
        job_id=job.id,
        name=spec.name,
        queue=spec.queue,
        owner=job.owner,
        owner_id=job.owner_key,
        generation=job.allocation.generation,
        node=node.name,
        pool=node.pool,
        gpu=node.gpu,
        gpus=job.allocation.held[node_name],
        is_lent=snapshot.pools[node.pool].kind is PoolKind.INFERENCE,
        begin_s=at_s,
        model=spec.model_label,
    )


def _find_end(previous: Snapshot, snapshot: Snapshot, before: Job, after: Job, node_name: str) -> SpanEnd:
    """Return why the job no longer holds the same GPUs of the node: its own end first, then what the node did."""
    if end := _END_BY_STATE.get(after.state):
        return end
    has_failed = after.account.failures > before.account.failures
    if has_failed or (before.is_placed and after.state in _RETRY_STATES):
        return SpanEnd.FAILED
    node = snapshot.nodes.get(node_name)
    if node is None or node.state is NodeState.DOWN:
        return SpanEnd.NODE_DOWN
    if node_name not in after.allocation.target and _is_recalled(previous, snapshot, node_name):
        return SpanEnd.RECALLED
    return _END_OF_LEAVING.get(after.state) or _END_OF_LEAVING.get(before.state) or SpanEnd.RESIZED


def _is_recalled(previous: Snapshot, snapshot: Snapshot, node: str) -> bool:
    """Tell whether the node's loan was recalled. The tick that frees the node may also end the loan."""
    loans = (previous.loans.get(node), snapshot.loans.get(node))
    return any(loan is not None and loan.state is LoanState.RECALLED for loan in loans)
