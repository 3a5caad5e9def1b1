"""Savings: GPU time lent, used, lost and idle while jobs waited, with amounts if prices are set, as JSON and CSV.

GPU time that jobs held is that of `/v1/usage`. GPU time that no job held is that of the recorded use of pools, which
has no queue, owner, GPU model or model of a job, so that only sums and days have it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, cast

from fastapi import Query, Response
from pydantic import Field
from typing_extensions import TypedDict

from api.http.csv_tables import CSV_RESPONSES, format_csv, respond_with_csv, wants_csv
from api.http.dependencies import PrincipalDep, ServiceDep, create_router
from api.identity.authorization import VIEWER, requires
from api.usage import (
    DAY_S,
    AcceptHeader,
    FormParameter,
    Period,
    SinceParameter,
    UntilParameter,
    UsageRowView,
    UsageSumsView,
    format_dimensions,
    format_sums,
    load_visible_usage,
    read_period,
    usage_rows,
    usage_sums,
)
from scheduler.domain.capacity_history import HOURS, CapacityBin, roll_up
from scheduler.domain.fleet import PoolKind
from scheduler.domain.job_queue import HOUR_S, UsageEntry, list_usage_columns
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling.capacity_use import integrate_capacity
from scheduler.store.api_protocol import ApiStore


class AmountsView(TypedDict):
    """GPU-hours times prices, in the currency of the report. GPU models without a price count as nothing."""

    used: Annotated[float, Field(description="Amount of the GPU time that jobs held, on all nodes.")]
    on_loan: Annotated[float, Field(description="Part of `used` that was on nodes on loan from inference pools.")]
    lost: Annotated[float, Field(description="Amount of the GPU time whose work was lost.")]
    idle_waiting: Annotated[
        float | None,
        Field(description="Amount of the GPU time idle while jobs waited. Null: not known by this dimension."),
    ]


class SavingsSumsView(UsageSumsView):
    """Sums of GPU time that jobs held, and that lent or own GPUs were idle."""

    lent_idle_gpu_s: Annotated[
        float | None,
        Field(description="GPU-seconds of lent nodes that no job held. Null: not known by this dimension."),
    ]
    idle_waiting_gpu_s: Annotated[
        float | None,
        Field(
            description="GPU-seconds of training nodes and lent nodes that no job held while a job waited for their "
            "GPU model. Null: not known by this dimension."
        ),
    ]
    amounts: Annotated[AmountsView | None, Field(description="Amounts at the set prices. Null: no prices are set.")]


class SavingsRowView(UsageRowView, SavingsSumsView):
    """Sums for one value of the requested dimension."""


class SavingsReportView(TypedDict):
    """GPU time by one dimension, with amounts."""

    from_s: Annotated[int, Field(description="Start of the first whole hour, in seconds since 1970 (UTC).")]
    to_s: Annotated[int, Field(description="End of the last whole hour, exclusive, in seconds since 1970 (UTC).")]
    as_of_s: Annotated[
        float, Field(description="Time up to which running jobs are counted, in seconds since 1970 (UTC).")
    ]
    by: Annotated[str, Field(description="Dimension of the rows.")]
    currency: Annotated[str | None, Field(description="Currency of all amounts, such as USD. Null: no prices are set.")]
    prices: Annotated[dict[str, float], Field(description="Price of a GPU-hour by GPU model, from the settings.")]
    unpriced: Annotated[
        list[str], Field(description="GPU models that jobs held in this time and that have no price, by name.")
    ]
    recorded_since_s: Annotated[
        int | None,
        Field(
            description="Start of the first hour in which the use of pools was recorded, in seconds since 1970 (UTC). "
            "Null: none was, so that idle time is not known."
        ),
    ]
    items: Annotated[list[SavingsRowView], Field(description="One row per value of the dimension, sorted by it.")]
    total: Annotated[SavingsSumsView, Field(description="Sums over all rows.")]


@dataclass(frozen=True, slots=True)
class IdleTime:
    """GPU-seconds that no job held, and the amount of those while jobs waited."""

    lent_gpu_s: float = 0.0
    waiting_gpu_s: float = 0.0
    waiting_amount: float = 0.0

    def add(self, other: IdleTime) -> IdleTime:
        return IdleTime(
            self.lent_gpu_s + other.lent_gpu_s,
            self.waiting_gpu_s + other.waiting_gpu_s,
            self.waiting_amount + other.waiting_amount,
        )


def load_bins(store: ApiStore, snapshot: Snapshot, period: Period, now_s: float) -> tuple[CapacityBin, ...]:
    """Return the hourly use of pools in the period, including the time since the last commit."""
    stored = store.capacity.list_bins(HOURS.step_s, from_s=period.from_s, to_s=period.to_s)
    newest = roll_up(integrate_capacity(snapshot, now_s), HOURS.step_s)
    return tuple(each for each in (*stored, *newest) if period.from_s <= each.at_s < period.to_s)


def sum_idle_time(
    bins: Iterable[CapacityBin], snapshot: Snapshot, prices: Mapping[str, float]
) -> Mapping[int, IdleTime]:
    """Return idle time by the start of the day. Idle GPUs of inference pools count while they are lent."""
    days: defaultdict[int, IdleTime] = defaultdict(IdleTime)
    pool_prices = compute_pool_prices(snapshot, prices)
    for each in bins:
        pool = snapshot.pools.get(each.pool)
        is_owned = pool is not None and pool.kind is PoolKind.TRAINING
        waiting_gpu_s = each.lent_idle_waited_gpu_s + (each.free_waited_gpu_s if is_owned else 0.0)
        amount = waiting_gpu_s / HOUR_S * pool_prices.get(each.pool, 0.0)
        day_s = each.at_s // DAY_S * DAY_S
        days[day_s] = days[day_s].add(IdleTime(each.lent_idle_gpu_s, waiting_gpu_s, amount))
    return days


def compute_pool_prices(snapshot: Snapshot, prices: Mapping[str, float]) -> Mapping[str, float]:
    """Return the mean price of a GPU-hour by pool, over its present GPUs. GPU models without a price cost nothing."""
    gpus, amounts = Counter[str](), defaultdict[str, float](float)
    for node in snapshot.nodes.values():
        gpus[node.pool] += node.gpus
        amounts[node.pool] += node.gpus * prices.get(node.gpu, 0.0)
    return {pool: amounts[pool] / count for pool, count in gpus.items()}


def savings_rows(
    entries: Sequence[UsageEntry], by: str, idle: Mapping[int, IdleTime], prices: Mapping[str, float]
) -> list[SavingsRowView]:
    """Return one row per value of the dimension. Days without usage have a row if GPUs were idle."""
    rows: dict[Any, Any] = {}
    for row in usage_rows(entries, [by]):
        values = cast("dict[str, Any]", row)
        rows[values["owner_id" if by == "owner" else by]] = values
    groups: defaultdict[Any, list[UsageEntry]] = defaultdict(list)
    for entry in entries:
        groups[_dimension_value(entry, by)].append(entry)
    if by == "day":
        for day_s in idle:
            rows.setdefault(day_s, {"day": day_s, **usage_sums(())})
    idle_of = idle.get if by == "day" else lambda value: None
    items = [
        {**row, **_extra_sums(groups.get(value, []), idle_of(value), prices)} for value, row in sorted(rows.items())
    ]
    return cast("list[SavingsRowView]", items)


def _dimension_value(entry: UsageEntry, by: str) -> Any:
    if by == "day":
        return entry.key.hour_s // DAY_S * DAY_S
    return entry.key.owner_id if by == "owner" else getattr(entry.key, by)


def _extra_sums(entries: Iterable[UsageEntry], idle: IdleTime | None, prices: Mapping[str, float]) -> dict[str, Any]:
    """Return what savings have beyond usage."""
    return {
        "lent_idle_gpu_s": None if idle is None else idle.lent_gpu_s,
        "idle_waiting_gpu_s": None if idle is None else idle.waiting_gpu_s,
        "amounts": _amounts_view(entries, idle, prices) if prices else None,
    }


def _amounts_view(entries: Iterable[UsageEntry], idle: IdleTime | None, prices: Mapping[str, float]) -> AmountsView:
    used, on_loan, lost = price_usage(entries, prices)
    waiting = None if idle is None else idle.waiting_amount
    return {"used": used, "on_loan": on_loan, "lost": lost, "idle_waiting": waiting}


class UsageAmounts(NamedTuple):
    """Amounts of the GPU time used, of its part on loan, and of the GPU time whose work was lost."""

    used: float
    on_loan: float
    lost: float


def price_usage(entries: Iterable[UsageEntry], prices: Mapping[str, float]) -> UsageAmounts:
    """Return GPU-hours times prices. GPU models without a price count as nothing."""
    used = on_loan = lost = 0.0
    for entry in entries:
        price = prices.get(entry.key.gpu, 0.0) / HOUR_S
        used += price * entry.gpu_s
        lost += price * entry.lost_gpu_s
        on_loan += price * entry.gpu_s if entry.key.is_lent else 0.0
    return UsageAmounts(used, on_loan, lost)


def find_unpriced(entries: Iterable[UsageEntry], prices: Mapping[str, float]) -> list[str]:
    """Return the GPU models that have no price, by name. Empty: no prices are set."""
    return sorted({entry.key.gpu for entry in entries} - prices.keys()) if prices else []


def savings_csv(report: SavingsReportView) -> str:
    """Return the report as CSV with ISO times. Amounts have the currency in their column."""
    sums = (*UsageSumsView.__annotations__, "lent_idle_gpu_s", "idle_waiting_gpu_s")
    columns = list_usage_columns([report["by"]])
    amounts = tuple(AmountsView.__annotations__) if report["prices"] else ()
    rows = []
    for item in report["items"]:
        values = cast("dict[str, Any]", item)
        rows.append(
            [*format_dimensions(values, columns), *format_sums(values, sums), *format_sums(values["amounts"], amounts)]
        )
    return format_csv([*columns, *sums, *(f"{name}_{report['currency']}" for name in amounts)], rows)


router = create_router("usage")


@router.get("/savings", response_model=SavingsReportView, responses=CSV_RESPONSES)
@requires(VIEWER)
def get_savings(
    service: ServiceDep,
    principal: PrincipalDep,
    *,
    since: SinceParameter = "",
    until: UntilParameter = "",
    by: Annotated[
        Literal["day", "queue", "owner", "gpu", "model"],
        Query(description="Dimension of the rows: day, queue, owner, gpu, or the model that the jobs train."),
    ] = "day",
    form: FormParameter = "",
    accept: AcceptHeader = "",
) -> SavingsReportView | Response:
    """Return GPU time that jobs held, in queues that the caller may read, and GPU time that was idle while jobs waited,
    times the prices of EBBTIDE_GPU_PRICES."""
    period, prices = read_period(service, since, until), dict(service.settings.gpu_prices)
    usage = load_visible_usage(service, principal, period)
    bins = load_bins(service.store, usage.snapshot, period, usage.as_of_s)
    idle = sum_idle_time(bins, usage.snapshot, prices)
    total_idle = IdleTime()
    for each in idle.values():
        total_idle = total_idle.add(each)
    total = {**usage_sums(usage.entries), **_extra_sums(usage.entries, total_idle if bins else None, prices)}
    report: SavingsReportView = {
        "from_s": period.from_s,
        "to_s": period.to_s,
        "as_of_s": usage.as_of_s,
        "by": by,
        "currency": service.settings.currency if prices else None,
        "prices": prices,
        "unpriced": find_unpriced(usage.entries, prices),
        "recorded_since_s": min((each.at_s for each in bins), default=None),
        "items": savings_rows(usage.entries, by, idle, prices),
        "total": cast("SavingsSumsView", total),
    }
    return respond_with_csv(savings_csv(report), "savings.csv") if wants_csv(form, accept) else report
