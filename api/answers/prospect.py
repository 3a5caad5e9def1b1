"""Why a job is where it is, and what would become of one: explanations and dry runs as answers."""

from __future__ import annotations

from typing_extensions import TypedDict

from api.answers.job import JobView
from api.answers.page import AtSeconds
from api.answers.plan import PlanView
from api.answers.record import ReasonView, reason_view
from scheduler.core.explain import Explanation
from scheduler.domain.decision import Decision, subject
from scheduler.domain.job_state import JobState


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


class DryRunView(TypedDict):
    """`state` is the one that the coming tick would leave the job in. `others`: what it would decide beside it."""

    state: JobState
    job: JobView | None
    plan: PlanView | None
    reason: ReasonView | None
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
