"""The audit log: who asked for which change."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Query
from typing_extensions import TypedDict

from api.answers.page import PageOf
from api.dependencies import Limit, ServiceDep
from api.paging import Cursor, page_by_number
from scheduler.store.front import AuditFilter, StoredEntry

router = APIRouter(prefix="/v1", tags=["identity"])


class AuditAnswer(TypedDict):
    """A change that was asked for. `at_s` in seconds since 1970 (UTC). `before` and `after`: the fields it changed."""

    number: int
    at_s: float
    actor: str
    token_id: str
    action: str
    subject: str
    before: dict[str, Any] | None
    after: dict[str, Any] | None
    request_id: str
    outcome: str


@router.get("/audit")
def list_audit(
    service: ServiceDep,
    actor: str = "",
    subject: str = "",
    since_s: Annotated[float | None, Query(ge=0, allow_inf_nan=False)] = None,
    *,
    limit: Limit = 100,
    cursor: Cursor = "",
) -> PageOf[AuditAnswer]:
    """Changes asked for, oldest first: forbidden ones too. What workers and agents report is none."""
    wanted = AuditFilter(actor, subject, since_s)
    read = partial(service.store.audit_log.page, wanted=wanted)
    page = page_by_number("audit", read, lambda _: True, after=0, cursor=cursor, limit=limit)
    return {"items": [_answer(row) for row in page["items"]], "next": page["next"]}


def _answer(stored: StoredEntry) -> AuditAnswer:
    entry = stored.entry
    return {
        "number": stored.number,
        "at_s": entry.at_s,
        "actor": entry.actor,
        "token_id": entry.token_id,
        "action": entry.action,
        "subject": entry.subject,
        "before": None if entry.before is None else dict(entry.before),
        "after": None if entry.after is None else dict(entry.after),
        "request_id": entry.request_id,
        "outcome": entry.outcome,
    }
