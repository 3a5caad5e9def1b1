"""The audit log: who asked for which change."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import Query

from api.answers.identity import AuditView, audit_view
from api.answers.page import PageOf
from api.dependencies import Limit, ServiceDep
from api.paging import Cursor, page_by_number
from api.problems import problems
from api.routing import noun_router
from scheduler.store.front import AuditFilter, HistoryLog

router = noun_router("identity")


@router.get("/audit", responses=problems(410))
def list_audit(
    service: ServiceDep,
    actor: str = "",
    subject: str = "",
    since_s: Annotated[float | None, Query(ge=0, allow_inf_nan=False)] = None,
    *,
    limit: Limit = 100,
    cursor: Cursor = "",
) -> PageOf[AuditView]:
    """Changes asked for, oldest first: forbidden ones too. What workers and agents report is none."""
    wanted = AuditFilter(actor, subject, since_s)
    read = partial(service.store.audit_log.page, wanted=wanted)
    swept = partial(service.store.swept_up_to, HistoryLog.AUDIT)
    page = page_by_number("audit", read, lambda _: True, swept=swept, after=0, cursor=cursor, limit=limit)
    return {"items": [audit_view(row) for row in page["items"]], "next": page["next"]}
