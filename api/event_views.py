"""JSON views of events, decisions, reasons and snapshots."""

from __future__ import annotations

from typing import Any, NotRequired

from typing_extensions import TypedDict

from api.http.paging import AtSeconds, GpusByNode
from api.plans import PlanView
from scheduler.domain.codec import encode
from scheduler.domain.decisions import Reason, ReasonCode, decision_subject
from scheduler.domain.events import EventCode
from scheduler.domain.snapshot import Snapshot
from scheduler.store.protocol import StoredDecision, StoredEvent


class ReasonView(TypedDict):
    """Why something was decided or waits. `detail` is a sentence; `numbers` holds its figures."""

    code: ReasonCode
    detail: str
    numbers: dict[str, float]


class EventView(TypedDict):
    """An event. `number` ascends and never repeats. `subject` is a job id, node, pool, queue or loan. `cause` is one
    word: the cause of lost work, the code of a decision's reason, or a job's new state."""

    number: int
    generation: int
    at_s: AtSeconds
    code: EventCode
    subject: str
    message: str
    numbers: dict[str, float]
    cause: str


class DecisionBodyView(TypedDict):
    """A decision. The decision's `kind` determines which fields are present."""

    reason: ReasonView
    job_id: NotRequired[str]
    node: NotRequired[str]
    gpus: NotRequired[GpusByNode]
    plan: NotRequired[PlanView]
    seats: NotRequired[list[tuple[str, int]]]
    leave_by_s: NotRequired[AtSeconds]
    return_by_s: NotRequired[AtSeconds]


class DecisionView(TypedDict):
    """A stored decision. `subject` is the job id or node that it is about."""

    number: int
    generation: int
    at_s: AtSeconds
    kind: str
    subject: str
    decision: DecisionBodyView


class SnapshotView(TypedDict):
    """The whole live state in the domain's own encoding, as `ebbtide replay` reads it."""

    generation: int
    now_s: AtSeconds
    pools: dict[str, dict[str, Any]]
    nodes: dict[str, dict[str, Any]]
    jobs: dict[str, dict[str, Any]]
    loans: dict[str, dict[str, Any]]
    demand: dict[str, dict[str, Any]]
    forecasts: dict[str, dict[str, Any]]
    curves: dict[str, dict[str, Any]]
    switches: dict[str, bool]
    full_pass_at_s: float | str
    queues: dict[str, dict[str, Any]]
    solver: str


def reason_view(reason: Reason) -> ReasonView:
    return {"code": reason.code, "detail": reason.detail, "numbers": dict(reason.numbers)}


def event_view(stored: StoredEvent) -> EventView:
    event = stored.event
    return {
        "number": stored.number,
        "generation": stored.generation,
        "at_s": event.at_s,
        "code": event.code,
        "subject": event.subject,
        "message": event.message,
        "numbers": dict(event.numbers),
        "cause": event.cause,
    }


def decision_view(stored: StoredDecision) -> DecisionView:
    return {
        "number": stored.number,
        "generation": stored.generation,
        "at_s": stored.at_s,
        "kind": type(stored.decision).__name__,
        "subject": decision_subject(stored.decision),
        "decision": encode(stored.decision),
    }


def snapshot_view(snapshot: Snapshot) -> SnapshotView:
    view: SnapshotView = encode(snapshot)
    return view
