"""Reports of inference demand: the present demand of a pool, with proposed replicas, and readings of its past."""

from __future__ import annotations

from dataclasses import dataclass, replace

from scheduler.domain.commands import ReportDemand, ReportDemandHistory
from scheduler.domain.events import EventCode
from scheduler.domain.fleet import DemandReading, get_shortages
from scheduler.domain.replica_advice import ReplicaAdvice, advise_replicas, count_demanded_gpus
from scheduler.domain.serving import ModelLoad, name_rate_series
from scheduler.scheduling.mutable_snapshot import MutableSnapshot


@dataclass(frozen=True, slots=True)
class _Demand:
    """GPUs that a report asks for, the requests from which they follow, and the advice after it."""

    asked_gpus: float
    loads: tuple[ModelLoad, ...]
    advice: tuple[ReplicaAdvice, ...]


def record_demand(snapshot: MutableSnapshot, report: ReportDemand, at_s: float) -> None:
    """Record a demand reading. Demand above the pool's capacity is clamped to it, with an event."""
    if not _check_pool(snapshot, report.pool):
        return
    previous = snapshot.demand.get(report.pool)
    if previous is not None and previous.at_s > at_s:
        return
    before = _get_advice(snapshot, report.pool)
    reading = _record_present(snapshot, report.pool, at_s, _size(snapshot, report, min(at_s, snapshot.now_s)))
    _record_rates(snapshot, reading, report.pool)
    _record_proposals(snapshot, reading, before, report.pool)


def record_demand_history(snapshot: MutableSnapshot, report: ReportDemandHistory) -> None:
    """Record readings of any age.

    The newest reading of the report becomes the present demand if it is newer than the present one. All others are
    back-fill: they enter the history alone, because loans of the past are not known. A back-filled reading replaces the
    stored one of the same time, except the present one.
    """
    if not report.readings or not _check_pool(snapshot, report.pool):
        return
    previous = snapshot.demand.get(report.pool)
    *older, newest = report.readings
    if previous is None or newest[0] > previous.at_s:
        at_s, asked_gpus = newest
        _record_present(snapshot, report.pool, at_s, _Demand(asked_gpus, (), _get_advice(snapshot, report.pool)))
    else:
        older = list(report.readings)
    capacity = float(snapshot.capacity(report.pool))
    added = {
        (report.pool, at_s): DemandReading(at_s, min(gpus, capacity), gpus)
        for at_s, gpus in older
        if previous is None or at_s != previous.at_s
    }
    snapshot.backfill |= added
    if previous is not None and any(at_s < previous.at_s for _, at_s in added):
        present = snapshot.demand[report.pool]
        snapshot.demand[report.pool] = replace(present, backfills=present.backfills + 1)


def _check_pool(snapshot: MutableSnapshot, pool: str) -> bool:
    if pool in snapshot.pools:
        return True
    snapshot.refuse(pool, f"pool {pool} does not exist")
    return False


def _get_advice(snapshot: MutableSnapshot, pool: str) -> tuple[ReplicaAdvice, ...]:
    reading = snapshot.demand.get(pool)
    return () if reading is None else reading.advice


def _size(snapshot: MutableSnapshot, report: ReportDemand, at_s: float) -> _Demand:
    """Return what the report asks for. A report without requests leaves the advice as it is."""
    before, models = _get_advice(snapshot, report.pool), snapshot.pools[report.pool].serving
    if not report.loads:
        return _Demand(report.gpus, (), before)
    advice = advise_replicas(before, models, report.loads, at_s)
    return _Demand(count_demanded_gpus(models, report.loads, advice), report.loads, advice)


def _record_present(snapshot: MutableSnapshot, pool: str, at_s: float, demand: _Demand) -> DemandReading:
    """Make a reading the present demand of its pool, and add it to the record of shortages and to the history."""
    capacity, previous = snapshot.capacity(pool), snapshot.demand.get(pool)
    gpus, read_at_s = min(demand.asked_gpus, float(capacity)), min(at_s, snapshot.now_s)
    rules = snapshot.pools[pool].lending
    shortages = get_shortages(snapshot.demand, pool).observe(
        read_at_s,
        spare_gpus=capacity - gpus,
        lent_gpus=_count_lent_gpus(snapshot, pool),
        cold_start_s=rules.horizon_s if rules.is_shadow else rules.cold_start_s,
    )
    backfills = 0 if previous is None else previous.backfills
    past = DemandReading(read_at_s, gpus, demand.asked_gpus, shortages, backfills)
    reading = replace(past, loads=demand.loads, advice=demand.advice)
    snapshot.demand[pool] = reading
    snapshot.readings.append((pool, past))
    if demand.asked_gpus > capacity:
        message = f"demand of pool {pool} is {demand.asked_gpus:.1f} GPUs; clamped to its capacity of {capacity}"
        numbers = {"asked_gpus": demand.asked_gpus, "capacity_gpus": float(capacity)}
        snapshot.record_event(EventCode.DEMAND_CLAMPED, pool, message, numbers)
    return reading


def _count_lent_gpus(snapshot: MutableSnapshot, pool: str) -> int:
    """Return the GPUs of the pool on loan, with those that would be in shadow mode.

    A node of a shadow loan leaves at once, where a real one has its return deadline. The caller adds it to the cold
    start instead.
    """
    loans, shadow = snapshot.loans, snapshot.shadows.get(pool)
    lent_gpus = snapshot.original.index.lent_gpus.get(pool, 0)
    names = shadow.nodes if shadow is not None and snapshot.pools[pool].lending.is_shadow else ()
    would_be = (snapshot.nodes[name].loan_gpus for name in names if name in snapshot.nodes and name not in loans)
    return lent_gpus + sum(would_be)


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
