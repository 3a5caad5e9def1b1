"""Audit log entries: who changed what, and which changes were forbidden.

Reports of workers and agents are not audited.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import Request

from api.identity.principals import WORKER, Principal
from scheduler.documents.job import to_job_document
from scheduler.domain.codec import encode
from scheduler.domain.commands import (
    AddNode,
    CancelJob,
    ChangeJob,
    ChangeQueue,
    CheckpointJob,
    Command,
    CommandBody,
    CordonNode,
    CreatePool,
    CreateQueue,
    DeletePool,
    DeleteQueue,
    RemoveNode,
    ReportDemand,
    ResumeJob,
    ScaleJob,
    SetLendingPolicy,
    SubmitJob,
    SuspendJob,
    UncordonNode,
)
from scheduler.domain.snapshot import Snapshot
from scheduler.store.api_protocol import AuditEntry
from scheduler.telemetry.logs import REQUEST_ID

_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_FORBIDDEN = 403
_FLEET = "fleet"


def command_audit_entry(command: Command, principal: Principal, before: Snapshot, after: Snapshot) -> AuditEntry:
    """Return the entry of a command, with the values of changed fields before and after."""
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
    """Return the job, pool, node or queue that a command is about; "fleet" for fleet-wide switches."""
    match body:
        case SubmitJob() | CancelJob() | SuspendJob() | ResumeJob() | ScaleJob() | ChangeJob() | CheckpointJob():
            return body.job_id
        case CreatePool(pool):
            return pool.name
        case CreateQueue(queue) | ChangeQueue(queue):
            return queue.name
        case AddNode(node):
            return node.name
        case SetLendingPolicy() | ReportDemand():
            return body.pool
        case DeletePool() | DeleteQueue() | RemoveNode() | CordonNode() | UncordonNode():
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


def _list_audited_fields(body: CommandBody, subject: str, snapshot: Snapshot) -> Mapping[str, Any] | None:
    match body:
        case SubmitJob() | CancelJob() | SuspendJob() | ResumeJob() | ScaleJob() | ChangeJob() | CheckpointJob():
            job = snapshot.jobs.get(subject)
            return None if job is None else {"intent": job.intent.value, **to_job_document(job.spec)}
        case CreatePool() | DeletePool() | SetLendingPolicy():
            record: Any = snapshot.pools.get(subject)
        case CreateQueue() | ChangeQueue() | DeleteQueue():
            record = snapshot.queues.get(subject)
        case AddNode() | RemoveNode() | CordonNode() | UncordonNode():
            record = snapshot.nodes.get(subject)
        case ReportDemand():
            record = snapshot.demand.get(subject)
        case _:
            record = snapshot.switches
    return None if record is None else encode(record)
