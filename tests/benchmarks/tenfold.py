"""Growth of the simulator's time with the fleet: itp_cluster04 on 80 + 80 nodes, and tenfold jobs on tenfold nodes.

The copies of a job are submitted within ten minutes of it, so that there are ten times as many events. Both fleets make
a full pass every 5 minutes. `python -m tests.benchmarks.tenfold` simulates all 15,802 jobs instead of the first
thousand.
"""

from __future__ import annotations

import resource
from collections.abc import Iterable
from dataclasses import replace
from multiprocessing import get_context
from random import Random
from time import process_time

from scheduler.documents.trace_files import JobRow, read_demand, read_jobs
from scheduler.simulator.simulate import SimulationOptions, build_scenario, resolve_policy_sets, run_policy
from scheduler.simulator.throughput_curves import CurveCache
from tests.benchmarks.regime import DEMAND, REGIMES, data_folder, regime_cluster

TIMES = 10
FIRST_JOBS = 1_000
SPREAD_S = 600.0

Row = tuple[str, str, str]
Cost = tuple[float, int, float]
"""CPU seconds, ticks, peak memory in GiB."""


def rows(first_jobs: int = FIRST_JOBS) -> list[Row]:
    """Return (name, target, measured). Each fleet is simulated in a separate process, one after the other."""
    once, tenfold = (_in_own_process(times, first_jobs) for times in (1, TIMES))
    which = f"the first {first_jobs:,}" if first_jobs else "all"
    return [
        (f"ebbtide on itp_cluster04, {which} jobs", "under 1 GiB", _told(once)),
        ("the same, 10 times the pools and jobs", "under 15 times the time", _told(tenfold)),
        ("time over time", "under 15", f"{tenfold[0] / once[0]:.1f}"),
    ]


def _told(cost: Cost) -> str:
    cpu_s, ticks, gib = cost
    return f"{cpu_s:,.0f} s for {ticks:,} ticks, {gib:.2f} GiB"


def _in_own_process(times: int, first_jobs: int) -> Cost:
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(_simulate, (times, first_jobs))


def _simulate(times: int, first_jobs: int) -> Cost:
    data, regime = data_folder(), REGIMES["04"]
    jobs = multiply_jobs(read_jobs(data / f"jobs/itp_cluster{regime.trace}.csv.gz")[: first_jobs or None], times)
    cluster = regime_cluster(regime.nodes * times)
    (policies,) = resolve_policy_sets("ebbtide", cluster)
    curves = CurveCache()
    world = build_scenario(
        jobs, read_demand(data / DEMAND), cluster, policies, seed=0, curves=curves, options=SimulationOptions()
    )
    begin_s = process_time()
    report, _ = run_policy(world, policies, curves=curves)
    memory_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)
    return process_time() - begin_s, report.ticks, memory_gib


def multiply_jobs(rows: Iterable[JobRow], times: int) -> tuple[JobRow, ...]:
    """Yield each row and `times` - 1 copies of it that are submitted a little later."""
    random = Random(0)
    copies = [
        replace(row, job_id=f"{row.job_id}-{at}", submit_time_s=row.submit_time_s + delay_s)
        for row in rows
        for at, delay_s in enumerate([0.0, *(random.uniform(0.0, SPREAD_S) for _ in range(times - 1))])
    ]
    return tuple(sorted(copies, key=lambda row: (row.submit_time_s, row.job_id)))


if __name__ == "__main__":
    for name, bar, measured in rows(first_jobs=0):
        print(f"{name}: {measured} ({bar})")
