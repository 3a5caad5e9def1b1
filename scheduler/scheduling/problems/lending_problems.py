"""Problems of lending: short inference, recalls near or past their deadline, unknown demand, forgotten switches."""

from __future__ import annotations

from collections.abc import Iterator

from scheduler.domain.fleet import DemandReading, Forecast, Loan, Pool, PoolKind
from scheduler.domain.problems import Problem, ProblemCode, Severity, SubjectKind
from scheduler.domain.shortages import INTERVAL_S
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling.policies.lending import find_demand_stale_s
from scheduler.scheduling.problems.evidence import Evidence
from scheduler.scheduling.problems.sentences import describe_count, describe_gpus

RISK_SHARE = 0.2
"""Remaining share of `return_deadline_s` in which a node that jobs still hold is at risk: 60 s of 300 s. Jobs that save
in time have left before, and an operator can still act."""
FORECAST_INTERVALS_MIN = 24
"""Two hours of demand readings. A new pool has no forecast at first, which is no problem."""
FORECAST_AGE_S_MAX = 3600.0
"""Forecasts are made at every full pass, at most minutes apart, while readings arrive."""
SWITCH_AGE_S = 8 * 3600.0
"""One shift. An incident for which lending was stopped is over by then, or has another person in charge."""


def find_lending_problems(snapshot: Snapshot, evidence: Evidence) -> Iterator[Problem]:
    for pool in snapshot.pools.values():
        if pool.kind is PoolKind.INFERENCE:
            yield from _find_shortage(snapshot, pool)
            yield from _find_unknown_demand(snapshot, pool, evidence)
    for name in snapshot.index.recalled:
        yield from _find_recall_problem(snapshot, snapshot.loans[name], evidence.now_s)
    yield from _find_forgotten_switch(snapshot, evidence.now_s)


def _find_shortage(snapshot: Snapshot, pool: Pool) -> Iterator[Problem]:
    """Yield a problem if inference is short because of loans, which is critical, or of cordoned and down nodes."""
    reading = snapshot.demand.get(pool.name)
    supply = snapshot.index.inference_capacity.get(pool.name, 0)
    if reading is None or reading.asked_gpus <= supply:
        return
    lent, capacity = snapshot.index.lent_gpus.get(pool.name, 0), snapshot.capacity(pool.name)
    is_lending = lent > 0 and reading.gpus > supply
    if is_lending and snapshot.index.unrecalled_loan_counts.get(pool.name):
        rest = f"; {describe_gpus(lent, 'lent')}"
        advice, command = "Recall all loans now, and raise the pool's headroom.", "ebbtide lending recall-all"
    elif is_lending:
        rest = f"; {describe_gpus(lent, 'recalled and not back yet')}"
        advice, command = "Find out when its nodes come back, and raise the pool's headroom.", "ebbtide loans"
    elif supply < capacity:
        rest = f"; {describe_gpus(capacity - supply, 'on cordoned nodes')}"
        advice, command = "Uncordon nodes that work.", f"ebbtide nodes list --pool {pool.name}"
    else:
        rest = " and nothing is lent"
        advice, command = "Add nodes to the pool, or repair those that are down.", f"ebbtide explain pool {pool.name}"
    yield Problem(
        ProblemCode.INFERENCE_SHORT,
        Severity.CRITICAL if is_lending else Severity.WARNING,
        SubjectKind.POOL,
        pool.name,
        f"Inference of pool {pool.name} needs {reading.asked_gpus:.1f} GPUs and has {supply}{rest}.",
        advice,
        command,
        since_s=_find_short_since_s(reading),
        numbers={"asked_gpus": reading.asked_gpus, "supply_gpus": float(supply), "lent_gpus": float(lent)},
    )


def _find_short_since_s(reading: DemandReading) -> float:
    """Return the start of the current interval if it is short already, else the time of the reading."""
    record = reading.shortages
    if record.is_short and record.interval is not None:
        return min(reading.at_s, record.interval * INTERVAL_S)
    return reading.at_s


def _find_unknown_demand(snapshot: Snapshot, pool: Pool, evidence: Evidence) -> Iterator[Problem]:
    """Yield the problem of demand that is not reported, or not forecast. A pool that lends nothing needs neither."""
    rules, reading = pool.lending, snapshot.demand.get(pool.name)
    lent = snapshot.index.lent_gpus.get(pool.name, 0)
    if not (rules.enabled and evidence.lends) and not lent:
        return
    if reading is None:
        if not rules.demand_profile and snapshot.index.up_node_counts.get(pool.name):
            yield _describe_missing_demand(pool)
        return
    stale_s = find_demand_stale_s(pool, evidence.settings)
    age_s = evidence.now_s - reading.at_s
    if age_s >= rules.find_demand_lost_s(stale_s):
        yield _describe_old_demand(pool, reading, lent, ProblemCode.DEMAND_LOST)
    elif age_s > stale_s:
        yield _describe_old_demand(pool, reading, lent, ProblemCode.DEMAND_STALE)
    else:
        yield from _find_missing_forecast(pool, reading, snapshot.forecasts.get(pool.name))


def _describe_missing_demand(pool: Pool) -> Problem:
    return Problem(
        ProblemCode.DEMAND_MISSING,
        Severity.NOTICE,
        SubjectKind.POOL,
        pool.name,
        f"Pool {pool.name} may lend, but its demand was never reported, so it lends nothing.",
        "Set the pool's demand source, report demand, or set lending.enabled to false.",
        f"ebbtide explain pool {pool.name}",
    )


def _describe_old_demand(pool: Pool, reading: DemandReading, lent: int, code: ProblemCode) -> Problem:
    is_lost = code is ProblemCode.DEMAND_LOST
    effect = "all its loans are recalled" if is_lost else "it makes no new loans"
    return Problem(
        code,
        Severity.CRITICAL if is_lost else Severity.WARNING,
        SubjectKind.POOL,
        pool.name,
        f"The demand of pool {pool.name} is no longer reported, last {reading.gpus:.1f} GPUs, so {effect}; "
        f"{describe_gpus(lent, 'lent')}.",
        "Restore the demand source.",
        f"ebbtide explain pool {pool.name}",
        since_s=reading.at_s,
        numbers={"gpus": reading.gpus, "lent_gpus": float(lent)},
    )


def _find_missing_forecast(pool: Pool, reading: DemandReading, forecast: Forecast | None) -> Iterator[Problem]:
    if forecast is None:
        if reading.shortages.intervals < FORECAST_INTERVALS_MIN:
            return
        found, since_s = "has no forecast", None
    elif reading.at_s - forecast.made_at_s > FORECAST_AGE_S_MAX:
        found, since_s = "has had no new forecast", forecast.made_at_s
    else:
        return
    yield Problem(
        ProblemCode.FORECAST_MISSING,
        Severity.WARNING,
        SubjectKind.POOL,
        pool.name,
        f"Pool {pool.name} {found} although its demand is reported, last {reading.gpus:.1f} GPUs.",
        "Read the controller's log: its forecaster may have failed.",
        f"ebbtide forecast show {pool.name}",
        since_s=since_s,
        numbers={"gpus": reading.gpus},
    )


def _find_recall_problem(snapshot: Snapshot, loan: Loan, now_s: float) -> Iterator[Problem]:
    if loan.return_by_s is None:
        return
    held, gpus = snapshot.index.holders.get(loan.node, {}), loan.count_gpus(snapshot.nodes[loan.node])
    remaining_s = loan.return_by_s - now_s
    risk_s = RISK_SHARE * snapshot.pools[loan.pool].lending.return_deadline_s
    is_late = remaining_s < 0
    if not is_late and (remaining_s > risk_s or not held):
        return
    jobs = len(set(held.values()))
    holders = f"{describe_count(jobs, 'job')} hold{'s' * (jobs == 1)} {len(held)} of its {gpus} GPUs"
    state = "is past its deadline to return" if is_late else "must return soon"
    if held:
        advice = "Find what its jobs wait for, such as a slow save, and end them if inference needs the node."
    else:
        advice = "Read the controller's log: the node is free, but was not returned."
    yield Problem(
        ProblemCode.RECALL_LATE if is_late else ProblemCode.RECALL_AT_RISK,
        Severity.CRITICAL if is_late else Severity.WARNING,
        SubjectKind.NODE,
        loan.node,
        f"Node {loan.node} of pool {loan.pool} {state}; {holders if held else 'no job holds it'}.",
        advice,
        f"ebbtide events {loan.node}",
        since_s=loan.return_by_s if is_late else loan.state_since_s,
        numbers={"jobs": float(jobs), "held_gpus": float(len(held)), "gpus": float(gpus)},
    )


def _find_forgotten_switch(snapshot: Snapshot, now_s: float) -> Iterator[Problem]:
    switches, set_at_s = snapshot.switches, snapshot.lending_set_at_s
    is_stopped = switches.lending_paused or switches.loans_recalled
    if not is_stopped or set_at_s is None or now_s - set_at_s < SWITCH_AGE_S:
        return
    state = "All loans are recalled" if switches.loans_recalled else "Lending is paused"
    author = snapshot.lending_set_by or "an unnamed caller"
    yield Problem(
        ProblemCode.LENDING_STOPPED,
        Severity.NOTICE,
        SubjectKind.SERVICE,
        "",
        f"{state}, set by {author}, and nothing new is lent.",
        "Resume lending if the reason is over.",
        "ebbtide lending resume",
        since_s=set_at_s,
    )
