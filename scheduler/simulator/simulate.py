"""`simulate`: traces in, a report out. What `ebbtide simulate` calls, and Python users may."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from scheduler.documents.cluster import (
    DEFAULT_MODEL,
    ClusterDocument,
    ClusterError,
    domain_nodes,
    domain_pools,
    read_cluster,
)
from scheduler.documents.trace import DemandRow, JobRow, read_demand, read_jobs
from scheduler.executors.simulated_delays import Delays
from scheduler.policies.policy_set import PolicySet, policy_set
from scheduler.policies.settings import PolicySettings
from scheduler.runtime.clock import ManualClock
from scheduler.simulator.curves import CurveBook
from scheduler.simulator.engine import Scenario, Simulation
from scheduler.simulator.recorder import Recorder
from scheduler.simulator.report import PolicyReport, SimulationReport
from scheduler.simulator.traces import demand_traces
from scheduler.simulator.workloads import submissions
from scheduler.solver.profiles.shipped import gpu_names, load_gpu

_ALL_JOBS = 10**12


@dataclass(frozen=True, slots=True)
class Inputs:
    """The three files of a simulation, read and checked one by one."""

    jobs: tuple[JobRow, ...]
    demand: tuple[DemandRow, ...]
    cluster: ClusterDocument


def load_inputs(jobs_path: Path, demand_path: Path, cluster_path: Path) -> Inputs:
    """Read the three files.

    Raises:
        ValueError: a file cannot be read or something in it is refused; the message names file, field or line,
            value and what is allowed.
    """
    jobs, demand, cluster = read_jobs(jobs_path), read_demand(demand_path), read_cluster(cluster_path)
    for number, pool in enumerate(cluster.pools):
        if pool.gpu not in gpu_names():
            allowed = ", ".join(gpu_names())
            raise ClusterError(f"{cluster_path}: pools.{number}.gpu: got {pool.gpu!r}; allowed: {allowed}")
    return Inputs(jobs, demand, cluster)


def simulate(
    jobs: Sequence[JobRow],
    demand: Sequence[DemandRow],
    cluster: ClusterDocument,
    policy: str,
    *,
    seed: int,
    progress: Callable[[int, int], None] | None = None,
) -> SimulationReport:
    """Play a trace under each policy set of `policy` (one name, or several with commas between).

    `progress(done, total)` counts ended jobs over all policy sets together.

    Raises:
        ValueError: jobs, demand, cluster and policies do not fit together; the message says what is allowed.
    """
    settings = PolicySettings(
        full_pass_period_s=cluster.lending_period_s, reconfiguration_s=cluster.reconfiguration_s[DEFAULT_MODEL]
    )
    sets = [policy_set(name.strip(), settings) for name in policy.split(",")]
    curves = CurveBook()
    scenarios = [scenario(jobs, demand, cluster, policies, seed=seed, curves=curves) for policies in sets]
    total = len(jobs) * len(sets)
    reports = []
    for number, (world, policies) in enumerate(zip(scenarios, sets, strict=True)):
        done_before = number * len(jobs)

        def tell(ended: int, done_before: int = done_before) -> None:
            if progress is not None:
                progress(done_before + ended, total)

        reports.append(play(world, policies, curves=curves, progress=tell))
    return SimulationReport(seed, tuple(reports))


def scenario(
    jobs: Sequence[JobRow],
    demand: Sequence[DemandRow],
    cluster: ClusterDocument,
    policies: PolicySet,
    *,
    seed: int,
    curves: CurveBook,
) -> Scenario:
    """The simulation's world for one policy set: under one that does not scale, jobs keep to the trace's GPUs.

    A trace's run times have the start of the job in them, so that a first start takes no time here; a restart does.

    Raises:
        ValueError: jobs, demand and cluster do not fit together.
    """
    table = cluster.reconfiguration_s
    delays = Delays(start_s=0.0, reconfiguration_s=table[DEFAULT_MODEL], reconfiguration_s_by_model=table)
    return Scenario(
        pools=domain_pools(cluster),
        nodes=domain_nodes(cluster, lambda gpu: load_gpu(gpu).memory_bytes),
        submissions=submissions(jobs, cluster, curves, elastic=policies.scales),
        demand=demand_traces(demand, cluster),
        delays=delays,
        seed=seed,
    )


def play(
    world: Scenario, policies: PolicySet, *, curves: CurveBook, progress: Callable[[int], None] = lambda ended: None
) -> PolicyReport:
    """One policy set's report."""
    recorder = Recorder(world)
    simulation = Simulation(world, policies, watchers=[recorder], curves=curves)
    watch = ManualClock()
    started_s = watch.elapsed_s()
    last = simulation.run(progress)
    wall_s = watch.elapsed_s() - started_s
    ended = simulation.memory.ended_jobs(limit=_ALL_JOBS)
    return replace(recorder.report(policies.name, last, ended, simulation.executor.work), wall_s=wall_s)
