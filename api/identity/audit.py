"""Audit log entries: who changed what, and which changes were forbidden.

Each accepted change has one entry. Endpoints build it with `new_audit_entry` or `command_audit_entry`, and the store
writes it in the transaction of the change. For an endpoint that builds none, the middleware writes a plain entry before
the response (`record_unaudited_change`). Reports of workers and agents are not audited.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastapi import Request

from api.identity.principals import WORKER, Principal
from scheduler.documents.job import to_job_document
from scheduler.domain.codec import encode
from scheduler.domain.commands import (
    AddNode,
    CancelJob,
    ChangeJob,
    ChangeNode,
    ChangeQueue,
    CheckpointJob,
    Command,
    CommandBody,
    CordonNode,
    CreatePool,
    CreateQueue,
    DeleteGpuProfile,
    DeletePool,
    DeleteQueue,
    DeleteSecret,
    RemoveNode,
    ReportDemand,
    ReportDemandHistory,
    ResumeJob,
    ScaleJob,
    SetDemandSource,
    SetGpuProfile,
    SetLendingPolicy,
    SetPoolNetwork,
    SetSecret,
    SetServedModels,
    SubmitJob,
    SuspendJob,
    UncordonNode,
    VetoLoan,
)
from scheduler.domain.fleet import LoanState
from scheduler.domain.snapshot import Snapshot
from scheduler.store.api_protocol import AuditEntry
from scheduler.telemetry.logs import REQUEST_ID

if TYPE_CHECKING:
    from api.identity.authorization import RouteRule

_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_FORBIDDEN = 403
_FLEET = "fleet"


@dataclass(slots=True)
class RequestAudit:
    """Whether the endpoint of a request writes the audit entries of its changes itself."""

    is_handled: bool = False


REQUEST_AUDIT: ContextVar[RequestAudit | None] = ContextVar("REQUEST_AUDIT", default=None)
"""The record of the current request. The threads of a request share it with the middleware."""


def new_audit_entry(
    principal: Principal,
    now_s: float,
    action: str,
    subject: str,
    *,
    before: Mapping[str, Any] | None = None,
    after: Mapping[str, Any] | None = None,
) -> AuditEntry:
    """Return the entry of an accepted change, for the store to write with the change."""
    declare_audited()
    fields = (action, subject, before, after, REQUEST_ID.get())
    return AuditEntry(now_s, principal.name, principal.token_id, *fields, actor_id=principal.subject)


def declare_audited() -> None:
    """Declare that the endpoint writes the entries of the request itself: none if the request changes nothing."""
    request_audit = REQUEST_AUDIT.get()
    if request_audit is not None:
        request_audit.is_handled = True


def command_audit_entry(command: Command, principal: Principal, before: Snapshot, after: Snapshot) -> AuditEntry:
    """Return the entry of a command, with the values of changed fields before and after."""
    declare_audited()
    subject = command_subject(command.body)
    before_fields, after_fields = (
        _list_audited_fields(command.body, subject, snapshot) for snapshot in (before, after)
    )
    if before_fields is not None and after_fields is not None:
        changed = {name for name in before_fields if before_fields[name] != after_fields[name]}
        before_fields, after_fields = (
            {name: value[name] for name in sorted(changed)} for value in (before_fields, after_fields)
        )
    return AuditEntry(
        command.at_s,
        principal.name,
        principal.token_id,
        type(command.body).__name__,
        subject,
        before_fields,
        after_fields,
        REQUEST_ID.get(),
        actor_id=principal.subject,
    )


def command_subject(body: CommandBody) -> str:
    """Return the job, pool, node, queue, loan or GPU model that a command is about; "fleet" for fleet-wide switches."""
    match body:
        case SubmitJob() | CancelJob() | SuspendJob() | ResumeJob() | ScaleJob() | ChangeJob() | CheckpointJob():
            return body.job_id
        case CreatePool(pool):
            return pool.name
        case CreateQueue(queue) | ChangeQueue(queue):
            return queue.name
        case AddNode(node):
            return node.name
        case SetLendingPolicy() | SetPoolNetwork() | SetDemandSource() | SetServedModels():
            return body.pool
        case ReportDemand() | ReportDemandHistory():
            return body.pool
        case SetSecret() | DeleteSecret() | SetGpuProfile() | DeleteGpuProfile():
            return body.name
        case VetoLoan():
            return body.loan_id
        case DeletePool() | DeleteQueue() | RemoveNode() | CordonNode() | UncordonNode() | ChangeNode():
            return body.name
        case _:
            return _FLEET


def record_forbidden_request(request: Request, status: int) -> None:
    """Log a change that an authenticated caller requested and was denied. Other failures are not logged."""
    principal = getattr(request.state, "principal", WORKER)
    if status != _FORBIDDEN or request.method in _SAFE_METHODS or principal is WORKER:
        return
    service = request.app.state.service
    service.store.audit_log.append(
        AuditEntry(
            service.clock.now_s(),
            principal.name,
            principal.token_id,
            f"{request.method} {request.url.path[:200]}",
            next(iter(request.path_params.values()), "") if request.path_params else "",
            None,
            None,
            REQUEST_ID.get(),
            outcome="forbidden",
            actor_id=principal.subject,
        )
    )


def lacks_audit_entry(method: str, rule: RouteRule) -> bool:
    """Return whether an accepted request of a user is a change whose endpoint has built no entry. Never blocks."""
    request_audit = REQUEST_AUDIT.get()
    if method in _SAFE_METHODS or not rule.changes_state or request_audit is None:
        return False
    return not request_audit.is_handled


def record_unaudited_change(request: Request) -> None:
    """Write the entry of an accepted change whose endpoint has built none.

    Raises:
        UnavailableError: the database does not respond.
    """
    service, endpoint = request.app.state.service, request.scope["endpoint"].__name__
    action = "".join(word.capitalize() for word in endpoint.split("_"))
    subject = next(reversed(request.path_params.values()), "") if request.path_params else ""
    entry = new_audit_entry(request.state.principal, service.clock.now_s(), action, subject)
    service.store.audit_log.append(entry)


def _list_audited_fields(body: CommandBody, subject: str, snapshot: Snapshot) -> Mapping[str, Any] | None:
    match body:
        case SubmitJob() | CancelJob() | SuspendJob() | ResumeJob() | ScaleJob() | ChangeJob() | CheckpointJob():
            job = snapshot.jobs.get(subject)
            return None if job is None else {"intent": job.intent.value, **to_job_document(job.spec)}
        case (
            CreatePool() | DeletePool() | SetLendingPolicy() | SetPoolNetwork() | SetDemandSource() | SetServedModels()
        ):
            record: Any = snapshot.pools.get(subject)
        case SetGpuProfile() | DeleteGpuProfile():
            record = snapshot.gpu_profiles.get(subject)
        case CreateQueue() | ChangeQueue() | DeleteQueue():
            record = snapshot.queues.get(subject)
        case SetSecret() | DeleteSecret():
            return {"queue": body.queue}
        case AddNode() | RemoveNode() | CordonNode() | UncordonNode() | ChangeNode():
            record = snapshot.nodes.get(subject)
        case ReportDemand() | ReportDemandHistory():
            record = snapshot.demand.get(subject)
        case VetoLoan():
            return _list_veto_fields(body, snapshot)
        case _:
            record = snapshot.switches
    return None if record is None else encode(record)


def _list_veto_fields(veto: VetoLoan, snapshot: Snapshot) -> Mapping[str, Any] | None:
    loan = next((loan for loan in snapshot.loans.values() if loan.id == veto.loan_id), None)
    if loan is None:
        return None
    is_vetoed = loan.state is LoanState.VETOED
    given = {"reason": veto.reason, "webhook": veto.webhook_id} if is_vetoed else {"reason": "", "webhook": ""}
    return {"state": loan.state.value, **given}
