"""`simulate`: traces in, a report out. What Python users call; `sweep` does it for several seeds, in parallel."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from scheduler.documents.cluster import (
    DEFAULT_MODEL,
    ClusterDocument,
    domain_nodes,
    domain_pools,
    domain_queues,
    read_cluster,
    refused_in,
)
from scheduler.documents.throughput import Measured
from scheduler.documents.trace import DemandRow, JobRow, TraceError, read_demand, read_jobs
from scheduler.domain.fleet import DAY_S
from scheduler.executors.simulated_delays import Delays
from scheduler.policies.policy_set import PolicySet, policy_set
from scheduler.policies.settings import PolicySettings
from scheduler.runtime.clock import ManualClock
from scheduler.simulator.curves import CurveBook
from scheduler.simulator.engine import Scenario, Simulation
from scheduler.simulator.forecasts import FORECASTERS, SEASONAL
from scheduler.simulator.hiding import true_submissions
from scheduler.simulator.policy_faults import Violations, naming
from scheduler.simulator.recorder import Recorder
from scheduler.simulator.report import Played, SimulationReport
from scheduler.simulator.traces import demand_traces
from scheduler.simulator.truth import AS_TOLD, Truth
from scheduler.solver.profiles.shipped import gpu_names, load_gpu

Policies = str | PolicySet | Sequence[str | PolicySet]
Progress = Callable[[int, int], None]
_ALL_JOBS = 10**12
_BOUNDLESS = 2**60


@dataclass(frozen=True, slots=True)
class Inputs:
    """The files of a simulation, read and checked one by one. `demand` is empty where the cluster serves nobody."""

    jobs: tuple[JobRow, ...]
    demand: tuple[DemandRow, ...]
    cluster: ClusterDocument


@dataclass(frozen=True, slots=True)
class Options:
    """How a simulation is played, beside the traces, the policies and the seed. `forecast`: one of `FORECASTERS`.
    `profiles`: measured throughput, which goes before the solver's. `truth`: what is hidden from the policies; its
    own seed is the simulation's."""

    forecast: str = SEASONAL
    profiles: tuple[Measured, ...] = ()
    truth: Truth = AS_TOLD

    def __post_init__(self) -> None:
        if self.forecast not in FORECASTERS:
            raise ValueError(f"forecast: {self.forecast!r} is not known; allowed: {', '.join(FORECASTERS)}")


DEFAULTS = Options()


def load_inputs(
    jobs_path: Path,
    demand_path: Path | None,
    cluster_path: Path,
    *,
    workload: str = "",
    profiles: Iterable[Measured] = (),
) -> Inputs:
    """Read the files. A cluster without an inference pool needs no demand. `workload` picks one of a file of several;
    GPUs that `profiles` measured need not be known to the solver.

    Raises:
        ValueError: a file cannot be read or something in it is refused; the message names file, field or line,
            value and what is allowed.
    """
    demand = () if demand_path is None else read_demand(demand_path)
    jobs, cluster = read_jobs(jobs_path, workload=workload), read_cluster(cluster_path)
    curves = CurveBook(profiles)
    for number, pool in enumerate(cluster.pools):
        if pool.gpu not in gpu_names() and not curves.measures_on(pool.gpu):
            allowed = ", ".join(gpu_names())
            raise refused_in(cluster_path, f"pools.{number}.gpu", pool.gpu, allowed)
    _refuse_another_clock(jobs, demand)
    return Inputs(jobs, demand, cluster)


def _refuse_another_clock(jobs: Sequence[JobRow], demand: Sequence[DemandRow]) -> None:
    """A demand is repeated after its end, but one that ends before the first job comes is told on another clock."""
    last = max(demand, key=lambda row: row.time_s, default=None)
    length_s = last.time_s - demand[0].time_s if last else 0.0
    if last and last.time_s + max(length_s, DAY_S) < jobs[0].submit_time_s:
        allowed = f"a demand that lasts until the first job comes, at {jobs[0].submit_time_s:g}"
        raise TraceError(f"{last.path} line {last.line}: time_s: got '{last.time_s:g}'; allowed: {allowed}")


def simulate(
    jobs: Sequence[JobRow],
    demand: Sequence[DemandRow],
    cluster: ClusterDocument,
    policy: Policies,
    *,
    seed: int,
    options: Options = DEFAULTS,
    progress: Progress | None = None,
) -> SimulationReport:
    """Play a trace under each policy set of `policy`: names with commas between, or names and sets of one's own.

    `progress(done, total)` counts ended jobs over all policy sets together. A set of one's own may be any
    composition of functions; it keeps its own settings:

    >>> from dataclasses import replace
    >>> from scheduler.documents.cluster import ClusterDocument
    >>> from scheduler.documents.trace import JobRow
    >>> from scheduler.policies.ordering import first_come
    >>> from scheduler.policies.policy_set import policy_set
    >>> def last_come(snapshot, settings):
    ...     return first_come(snapshot, settings)[::-1]
    >>> mine = replace(policy_set("fifo"), name="lifo", order=last_come)
    >>> pool = {"name": "training", "kind": "training", "nodes": 1, "gpus_per_node": 8, "gpu": "a100-80g"}
    >>> jobs = [JobRow(line=n, job_id=f"job-{n}", submit_time_s=0.0, duration_s=600.0 / n, gpus=n) for n in (3, 8)]
    >>> report = simulate(jobs, [], ClusterDocument.model_validate({"pools": [pool]}), ["fifo", mine], seed=0)
    >>> [(policy.policy, policy.jct_s.mean) for policy in report.policies]
    [('fifo', 237.5), ('lifo', 175.0)]

    Raises:
        ValueError: jobs, demand, cluster and policies do not fit together; the message says what is allowed.
        PolicyError: a policy set raised an error.
    """
    sets, curves = policy_sets(policy, cluster), CurveBook(options.profiles)
    worlds = [scenario(jobs, demand, cluster, one, seed=seed, curves=curves, options=options) for one in sets]
    total = len(jobs) * len(sets)
    played: list[Played] = []
    for number, (world, policies) in enumerate(zip(worlds, sets, strict=True)):

        def tell(ended: int, before: int = number * len(jobs)) -> None:
            if progress is not None:
                progress(before + ended, total)

        played.append(play(world, policies, curves=curves, progress=tell))
    return SimulationReport.of(seed, played)


def policy_sets(policy: Policies, cluster: ClusterDocument) -> list[PolicySet]:
    """Named sets with the settings that the cluster gives, sets of one's own as they are.

    Raises:
        ValueError: there is no set of that name.
    """
    settings = PolicySettings(
        full_pass_period_s=cluster.lending_period_s,
        reconfiguration_s=cluster.reconfiguration_s[DEFAULT_MODEL],
        reconfiguration_s_by_model=cluster.reconfiguration_s,
    )
    wanted = policy.split(",") if isinstance(policy, str) else [policy] if isinstance(policy, PolicySet) else policy
    return [policy_set(one.strip(), settings) if isinstance(one, str) else one for one in wanted]


def scenario(
    jobs: Sequence[JobRow],
    demand: Sequence[DemandRow],
    cluster: ClusterDocument,
    policies: PolicySet,
    *,
    seed: int,
    curves: CurveBook,
    options: Options = DEFAULTS,
) -> Scenario:
    """The simulation's world for one policy set: under one that does not scale, jobs keep to the trace's GPUs.

    A trace's run times have the start of the job in them, so that a first start takes no time here, unless the cluster
    says otherwise; a restart does.

    Raises:
        ValueError: jobs, demand and cluster do not fit together.
    """
    table, truth = cluster.reconfiguration_s, replace(options.truth, seed=seed)
    start_s = cluster.start_s
    delays = Delays(start_s=start_s, reconfiguration_s=table[DEFAULT_MODEL], reconfiguration_s_by_model=table)
    return Scenario(
        pools=domain_pools(cluster),
        nodes=domain_nodes(cluster, lambda gpu: _memory_bytes(gpu, curves)),
        submissions=true_submissions(jobs, cluster, curves, truth, elastic=policies.scales),
        demand=demand_traces(demand, cluster),
        delays=delays,
        seed=seed,
        forecast=options.forecast,
        truth=truth,
        queues=domain_queues(cluster),
    )


def _memory_bytes(gpu: str, curves: CurveBook) -> int:
    """Memory of one GPU; that of a GPU which is known by measurements alone is taken for boundless, as their plans."""
    return _BOUNDLESS if gpu not in gpu_names() and curves.measures_on(gpu) else load_gpu(gpu).memory_bytes


def play(
    world: Scenario, policies: PolicySet, *, curves: CurveBook, progress: Callable[[int], None] = lambda ended: None
) -> Played:
    """One policy set's report, and what happened over time.

    Raises:
        PolicyError: the policy set raised an error.
    """
    recorder, violations = Recorder(world), Violations()
    simulation = Simulation(world, policies, watchers=[recorder, violations], curves=curves)
    watch = ManualClock()
    started_s = watch.elapsed_s()
    with naming(policies.name, simulation.clock):
        last = simulation.run(progress)
    wall_s = watch.elapsed_s() - started_s
    ended = simulation.memory.ended_jobs(limit=_ALL_JOBS)
    report, series = recorder.report(policies.name, last, ended, simulation.executor.work)
    return replace(report, wall_s=wall_s, violations=violations.count, violated=violations.told()), series
