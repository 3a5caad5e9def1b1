"""Time of the lending stage of a full pass: 10,000 inference nodes in 100 pools, of which a third is lent.

500 jobs run on lent nodes, and 200 wait. Each measurement uses a new
snapshot whose index is current, as it is after the earlier parts of a tick.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random
from statistics import median
from time import process_time

from scheduler.domain.fleet import DemandReading, Forecast, Pool, PoolKind
from scheduler.domain.job_state import JobState
from scheduler.domain.return_times import ReturnTimes
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling.cycle import SchedulingCycle
from scheduler.scheduling.policies.way_back import measure_ways_back
from scheduler.scheduling.policy_sets import load_policy_set
from scheduler.scheduling.stages.loans import adjust_loans
from tests.builders import a_job, a_loan, a_node, a_snapshot

POOLS, NODES_PER_POOL, LENT_PER_POOL, JOBS, WAITING, RUNS = 100, 100, 33, 500, 200, 30
NOW_S = 100_000.0
QUANTILES = (0.5, 0.9, 0.99, 0.9999)


def rows() -> list[tuple[str, str, str]]:
    """Return (name, target, measured)."""
    snapshot = build_lending_fleet(0)
    ways_s = [_time(lambda: measure_ways_back(snapshot, snapshot.pools.values())) for _ in range(RUNS)]
    return [
        _time_stage("pools lend", recalling=0, bar="20 ms"),
        _time_stage("a third of the pools take nodes back", recalling=POOLS // 3, bar=""),
        (f"measured way back of {POOLS} pools", "", f"{median(ways_s) * 1e3:.1f} ms"),
    ]


def _time_stage(course: str, *, recalling: int, bar: str) -> tuple[str, str, str]:
    policies, taken_s, counts = load_policy_set("ebbtide"), list[float](), Counter[str]()
    for run in range(RUNS):
        cycle = SchedulingCycle(build_lending_fleet(run, recalling=recalling), policies)
        gc.collect()
        taken_s.append(_time(partial(adjust_loans, cycle)))
        counts = Counter(type(each).__name__ for each in cycle.decisions)
    told = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    name = f"lending decision, {POOLS * NODES_PER_POOL:,} nodes in {POOLS} pools, {course}: {told}"
    return name, bar, f"{median(taken_s) * 1e3:.1f} ms"


def _time(action: Callable[[], object]) -> float:
    """Return the CPU seconds of an action."""
    begin_s = process_time()
    action()
    return process_time() - begin_s


def build_lending_fleet(seed: int, *, recalling: int = 0) -> Snapshot:
    """Return a fleet in a full pass, with an index that is current. The first `recalling` pools need nodes back."""
    random = Random(seed)
    pools = {f"p{at:03d}": Pool(f"p{at:03d}", PoolKind.INFERENCE) for at in range(POOLS)}
    nodes = {
        f"{pool}-n{at:03d}": a_node(f"{pool}-n{at:03d}", pool, inference_gpus=0 if at < LENT_PER_POOL else 8)
        for pool in pools
        for at in range(NODES_PER_POOL)
    }
    lent = [f"{pool}-n{at:03d}" for pool in pools for at in range(LENT_PER_POOL)]
    loans = [replace(a_loan(name), pool=nodes[name].pool) for name in lent]
    spans = [lent[at * 6 : at * 6 + 6] for at in range(JOBS)]
    all_gpus = tuple(range(8))
    running = [
        a_job(f"r{at:04d}", 8, 48, state=JobState.RUNNING, on=dict.fromkeys(span, all_gpus))
        for at, span in enumerate(spans)
    ]
    waiting = [a_job(f"w{at:04d}", 8, 64, now_s=float(at)) for at in range(WAITING)]
    demand, forecasts, times = {}, {}, {}
    for at, pool in enumerate(pools):
        more_nodes = random.randint(1, 4) if at < recalling else -random.randint(4, 12)
        needed = 8.0 * (NODES_PER_POOL - LENT_PER_POOL + more_nodes)
        demand[pool] = DemandReading(NOW_S, needed * 0.8, needed * 0.8)
        forecasts[pool] = Forecast(NOW_S, 600.0, QUANTILES, tuple(needed * each for each in (0.85, 0.9, 0.95, 1.0)), "")
        times[pool] = ReturnTimes()
        for at in range(100):
            times[pool] = times[pool].with_leave_time(f"r{at % JOBS:04d}", random.uniform(10.0, 60.0))
    snapshot = a_snapshot(
        (pools, nodes),
        [*running, *waiting],
        loans,
        now_s=NOW_S,
        demand=demand,
        forecasts=forecasts,
        return_times=times,
    )
    assert snapshot.index
    return snapshot
