"""Why a job is in its state and what the next tick would do: dry runs, explanations and their JSON views."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from api.event_views import ReasonView, reason_view
from api.http.paging import GpusByNode, JobId, encode_gpus
from api.jobs import FailureView, JobView, failure_view, job_view
from api.plans import PlanView, plan_view
from scheduler.domain import gpu_sets
from scheduler.domain.commands import Command, SubmitJob
from scheduler.domain.decisions import Decision, LendNode, PreemptJob, Reason, ResizeJob, decision_subject
from scheduler.domain.job_spec import JobSpec
from scheduler.domain.job_state import JobState
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.tick_report import TickReport
from scheduler.executors.executor import RecordingExecutor
from scheduler.runtime.clock import ManualClock
from scheduler.runtime.reconciler import tick
from scheduler.scheduling.explanation import Explanation, explain
from scheduler.scheduling.policy_sets import PolicySet
from scheduler.scheduling.queue_outlook import QueueOutlook
from scheduler.store.memory_store import MemoryStore
from scheduler.store.protocol import UnavailableError


@dataclass(frozen=True, slots=True)
class DryRun:
    """Decisions of a simulated next tick, and the state after it."""

    report: TickReport
    snapshot: Snapshot


def dry_run_tick(snapshot: Snapshot, policies: PolicySet, *commands: Command) -> DryRun:
    """Run one real tick on a copy of the state, at `snapshot.now_s` with `commands` in the inbox.

    The executor observes nothing new, so transitions in progress stay in progress. What a cluster has yet to say about
    the pods of a job in `commands` counts as said, and favourable (see `list_unchecked`).
    """
    store = MemoryStore(snapshot)
    _send_commands(store, commands)
    lease = store.acquire_lease("dry-run", now_s=snapshot.now_s, ttl_s=60.0)
    assert lease is not None, "no other process uses this store"
    clock = ManualClock(snapshot.now_s)
    submitted = [command.body.job_id for command in commands if isinstance(command.body, SubmitJob)]
    executor = RecordingExecutor(accepted=submitted)
    report = tick(store, executor, clock, policies, epoch=lease.epoch, records_history=False)
    return DryRun(report, store.load().snapshot)


def list_unchecked(spec: JobSpec, snapshot: Snapshot) -> list[str]:
    """Return one warning for each part of a job that only its cluster can check, once it is submitted."""
    if not snapshot.index.has_capacities:
        return []
    warnings = []
    if claims := spec.pod_requirements.claims:
        warnings.append(
            f"Volume claims are not checked here: {', '.join(claims)}. They may be missing or limit the nodes."
        )
    if spec.template_json:
        warnings.append("The Kubernetes API server has not checked `template`. It does so after the submission.")
    return warnings


def _send_commands(store: MemoryStore, commands: Iterable[Command]) -> None:
    for command in commands:
        store.send(command)


CPU_SHARE_MAX = 0.05
"""Maximum share of one core that dry runs for polling clients may use."""
WAIT_S_MAX = 0.25
"""Longest time for which a request waits for reasons of the newest state, if slightly older ones are known."""
_STOP_CHECK_S = 0.5


class PendingReasons:
    """Why jobs wait, by job id, as the next tick would report it in the state `snapshot`."""

    def __init__(self, snapshot: Snapshot | None = None, reasons: Mapping[str, Reason] | None = None) -> None:
        self.snapshot = snapshot or Snapshot()
        self.reasons = reasons or {}
        self._outlook = QueueOutlook(self.snapshot, self.reasons)
        self._explanations: dict[str, Explanation] = {}

    def explain(self, job_id: str) -> Explanation:
        """Return the explanation of a job. Each is computed once. Raises KeyError for an unknown job."""
        if job_id not in self._explanations:
            self._explanations[job_id] = explain(self.snapshot, self.reasons, job_id, self._outlook)
        return self._explanations[job_id]


class PendingReasonCache:
    """Cache of the dry run that all clients share when they poll for the reasons of pending jobs. Thread-safe.

    A service calls `run` in a thread. Then requests do not wait for dry runs that take long: they get slightly older
    reasons, with the state to which these belong. Without that thread, a request for a new state runs them itself.
    """

    def __init__(self, policies: PolicySet, *, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._policies = policies
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._latest = PendingReasons()
        self._next_refresh_at_s = 0.0
        self._has_worker = False
        self._wanted: Snapshot | None = None
        self._changed = threading.Condition()

    def read(self, committed: Snapshot) -> PendingReasons:
        """Return the reasons in the newest committed state.

        Returns slightly older ones while they are computed, or if dry runs would use more than CPU_SHARE_MAX.
        """
        if self._latest.snapshot.generation == committed.generation:
            return self._latest
        if self._has_worker and self._latest.snapshot.generation:
            self._ask_worker(committed)
        else:
            self._refresh(committed, waits=not self._latest.snapshot.generation)
        return self._latest

    def run(self, load: Callable[[], Snapshot], stop: threading.Event) -> None:
        """Compute reasons until `stop` is set: those of the present state at once, so that the first request finds
        them, and later those of each state that a request asks for."""
        self._has_worker = True
        try:
            with suppress(UnavailableError):
                self._refresh(load(), waits=True)
            while not stop.is_set():
                self._work()
        finally:
            self._has_worker = False

    def _ask_worker(self, committed: Snapshot) -> None:
        """Let the worker compute the reasons of a state, and wait a moment for them."""
        with self._changed:
            self._wanted = committed
            self._changed.notify_all()
            if self._clock_s() >= self._next_refresh_at_s:
                wanted = committed.generation
                self._changed.wait_for(lambda: self._latest.snapshot.generation >= wanted, timeout=WAIT_S_MAX)

    def _work(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._wanted is not None, timeout=_STOP_CHECK_S)
            wanted, self._wanted = self._wanted, None
        if wanted is not None:
            self._refresh(wanted, waits=True)
            with self._changed:
                self._changed.notify_all()

    def _refresh(self, committed: Snapshot, *, waits: bool) -> None:
        """Compute the reasons of a state if that is due. `waits`: wait for another thread that does the same."""
        if not self._lock.acquire(blocking=waits):
            return
        try:
            started_s = self._clock_s()
            if committed.generation != self._latest.snapshot.generation and started_s >= self._next_refresh_at_s:
                self._latest = PendingReasons(committed, dry_run_tick(committed, self._policies).report.waiting)
                ended_s = self._clock_s()
                self._next_refresh_at_s = ended_s + (ended_s - started_s) / CPU_SHARE_MAX
        finally:
            self._lock.release()


class PlannedDecisionView(TypedDict):
    """A decision of the next tick."""

    kind: Annotated[
        str, Field(description="Type of the decision, such as `StartJob`, `ResizeJob`, `PreemptJob` or `LendNode`.")
    ]
    subject: Annotated[str, Field(description="Id of the job, or name of the node, that the decision changes.")]
    reason: Annotated[ReasonView, Field(description="Why the tick would decide this.")]


class ExplanationView(TypedDict):
    """Why a job is in its state."""

    job_id: JobId
    state: Annotated[JobState, Field(description="Where the job is in its life cycle.")]
    summary: Annotated[str, Field(description="The explanation as one line of text, with numbers.")]
    reason: Annotated[ReasonView | None, Field(description="Why the job waits. Null: it does not wait.")]
    position: Annotated[int | None, Field(description="Place in the queue, from 1. Null: not in the queue.")]
    needed_gpus: Annotated[int, Field(description="Number of GPUs on which the job would start.")]
    held_gpus: Annotated[int, Field(description="Number of GPUs that the job has or still has to leave.")]
    free_gpus: Annotated[int, Field(description="Number of unused GPUs when it was the job's turn.")]
    holders: Annotated[
        dict[str, int], Field(description="Number of GPUs that this job could use, by id of the job that holds them.")
    ]
    expected_start_s: Annotated[
        float | None, Field(description="Estimated start, in seconds since 1970 (UTC). Null: unknown.")
    ]
    unblocks: Annotated[str, Field(description="What would let the job start, as text. Empty: it does not wait.")]
    failure: Annotated[FailureView | None, Field(description="The last run that failed. Null: none.")]
    next: Annotated[
        PlannedDecisionView | None, Field(description="What the next tick would do with the job. Null: nothing.")
    ]


class PreemptedJobView(TypedDict):
    """A job that would release all its GPUs."""

    job_id: JobId
    gpus: Annotated[int, Field(description="Number of GPUs that it would release.")]
    leave_by_s: Annotated[float, Field(description="Deadline for its workers to leave, in seconds since 1970 (UTC).")]
    reason: Annotated[ReasonView, Field(description="Why the tick would preempt it.")]


class ResizedJobView(TypedDict):
    """A job whose number of GPUs would change."""

    job_id: JobId
    from_gpus: Annotated[int, Field(description="Number of GPUs before the change.")]
    to_gpus: Annotated[int, Field(description="Number of GPUs after the change.")]
    leave_by_s: Annotated[
        float, Field(description="Deadline to leave the GPUs that it loses, in seconds since 1970 (UTC).")
    ]
    reason: Annotated[ReasonView, Field(description="Why the tick would resize it.")]


class LentNodeView(TypedDict):
    """An inference node that would be offered to training."""

    node: Annotated[str, Field(description="Name of the inference node.")]
    pool: Annotated[str, Field(description="Inference pool that owns it.")]
    reason: Annotated[ReasonView, Field(description="Why the tick would offer it.")]


class DryRunView(TypedDict):
    """Decisions that the next tick would make because of the job, without those that it would make anyway."""

    state: Annotated[
        JobState,
        Field(
            description=(
                "Life cycle state after the tick. While it is `planning`, the scaling curve is not solved "
                "and other fields are unknown."
            )
        ),
    ]
    job: Annotated[JobView | None, Field(description="The job after the tick. Null: it would be rejected.")]
    placement: Annotated[
        GpusByNode | None, Field(description="GPU indices by node on which the job would start. Null: it would wait.")
    ]
    plan: Annotated[PlanView | None, Field(description="Parallel plan of the job. Null: it would wait.")]
    plan_summary: Annotated[str | None, Field(description="The same plan as one line of text. Null: it would wait.")]
    reason: Annotated[ReasonView | None, Field(description="Why the job would start or wait. Null: unknown.")]
    warnings: NotRequired[
        Annotated[list[str], Field(description="What to correct in the document. Empty or absent: nothing.")]
    ]
    position: Annotated[int | None, Field(description="Place in the queue, from 1. Null: not in the queue.")]
    expected_start_s: Annotated[
        float | None,
        Field(
            description=(
                "Start in seconds since 1970 (UTC): now if the tick starts it, else an estimate. Null: unknown."
            )
        ),
    ]
    preempted: Annotated[list[PreemptedJobView], Field(description="Jobs that would release all their GPUs for it.")]
    resized: Annotated[list[ResizedJobView], Field(description="Jobs whose number of GPUs would change for it.")]
    lent: Annotated[list[LentNodeView], Field(description="Inference nodes that would be offered to training for it.")]
    explanation: Annotated[
        ExplanationView | None, Field(description="Why the job would be in its state. Null: it would be rejected.")
    ]
    others: Annotated[
        list[PlannedDecisionView],
        Field(description="All decisions about other jobs and nodes, including those listed above."),
    ]


def planned_decision_view(decision: Decision) -> PlannedDecisionView:
    kind = type(decision).__name__
    return {"kind": kind, "subject": decision_subject(decision), "reason": reason_view(decision.reason)}


def explanation_view(explanation: Explanation, next_decision: Decision | None) -> ExplanationView:
    return {
        "job_id": explanation.job_id,
        "state": explanation.state,
        "summary": explanation.summary,
        "reason": reason_view(explanation.reason) if explanation.reason else None,
        "position": explanation.position,
        "needed_gpus": explanation.needed_gpus,
        "held_gpus": explanation.held_gpus,
        "free_gpus": explanation.free_gpus,
        "holders": dict(explanation.holders),
        "expected_start_s": explanation.expected_start_s,
        "unblocks": explanation.unblocks,
        "failure": failure_view(explanation.failure),
        "next": planned_decision_view(next_decision) if next_decision else None,
    }


def dry_run_view(job_id: str, before: Snapshot, dry_run: DryRun, caused: Sequence[Decision]) -> DryRunView:
    """`caused`: the decisions that the tick would make only because of the job, in order."""
    job, waiting = dry_run.snapshot.jobs.get(job_id), dry_run.report.waiting
    own = next((decision for decision in caused if decision_subject(decision) == job_id), None)
    others = [decision for decision in caused if decision_subject(decision) != job_id]
    reason = own.reason if own else waiting.get(job_id)
    explanation = explain(dry_run.snapshot, waiting, job_id) if job else None
    starts = job is not None and job.is_placed
    plan = job.allocation.plan if job else None
    return {
        "state": job.state if job else JobState.FAILED,
        "job": job_view(job, before.now_s) if job else None,
        "placement": encode_gpus(job.allocation.target) if job and starts else None,
        "plan": plan_view(plan) if plan else None,
        "plan_summary": plan.summarize() if plan else None,
        "reason": reason_view(reason) if reason else None,
        "position": explanation.position if explanation else None,
        "expected_start_s": before.now_s if starts else explanation.expected_start_s if explanation else None,
        "preempted": [_preempted_job_view(one, before) for one in others if isinstance(one, PreemptJob)],
        "resized": [_resized_job_view(one, before) for one in others if isinstance(one, ResizeJob)],
        "lent": [_lent_node_view(one, before) for one in others if isinstance(one, LendNode)],
        "explanation": explanation_view(explanation, own) if explanation else None,
        "others": [planned_decision_view(decision) for decision in others],
    }


def _preempted_job_view(decision: PreemptJob, before: Snapshot) -> PreemptedJobView:
    gpus = before.jobs[decision.job_id].allocation.target_gpus
    reason = reason_view(decision.reason)
    return {"job_id": decision.job_id, "gpus": gpus, "leave_by_s": decision.leave_by_s, "reason": reason}


def _resized_job_view(decision: ResizeJob, before: Snapshot) -> ResizedJobView:
    return {
        "job_id": decision.job_id,
        "from_gpus": before.jobs[decision.job_id].allocation.target_gpus,
        "to_gpus": gpu_sets.count(decision.gpus),
        "leave_by_s": decision.leave_by_s,
        "reason": reason_view(decision.reason),
    }


def _lent_node_view(decision: LendNode, before: Snapshot) -> LentNodeView:
    return {
        "node": decision.node,
        "pool": before.nodes[decision.node].pool,
        "reason": reason_view(decision.reason),
    }
