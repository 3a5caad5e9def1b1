"""The audit log's entries: who asked for which change, and what it changed. Reports of workers and agents are none."""

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
    """Of what a command changes, only the fields that differ."""
    subject = command_subject(command.body)
    was, will_be = (_audited_fields(command.body, subject, snapshot) for snapshot in (before, after))
    if was is not None and will_be is not None:
        changed = {name for name in was if was[name] != will_be[name]}
        was, will_be = ({name: value[name] for name in sorted(changed)} for value in (was, will_be))
    return AuditEntry(
        command.at_s,
        principal.name,
        principal.token_id,
        type(command.body).__name__,
        subject,
        was,
        will_be,
        REQUEST_ID.get(),
    )


def command_subject(body: CommandBody) -> str:
    """The job, pool, node or queue that a command is about; `fleet` for switches of the whole."""
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
    """Log that somebody who is known asked for a change and may not have it; nothing of anything else."""
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
        )
    )


def _audited_fields(body: CommandBody, subject: str, snapshot: Snapshot) -> Mapping[str, Any] | None:
    match body:
        case SubmitJob() | CancelJob() | SuspendJob() | ResumeJob() | ScaleJob() | ChangeJob() | CheckpointJob():
            job = snapshot.jobs.get(subject)
            return None if job is None else {"intent": job.intent.value, **to_job_document(job.spec)}
        case CreatePool() | DeletePool() | SetLendingPolicy():
            found: Any = snapshot.pools.get(subject)
        case CreateQueue() | ChangeQueue() | DeleteQueue():
            found = snapshot.queues.get(subject)
        case AddNode() | RemoveNode() | CordonNode() | UncordonNode():
            found = snapshot.nodes.get(subject)
        case ReportDemand():
            found = snapshot.demand.get(subject)
        case _:
            found = snapshot.switches
    return None if found is None else encode(found)
