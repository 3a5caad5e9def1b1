"""Usage: who held how many GPU-seconds, of training's own GPUs and of lent ones."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Annotated, Literal

from fastapi import Header, Query, Response

from api.answers.usage import DAY_S, DIMENSIONS, UsageReportView, usage_csv, usage_rows, usage_sums
from api.dependencies import PrincipalDep, ServiceDep
from api.errors import refuse
from api.identity.principal import Role
from api.routing import noun_router
from scheduler.core.usage import summed, unbooked
from scheduler.domain.spelling import meant
from scheduler.domain.usage import HOUR_S

router = noun_router("usage")

DAYS_DEFAULT, DAYS_MAX = 30, 366
TIME_S_MAX = 253_402_300_800
"""The year 10000."""
CSV = "text/csv"
_TIME = "Seconds since 1970 (UTC), or a date or time such as 2026-11-22 or 2026-11-22T08:00:00Z; taken to whole hours."


@router.get(
    "/usage", response_model=UsageReportView, responses={200: {"content": {CSV: {"schema": {"type": "string"}}}}}
)
def get_usage(
    service: ServiceDep,
    principal: PrincipalDep,
    *,
    since: Annotated[str, Query(alias="from", max_length=40, description=f"{_TIME} Else 30 days before `to`.")] = "",
    until: Annotated[str, Query(alias="to", max_length=40, description=f"{_TIME} Else now.")] = "",
    by: Annotated[str, Query(max_length=100, description="One or more of day, hour, queue, owner, gpu.")] = "queue",
    form: Annotated[Literal["", "json", "csv"], Query(alias="format", description="Else as Accept asks.")] = "",
    accept: Annotated[str, Header(max_length=1000)] = "",
) -> UsageReportView | Response:
    """GPU-seconds that jobs held, jobs that run now included, of the queues that the asker may see."""
    now_s, dimensions = service.clock.now_s(), _dimensions(by)
    to_s = math.ceil(_time("to", until, now_s) / HOUR_S) * HOUR_S
    from_s = math.floor(_time("from", since, max(0.0, to_s - DAYS_DEFAULT * DAY_S)) / HOUR_S) * HOUR_S
    if not from_s <= to_s <= from_s + DAYS_MAX * DAY_S:
        refuse("from", since, f"not after `to`, and at most {DAYS_MAX} days before it")
    books = service.store.usage(from_s=from_s, to_s=to_s)
    now_s = max(now_s, books.snapshot.now_s)
    entries = [
        entry
        for entry in summed((*books.entries, *unbooked(books.snapshot, now_s, from_s=from_s)))
        if from_s <= entry.kind.hour_s < to_s and principal.may(Role.VIEWER, entry.kind.queue)
    ]
    report: UsageReportView = {
        "from_s": from_s,
        "to_s": to_s,
        "as_of_s": now_s,
        "by": dimensions,
        "items": usage_rows(entries, dimensions),
        "total": usage_sums(entries),
    }
    if form == "csv" or (not form and accept.partition(";")[0].strip().lower() == CSV):
        headers = {"Content-Disposition": 'attachment; filename="usage.csv"'}
        return Response(usage_csv(report), media_type=CSV, headers=headers)
    return report


def _dimensions(by: str) -> list[str]:
    names = [name.strip() for name in by.split(",")]
    for at, name in enumerate(names):
        if name not in DIMENSIONS or name in names[:at]:
            refuse("by", name, f"one or more of {', '.join(DIMENSIONS)}, each once{meant(name, DIMENSIONS)}")
    return names


def _time(field: str, text: str, default_s: float) -> float:
    if not text:
        return default_s
    try:
        at_s = float(text)
    except ValueError:
        at_s = _moment_s(text)
    if not 0 <= at_s <= TIME_S_MAX:
        refuse(field, text, "seconds since 1970, or a date or time such as 2026-11-22 or 2026-11-22T08:00:00Z")
    return at_s


def _moment_s(text: str) -> float:
    """A time without a zone is UTC; not a number where it is none at all."""
    try:
        moment = datetime.fromisoformat(text)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return math.nan
