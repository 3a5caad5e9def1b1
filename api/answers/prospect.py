"""Why a job is where it is, and what would become of one: explanations and dry runs as answers."""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import TypedDict

from api.answers.job import JobView, job_view
from api.answers.page import AtSeconds, GpusByNode, encode_gpus
from api.answers.plan import PlanView, plan_view
from api.answers.record import ReasonView, reason_view
from api.rehearsal import Rehearsal
from scheduler.core.explain import Explanation, explain
from scheduler.domain import gpus as gpu_sets
from scheduler.domain.decision import Decision, LendNode, PreemptJob, ResizeJob, subject
from scheduler.domain.job_state import JobState
from scheduler.domain.snapshot import Snapshot


class ChoiceView(TypedDict):
    """A decision of the coming tick. `subject`: the job id or node that it is about."""

    kind: str
    subject: str
    reason: ReasonView


class ExplanationView(TypedDict):
    """`reason` is null for a job that has what it wants. `position`: its place in the queue, from 1. `holders`: other
    jobs and the GPUs they hold that it could use. `expected_start_s`: null where nobody can tell. `unblocks`: what
    would start it at once. `next`: what the coming tick would do with it."""

    job_id: str
    state: JobState
    summary: str
    reason: ReasonView | None
    position: int | None
    needed_gpus: int
    held_gpus: int
    free_gpus: int
    holders: dict[str, int]
    expected_start_s: AtSeconds | None
    unblocks: str
    next: ChoiceView | None


class PreemptedView(TypedDict):
    """A job that would give up all its `gpus`, by `leave_by_s`."""

    job_id: str
    gpus: int
    leave_by_s: AtSeconds
    reason: ReasonView


class ResizedView(TypedDict):
    """A job that would go from `from_gpus` to `to_gpus`, by `leave_by_s` where it shrinks."""

    job_id: str
    from_gpus: int
    to_gpus: int
    leave_by_s: AtSeconds
    reason: ReasonView


class LentView(TypedDict):
    """An inference node that would be offered to training."""

    node: str
    pool: str
    reason: ReasonView


class DryRunView(TypedDict):
    """What the coming tick would do because of the job: decisions that it would take without it are left out.

    `state` is the one that the job would be left in: `planning` while its curve is not solved, before which nothing
    else can be told. `placement` and `plan` are those that it would start on. `expected_start_s`: now, or as
    explained; null where nobody can tell. `position`: its place in the queue, from 1. `others`: all decisions about
    others.
    """

    state: JobState
    job: JobView | None
    placement: GpusByNode | None
    plan: PlanView | None
    plan_summary: str | None
    reason: ReasonView | None
    position: int | None
    expected_start_s: AtSeconds | None
    preempted: list[PreemptedView]
    resized: list[ResizedView]
    lent: list[LentView]
    explanation: ExplanationView | None
    others: list[ChoiceView]


def choice_view(decision: Decision) -> ChoiceView:
    kind = type(decision).__name__
    return {"kind": kind, "subject": subject(decision), "reason": reason_view(decision.reason)}


def explanation_view(told: Explanation, coming: Decision | None) -> ExplanationView:
    return {
        "job_id": told.job_id,
        "state": told.state,
        "summary": told.summary,
        "reason": reason_view(told.reason) if told.reason else None,
        "position": told.position,
        "needed_gpus": told.needed_gpus,
        "held_gpus": told.held_gpus,
        "free_gpus": told.free_gpus,
        "holders": dict(told.holders),
        "expected_start_s": told.expected_start_s,
        "unblocks": told.unblocks,
        "next": choice_view(coming) if coming else None,
    }


def dry_run_view(job_id: str, before: Snapshot, coming: Rehearsal, because: Sequence[Decision]) -> DryRunView:
    """`because`: what the tick would decide only because of the job, in order."""
    job, waiting = coming.snapshot.jobs.get(job_id), coming.report.waiting
    own = next((decision for decision in because if subject(decision) == job_id), None)
    others = [decision for decision in because if subject(decision) != job_id]
    reason = own.reason if own else waiting.get(job_id)
    told = explain(coming.snapshot, waiting, job_id) if job else None
    starts = job is not None and job.is_placed
    plan = job.allocation.plan if job else None
    return {
        "state": job.state if job else JobState.FAILED,
        "job": job_view(job, before.now_s) if job else None,
        "placement": encode_gpus(job.allocation.target) if job and starts else None,
        "plan": plan_view(plan) if plan else None,
        "plan_summary": plan.summary() if plan else None,
        "reason": reason_view(reason) if reason else None,
        "position": told.position if told else None,
        "expected_start_s": before.now_s if starts else told.expected_start_s if told else None,
        "preempted": [_preempted(one, before) for one in others if isinstance(one, PreemptJob)],
        "resized": [_resized(one, before) for one in others if isinstance(one, ResizeJob)],
        "lent": [_lent(one, before) for one in others if isinstance(one, LendNode)],
        "explanation": explanation_view(told, own) if told else None,
        "others": [choice_view(decision) for decision in others],
    }


def _preempted(decision: PreemptJob, before: Snapshot) -> PreemptedView:
    gpus = before.jobs[decision.job_id].allocation.target_gpus
    reason = reason_view(decision.reason)
    return {"job_id": decision.job_id, "gpus": gpus, "leave_by_s": decision.leave_by_s, "reason": reason}


def _resized(decision: ResizeJob, before: Snapshot) -> ResizedView:
    return {
        "job_id": decision.job_id,
        "from_gpus": before.jobs[decision.job_id].allocation.target_gpus,
        "to_gpus": gpu_sets.count(decision.gpus),
        "leave_by_s": decision.leave_by_s,
        "reason": reason_view(decision.reason),
    }


def _lent(decision: LendNode, before: Snapshot) -> LentView:
    return {
        "node": decision.node,
        "pool": before.nodes[decision.node].pool,
        "reason": reason_view(decision.reason),
    }
