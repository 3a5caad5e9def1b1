"""Record readings of inference demand, with the replicas that they propose."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.domain.commands import ReportDemand
from scheduler.domain.events import EventCode
from scheduler.domain.fleet import DemandReading, Pool, get_shortages
from scheduler.domain.replica_advice import ReplicaAdvice, advise_replicas, count_demanded_gpus
from scheduler.domain.serving import name_rate_series
from scheduler.scheduling.mutable_snapshot import MutableSnapshot


@dataclass(frozen=True, slots=True)
class _Sized:
    """GPUs that a report asks for, and the advice after it."""

    gpus: float
    advice: tuple[ReplicaAdvice, ...]


def record_demand(snapshot: MutableSnapshot, report: ReportDemand, at_s: float) -> None:
    """Record a demand reading. Demand above the pool's capacity is clamped to it, with an event."""
    pool, previous = snapshot.pools.get(report.pool), snapshot.demand.get(report.pool)
    if pool is None:
        snapshot.refuse(report.pool, f"pool {report.pool} does not exist")
        return
    if previous is not None and previous.at_s > at_s:
        return
    capacity, read_at_s = snapshot.capacity(report.pool), min(at_s, snapshot.now_s)
    before = () if previous is None else previous.advice
    sized = _size(report, pool, before, read_at_s)
    gpus = min(sized.gpus, float(capacity))
    shortages = get_shortages(snapshot.demand, report.pool).observe(
        read_at_s,
        spare_gpus=capacity - gpus,
        lent_gpus=snapshot.original.index.lent_gpus.get(report.pool, 0),
        cold_start_s=pool.lending.cold_start_s,
    )
    reading = DemandReading(read_at_s, gpus, sized.gpus, shortages, report.loads, sized.advice)
    snapshot.demand[report.pool] = reading
    snapshot.readings.append((report.pool, DemandReading(read_at_s, gpus, sized.gpus)))
    _record_rates(snapshot, reading, report.pool)
    _record_proposals(snapshot, reading, before, report.pool)
    if sized.gpus > capacity:
        message = f"demand of pool {report.pool} is {sized.gpus:.1f} GPUs; clamped to its capacity of {capacity}"
        numbers = {"asked_gpus": sized.gpus, "capacity_gpus": float(capacity)}
        snapshot.record_event(EventCode.DEMAND_CLAMPED, report.pool, message, numbers)


def _size(report: ReportDemand, pool: Pool, before: tuple[ReplicaAdvice, ...], at_s: float) -> _Sized:
    """Return what the report asks for. A report without requests leaves the advice as it is."""
    if not report.loads:
        return _Sized(report.gpus, before)
    advice = advise_replicas(before, pool.serving, report.loads, at_s)
    return _Sized(count_demanded_gpus(pool.serving, report.loads, advice), advice)


def _record_rates(snapshot: MutableSnapshot, reading: DemandReading, pool: str) -> None:
    """Record the request rate of each sized model, from which its rate is forecast."""
    sized = {each.model for each in reading.advice}
    for load in reading.loads:
        if load.model in sized:
            rate = DemandReading(reading.at_s, load.rate_per_s, load.rate_per_s)
            snapshot.readings.append((name_rate_series(pool, load.model), rate))


def _record_proposals(
    snapshot: MutableSnapshot, reading: DemandReading, before: tuple[ReplicaAdvice, ...], pool: str
) -> None:
    known = {each.model: each.replicas for each in before}
    rates = {load.model: load.rate_per_s for load in reading.loads}
    for each in reading.advice:
        if (last := known.get(each.model)) == each.replicas:
            continue
        since = "" if last is None else f", {last} before"
        rate = rates.get(each.model, 0.0)
        message = f"{each.replicas} replicas of {each.model} are proposed{since}, for {rate:g} requests/s"
        numbers = {"replicas": float(each.replicas), "rate_per_s": rate}
        snapshot.record_event(EventCode.REPLICAS_PROPOSED, pool, message, numbers)
