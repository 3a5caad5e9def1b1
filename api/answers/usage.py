"""What is told of usage: GPU-seconds by queue, owner, GPU model, hour or day, as JSON and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import NotRequired, cast

from typing_extensions import TypedDict

from scheduler.domain.usage import HOUR_S, UsageEntry, UsageKind

DAY_S = 86_400
DIMENSIONS = ("day", "hour", "queue", "owner", "gpu")
TIMES = {"day": DAY_S, "hour": HOUR_S}
_FORMULA_MARKS = ("=", "+", "-", "@", "\t", "\r")


class UsageSumsView(TypedDict):
    """`gpu_s` = `own_gpu_s` + `lent_gpu_s`: GPUs of training's own pools, and such that inference pools had lent.
    `lost_gpu_s` is the part whose work was lost, in the hour in which that came to light."""

    gpu_s: float
    own_gpu_s: float
    lent_gpu_s: float
    lost_gpu_s: float


class UsageRowView(UsageSumsView):
    """Of what was asked for by `by`; `day` and `hour` are when they began, in seconds since 1970 (UTC)."""

    day: NotRequired[int]
    hour: NotRequired[int]
    queue: NotRequired[str]
    owner: NotRequired[str]
    gpu: NotRequired[str]


class UsageReportView(TypedDict):
    """Whole hours from `from_s` to before `to_s`; what jobs hold now is counted up to `as_of_s`."""

    from_s: int
    to_s: int
    as_of_s: float
    by: list[str]
    items: list[UsageRowView]
    total: UsageSumsView


def usage_rows(entries: Iterable[UsageEntry], by: Sequence[str]) -> list[UsageRowView]:
    """The sums of the entries that agree in all of `by`, in its order."""
    groups: dict[tuple[int | str, ...], list[UsageEntry]] = {}
    for entry in entries:
        groups.setdefault(tuple(_value(entry.kind, name) for name in by), []).append(entry)
    rows: list[UsageRowView] = []
    for values in sorted(groups):
        kind = dict(zip(by, values, strict=True))
        rows.append(cast(UsageRowView, {**kind, **usage_sums(groups[values])}))
    return rows


def usage_sums(entries: Iterable[UsageEntry]) -> UsageSumsView:
    own = lent = lost = 0.0
    for entry in entries:
        own, lent = (own, lent + entry.gpu_s) if entry.kind.is_lent else (own + entry.gpu_s, lent)
        lost += entry.lost_gpu_s
    return {"gpu_s": own + lent, "own_gpu_s": own, "lent_gpu_s": lent, "lost_gpu_s": lost}


def usage_csv(report: UsageReportView) -> str:
    """A line for each item; times as people and spreadsheets read them."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\r\n")
    sums = tuple(UsageSumsView.__annotations__)
    writer.writerow([*report["by"], *sums])
    for item in report["items"]:
        values: dict[str, object] = {**item}
        cells = [_time(values[name]) if name in TIMES else _safe(str(values[name])) for name in report["by"]]
        writer.writerow([*cells, *(f"{values[name]:.3f}" for name in sums)])
    return text.getvalue()


def _value(kind: UsageKind, name: str) -> int | str:
    if name in TIMES:
        return kind.hour_s // TIMES[name] * TIMES[name]
    value: str = getattr(kind, name)
    return value


def _time(at_s: object) -> str:
    assert isinstance(at_s, int)
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _safe(cell: str) -> str:
    """A spreadsheet takes a cell that begins so for a formula, and would run it: a quote says that it is text."""
    return f"'{cell}" if cell.startswith(_FORMULA_MARKS) else cell
