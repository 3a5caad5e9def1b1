"""Usage: GPU-seconds by queue, owner, GPU model, hour or day, as JSON and CSV.

Rows are grouped by owner id and also have the display name, which several owners may share.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from operator import attrgetter, itemgetter
from typing import Annotated, Literal, NotRequired, cast

from fastapi import Header, Query, Response
from pydantic import Field
from typing_extensions import TypedDict

from api.http.dependencies import PrincipalDep, ServiceDep, create_router
from api.http.errors import raise_invalid_field
from api.http.paging import TEXT_PATTERN
from api.identity.authorization import VIEWER, requires
from api.identity.principals import Role
from scheduler.domain.job_queue import HOUR_S, UsageEntry, UsageKey, list_usage_columns
from scheduler.domain.suggestions import suggest
from scheduler.scheduling.usage import compute_unsettled_usage, sum_usage

DAY_S = 86_400
DIMENSIONS = ("day", "hour", "queue", "owner", "gpu")
SECONDS_BY_TIME_DIMENSION = {"day": DAY_S, "hour": HOUR_S}
_FORMULA_PREFIXES = ("=", "+", "-", "@", "\t", "\r")


class UsageSumsView(TypedDict):
    """Sums of GPU time. `gpu_s` = `own_gpu_s` + `lent_gpu_s`."""

    gpu_s: Annotated[float, Field(description="GPU-seconds held on all nodes.")]
    own_gpu_s: Annotated[float, Field(description="GPU-seconds held on nodes of training pools.")]
    lent_gpu_s: Annotated[float, Field(description="GPU-seconds held on nodes on loan from inference pools.")]
    lost_gpu_s: Annotated[
        float, Field(description="GPU-seconds whose work was lost, counted in the hour in which the loss was found.")
    ]


class UsageRowView(UsageSumsView):
    """Sums for one combination of the requested dimensions."""

    day: NotRequired[
        Annotated[
            int, Field(description="Start of a calendar date, in seconds since 1970 (UTC). Absent: not requested.")
        ]
    ]
    hour: NotRequired[
        Annotated[
            int,
            Field(
                description=(
                    "Start of the 3600 seconds that are summed, in seconds since 1970 (UTC). Absent: not requested."
                )
            ),
        ]
    ]
    queue: NotRequired[Annotated[str, Field(description="Queue that was charged. Absent: not requested.")]]
    owner: NotRequired[
        Annotated[str, Field(description="Display name of the caller that submitted the jobs. Absent: not requested.")]
    ]
    owner_id: NotRequired[
        Annotated[
            str,
            Field(
                description="Stable id of that caller, by which rows are grouped. Absent: `owner` was not requested."
            ),
        ]
    ]
    gpu: NotRequired[
        Annotated[str, Field(description="Profile name of the GPU model, such as `h100-80g`. Absent: not requested.")]
    ]


class UsageReportView(TypedDict):
    """GPU time by the requested dimensions."""

    from_s: Annotated[int, Field(description="Start of the first whole hour, in seconds since 1970 (UTC).")]
    to_s: Annotated[int, Field(description="End of the last whole hour, exclusive, in seconds since 1970 (UTC).")]
    as_of_s: Annotated[
        float, Field(description="Time up to which running jobs are counted, in seconds since 1970 (UTC).")
    ]
    by: Annotated[list[str], Field(description="Dimensions of the rows, in the requested order.")]
    items: Annotated[list[UsageRowView], Field(description="One row per combination of dimensions, sorted by them.")]
    total: Annotated[UsageSumsView, Field(description="Sums over all rows.")]


def usage_rows(entries: Iterable[UsageEntry], by: Sequence[str]) -> list[UsageRowView]:
    """Return one row per combination of the dimensions `by`, in that order."""
    groups: dict[tuple[int | str, ...], list[UsageEntry]] = {}
    for entry in entries:
        groups.setdefault(tuple(_dimension_value(entry.key, name) for name in by), []).append(entry)
    rows = []
    for values, group in groups.items():
        kind = dict(zip(by, values, strict=True))
        if "owner" in kind:
            kind |= {"owner_id": kind["owner"], "owner": max(group, key=attrgetter("key.hour_s")).owner}
        rows.append(cast(UsageRowView, {**kind, **usage_sums(group)}))
    return sorted(rows, key=itemgetter(*list_usage_columns(by)))


def usage_sums(entries: Iterable[UsageEntry]) -> UsageSumsView:
    own = lent = lost = 0.0
    for entry in entries:
        own, lent = (own, lent + entry.gpu_s) if entry.key.is_lent else (own + entry.gpu_s, lent)
        lost += entry.lost_gpu_s
    return {"gpu_s": own + lent, "own_gpu_s": own, "lent_gpu_s": lent, "lost_gpu_s": lost}


def usage_csv(report: UsageReportView) -> str:
    """Return the report as CSV with ISO times."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\r\n")
    sums = tuple(UsageSumsView.__annotations__)
    columns = list_usage_columns(report["by"])
    writer.writerow([*columns, *sums])
    for item in report["items"]:
        values: dict[str, object] = {**item}
        cells = [
            _format_time(values[name]) if name in SECONDS_BY_TIME_DIMENSION else _escape_formula(str(values[name]))
            for name in columns
        ]
        writer.writerow([*cells, *(f"{values[name]:.3f}" for name in sums)])
    return text.getvalue()


def _dimension_value(kind: UsageKey, name: str) -> int | str:
    if name in SECONDS_BY_TIME_DIMENSION:
        return kind.hour_s // SECONDS_BY_TIME_DIMENSION[name] * SECONDS_BY_TIME_DIMENSION[name]
    value: str = getattr(kind, "owner_id" if name == "owner" else name)
    return value


def _format_time(at_s: object) -> str:
    assert isinstance(at_s, int)
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _escape_formula(cell: str) -> str:
    """Prefix cells that a spreadsheet would run as a formula with a quote."""
    return f"'{cell}" if cell.startswith(_FORMULA_PREFIXES) else cell


router = create_router("usage")

DAYS_DEFAULT, DAYS_MAX = 30, 366
TIME_S_MAX = 253_402_300_800
"""The year 10000."""
CSV = "text/csv"
_TIME_DESCRIPTION = (
    "Seconds since 1970 (UTC), or a date or time such as 2026-11-22 or 2026-11-22T08:00:00Z; rounded to whole hours."
)


@router.get(
    "/usage", response_model=UsageReportView, responses={200: {"content": {CSV: {"schema": {"type": "string"}}}}}
)
@requires(VIEWER)
def get_usage(
    service: ServiceDep,
    principal: PrincipalDep,
    *,
    since: Annotated[
        str, Query(alias="from", max_length=40, description=f"{_TIME_DESCRIPTION} Default: 30 days before `to`.")
    ] = "",
    until: Annotated[str, Query(alias="to", max_length=40, description=f"{_TIME_DESCRIPTION} Default: now.")] = "",
    by: Annotated[str, Query(max_length=100, description="One or more of day, hour, queue, owner, gpu.")] = "queue",
    queue: Annotated[
        str, Query(max_length=300, pattern=TEXT_PATTERN, description="Only usage of this queue. Empty: all.")
    ] = "",
    form: Annotated[
        Literal["", "json", "csv"],
        Query(
            alias="format",
            description="Form of the response. Default: csv if the Accept header is text/csv, else json.",
        ),
    ] = "",
    accept: Annotated[
        str,
        Header(max_length=1000, description="text/csv returns a CSV table, unless `format` is set. Otherwise JSON."),
    ] = "",
) -> UsageReportView | Response:
    """Return GPU-seconds that jobs held, including running jobs, in the queues that the caller may read."""
    now_s, dimensions = service.clock.now_s(), _parse_dimensions(by)
    to_s = math.ceil(_parse_time("to", until, now_s) / HOUR_S) * HOUR_S
    from_s = math.floor(_parse_time("from", since, max(0.0, to_s - DAYS_DEFAULT * DAY_S)) / HOUR_S) * HOUR_S
    if not from_s <= to_s <= from_s + DAYS_MAX * DAY_S:
        raise_invalid_field("from", since, f"at or before `to`, and at most {DAYS_MAX} days before it")
    books = service.store.load_usage(from_s=from_s, to_s=to_s)
    now_s = max(now_s, books.snapshot.now_s)
    entries = [
        entry
        for entry in sum_usage((*books.entries, *compute_unsettled_usage(books.snapshot, now_s, from_s=from_s)))
        if from_s <= entry.key.hour_s < to_s
        and queue in ("", entry.key.queue)
        and principal.has_role(Role.VIEWER, entry.key.queue)
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


def _parse_dimensions(by: str) -> list[str]:
    names = [name.strip() for name in by.split(",")]
    for at, name in enumerate(names):
        if name not in DIMENSIONS or name in names[:at]:
            raise_invalid_field(
                "by", name, f"one or more of {', '.join(DIMENSIONS)}, each once{suggest(name, DIMENSIONS)}"
            )
    return names


def _parse_time(field: str, text: str, default_s: float) -> float:
    if not text:
        return default_s
    try:
        at_s = float(text)
    except ValueError:
        at_s = _parse_iso_time(text)
    if not 0 <= at_s <= TIME_S_MAX:
        raise_invalid_field(
            field, text, "seconds since 1970, or a date or time such as 2026-11-22 or 2026-11-22T08:00:00Z"
        )
    return at_s


def _parse_iso_time(text: str) -> float:
    """Return the time in seconds since 1970, or NaN if the text is not a time. Times without a zone are UTC."""
    try:
        moment = datetime.fromisoformat(text)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return math.nan
