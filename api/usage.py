"""Usage: GPU-seconds by queue, owner, GPU model, model of the job, hour or day, as JSON and CSV.

Rows are grouped by owner id and also have the display name, which several owners may share.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Annotated, Literal, NamedTuple, NotRequired, cast

from fastapi import Header, Query, Response
from pydantic import Field
from typing_extensions import TypedDict

from api.http.csv_tables import (
    CSV_RESPONSES,
    escape_formula,
    format_csv,
    format_iso_time,
    respond_with_csv,
    wants_csv,
)
from api.http.dependencies import PrincipalDep, Service, ServiceDep, create_router
from api.http.errors import raise_invalid_field
from api.http.paging import TEXT_PATTERN
from api.http.time_parameters import TIME_FORMS, parse_time
from api.identity.authorization import VIEWER, requires
from api.identity.principals import Principal, Role
from scheduler.domain.job_queue import HOUR_S, UsageEntry, UsageKey, list_usage_columns
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.suggestions import suggest
from scheduler.scheduling.usage import compute_unsettled_usage, sum_usage

DAY_S = 86_400
DIMENSIONS = ("day", "hour", "queue", "owner", "gpu", "model")
SECONDS_BY_TIME_DIMENSION = {"day": DAY_S, "hour": HOUR_S}


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
    model: NotRequired[
        Annotated[
            str,
            Field(
                description="Model that the jobs train, or `profile-` and a digest of a job's own profile. Empty: not "
                "stated by the job, or used before models were recorded. Absent: not requested."
            ),
        ]
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
    sums = tuple(UsageSumsView.__annotations__)
    columns = list_usage_columns(report["by"])
    rows = ([*format_dimensions(item, columns), *format_sums(item, sums)] for item in report["items"])
    return format_csv([*columns, *sums], rows)


def format_dimensions(item: Mapping[str, object], columns: Iterable[str]) -> list[str]:
    """Return the cells that tell rows apart: ISO times, and names that no spreadsheet runs as a formula."""
    return [
        format_iso_time(item[name]) if name in SECONDS_BY_TIME_DIMENSION else escape_formula(str(item[name]))
        for name in columns
    ]


def format_sums(item: Mapping[str, object], names: Iterable[str]) -> list[str]:
    return ["" if item[name] is None else f"{item[name]:.3f}" for name in names]


def _dimension_value(kind: UsageKey, name: str) -> int | str:
    if name in SECONDS_BY_TIME_DIMENSION:
        return kind.hour_s // SECONDS_BY_TIME_DIMENSION[name] * SECONDS_BY_TIME_DIMENSION[name]
    value: str = getattr(kind, "owner_id" if name == "owner" else name)
    return value


router = create_router("usage")

DAYS_DEFAULT, DAYS_MAX = 30, 366
_TIME_DESCRIPTION = f"{TIME_FORMS}; rounded to whole hours."


class Period(NamedTuple):
    """Whole hours, in seconds since 1970 (UTC). `to_s` is exclusive."""

    from_s: int
    to_s: int


class VisibleUsage(NamedTuple):
    """Usage in queues that the caller may read, up to `as_of_s`, and the snapshot that it was completed from."""

    entries: list[UsageEntry]
    as_of_s: float
    snapshot: Snapshot


def read_period(service: Service, since: str, until: str) -> Period:
    """Return the whole hours that the parameters `from` and `to` cover."""
    to_s = math.ceil(parse_time("to", until, service.clock.now_s()) / HOUR_S) * HOUR_S
    from_s = math.floor(parse_time("from", since, max(0.0, to_s - DAYS_DEFAULT * DAY_S)) / HOUR_S) * HOUR_S
    if not from_s <= to_s <= from_s + DAYS_MAX * DAY_S:
        raise_invalid_field("from", since, f"at or before `to`, and at most {DAYS_MAX} days before it")
    return Period(from_s, to_s)


def load_visible_usage(service: Service, principal: Principal, period: Period, queue: str = "") -> VisibleUsage:
    """Return the usage of the period, including running jobs; with `queue`, only of that queue."""
    books = service.store.load_usage(from_s=period.from_s, to_s=period.to_s)
    now_s = max(service.clock.now_s(), books.snapshot.now_s)
    entries = [
        entry
        for entry in sum_usage((*books.entries, *compute_unsettled_usage(books.snapshot, now_s, from_s=period.from_s)))
        if period.from_s <= entry.key.hour_s < period.to_s
        and queue in ("", entry.key.queue)
        and principal.has_role(Role.VIEWER, entry.key.queue)
    ]
    return VisibleUsage(entries, now_s, books.snapshot)


SinceParameter = Annotated[
    str, Query(alias="from", max_length=40, description=f"{_TIME_DESCRIPTION} Default: 30 days before `to`.")
]
UntilParameter = Annotated[str, Query(alias="to", max_length=40, description=f"{_TIME_DESCRIPTION} Default: now.")]
FormParameter = Annotated[
    Literal["", "json", "csv"],
    Query(
        alias="format", description="Form of the response. Default: csv if the Accept header is text/csv, else json."
    ),
]
AcceptHeader = Annotated[
    str, Header(max_length=1000, description="text/csv returns a CSV table, unless `format` is set. Otherwise JSON.")
]


@router.get("/usage", response_model=UsageReportView, responses=CSV_RESPONSES)
@requires(VIEWER)
def get_usage(
    service: ServiceDep,
    principal: PrincipalDep,
    *,
    since: SinceParameter = "",
    until: UntilParameter = "",
    by: Annotated[
        str, Query(max_length=100, description="One or more of day, hour, queue, owner, gpu, model.")
    ] = "queue",
    queue: Annotated[
        str, Query(max_length=300, pattern=TEXT_PATTERN, description="Only usage of this queue. Empty: all.")
    ] = "",
    form: FormParameter = "",
    accept: AcceptHeader = "",
) -> UsageReportView | Response:
    """Return GPU-seconds that jobs held, including running jobs, in the queues that the caller may read."""
    dimensions = _parse_dimensions(by)
    period = read_period(service, since, until)
    usage = load_visible_usage(service, principal, period, queue)
    report: UsageReportView = {
        "from_s": period.from_s,
        "to_s": period.to_s,
        "as_of_s": usage.as_of_s,
        "by": dimensions,
        "items": usage_rows(usage.entries, dimensions),
        "total": usage_sums(usage.entries),
    }
    return respond_with_csv(usage_csv(report), "usage.csv") if wants_csv(form, accept) else report


def _parse_dimensions(by: str) -> list[str]:
    names = [name.strip() for name in by.split(",")]
    for at, name in enumerate(names):
        if name not in DIMENSIONS or name in names[:at]:
            raise_invalid_field(
                "by", name, f"one or more of {', '.join(DIMENSIONS)}, each once{suggest(name, DIMENSIONS)}"
            )
    return names
