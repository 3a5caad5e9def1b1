"""What a policy set does wrong in a simulation: decisions that break a law, and errors of its own.

`simulate`: traces in, a report out. What Python users call; `sweep` does it for several seeds, in parallel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from traceback import extract_tb
from typing import TYPE_CHECKING

from scheduler.documents.simulation import (
    DEFAULT_MODEL,
    ClusterDocument,
    build_nodes,
    build_pools,
    build_queues,
    cluster_field_error,
    read_cluster,
)
from scheduler.documents.throughput import MeasuredSteps
from scheduler.documents.trace_files import DemandRow, JobRow, TraceError, read_demand, read_jobs
from scheduler.domain.fleet import DAY_S
from scheduler.executors.simulated_run import Delays
from scheduler.runtime.clock import ManualClock
from scheduler.scheduling.policies.policy_set import PolicySet, load_policy_set
from scheduler.scheduling.policies.settings import PolicySettings
from scheduler.simulator.demand import FORECASTERS, SEASONAL, DemandChange, build_demand_traces
from scheduler.simulator.engine import Scenario, Simulation, TickRecord
from scheduler.simulator.ground_truth import NOTHING_HIDDEN, GroundTruth, build_true_submissions
from scheduler.simulator.recorder import ReportRecorder
from scheduler.simulator.report import PolicyResult, SimulationReport
from scheduler.simulator.throughput_curves import CurveCache
from scheduler.solver.profiles.catalog import list_gpu_names, load_gpu

if TYPE_CHECKING:
    from scheduler.domain.tick_report import Invariant, Violation
    from scheduler.runtime.clock import Clock


class PolicyError(RuntimeError):
    """A policy set raised an error; the message names it, the time, the error and the line of code. `__cause__` is
    the error itself where it was raised in this process."""


class ViolationCounter:
    """Counts the decisions that were dropped because they broke a law, and keeps the first that broke each."""

    def __init__(self) -> None:
        self._first: dict[Invariant, tuple[float, Violation]] = {}
        self._counts: dict[Invariant, int] = {}

    def on_tick(self, tick: TickRecord) -> None:
        for violation in tick.report.violations:
            self._first.setdefault(violation.law, (tick.report.now_s, violation))
            self._counts[violation.law] = self._counts.get(violation.law, 0) + 1

    def on_demand_change(self, change: DemandChange) -> None:
        """Demand breaks no law."""

    @property
    def count(self) -> int:
        return sum(self._counts.values())

    def describe(self) -> tuple[str, ...]:
        """A sentence a law: whom it was broken with first, when and how, and how often in all."""
        return tuple(
            f"{law}: {self._counts[law]} dropped, first at {at_s:g} s that of {one.subject}: {one.detail}"
            for law, (at_s, one) in self._first.items()
        )


@contextmanager
def raise_as_policy_error(policy: str, clock: Clock) -> Iterator[None]:
    """Within it, whatever is raised is told of the policy set, with the clock's time.

    Raises:
        PolicyError: for every error.
    """
    try:
        yield
    except Exception as wrong:
        place = extract_tb(wrong.__traceback__)[-1]
        raise PolicyError(
            f"policy {policy} failed at {clock.now_s():g} s: {type(wrong).__name__}: {wrong} "
            f"({Path(place.filename).name} line {place.lineno}, in {place.name})"
        ) from wrong


PolicySelection = str | PolicySet | Sequence[str | PolicySet]
ProgressCallback = Callable[[int, int], None]
_NO_JOB_LIMIT = 10**12
_UNLIMITED_BYTES = 2**60


@dataclass(frozen=True, slots=True)
class SimulationInputs:
    """The files of a simulation, read and checked one by one. `demand` is empty where the cluster serves nobody."""

    jobs: tuple[JobRow, ...]
    demand: tuple[DemandRow, ...]
    cluster: ClusterDocument


@dataclass(frozen=True, slots=True)
class SimulationOptions:
    """How a simulation is played, beside the traces, the policies and the seed. `forecast`: one of `FORECASTERS`.
    `profiles`: measured throughput, which goes before the solver's. `truth`: what is hidden from the policies; its
    own seed is the simulation's."""

    forecast: str = SEASONAL
    profiles: tuple[MeasuredSteps, ...] = ()
    truth: GroundTruth = NOTHING_HIDDEN

    def __post_init__(self) -> None:
        if self.forecast not in FORECASTERS:
            raise ValueError(f"forecast: {self.forecast!r} is not known; allowed: {', '.join(FORECASTERS)}")


DEFAULT_OPTIONS = SimulationOptions()


def load_inputs(
    jobs_path: Path,
    demand_path: Path | None,
    cluster_path: Path,
    *,
    workload: str = "",
    profiles: Iterable[MeasuredSteps] = (),
) -> SimulationInputs:
    """Read the files. A cluster without an inference pool needs no demand. `workload` picks one of a file of several;
    GPUs that `profiles` measured need not be known to the solver.

    Raises:
        ValueError: a file cannot be read or something in it is refused; the message names file, field or line,
            value and what is allowed.
    """
    demand = () if demand_path is None else read_demand(demand_path)
    jobs, cluster = read_jobs(jobs_path, workload=workload), read_cluster(cluster_path)
    curves = CurveCache(profiles)
    for number, pool in enumerate(cluster.pools):
        if pool.gpu not in list_gpu_names() and not curves.has_measured_gpu(pool.gpu):
            allowed = ", ".join(list_gpu_names())
            raise cluster_field_error(cluster_path, f"pools.{number}.gpu", pool.gpu, allowed)
    _check_time_ranges(jobs, demand)
    return SimulationInputs(jobs, demand, cluster)


def _check_time_ranges(jobs: Sequence[JobRow], demand: Sequence[DemandRow]) -> None:
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
    policy: PolicySelection,
    *,
    seed: int,
    options: SimulationOptions = DEFAULT_OPTIONS,
    progress: ProgressCallback | None = None,
) -> SimulationReport:
    """Play a trace under each policy set of `policy`: names with commas between, or names and sets of one's own.

    `progress(done, total)` counts ended jobs over all policy sets together. A set of one's own may be any
    composition of functions; it keeps its own settings:

    >>> from dataclasses import replace
    >>> from scheduler.documents.simulation import ClusterDocument
    >>> from scheduler.documents.trace_files import JobRow
    >>> from scheduler.scheduling.policies.job_order import first_come
    >>> from scheduler.scheduling.policies.policy_set import policy_set
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
    sets, curves = resolve_policy_sets(policy, cluster), CurveCache(options.profiles)
    worlds = [build_scenario(jobs, demand, cluster, one, seed=seed, curves=curves, options=options) for one in sets]
    total = len(jobs) * len(sets)
    played: list[PolicyResult] = []
    for number, (world, policies) in enumerate(zip(worlds, sets, strict=True)):

        def tell(ended: int, before: int = number * len(jobs)) -> None:
            if progress is not None:
                progress(before + ended, total)

        played.append(run_policy(world, policies, curves=curves, progress=tell))
    return SimulationReport.from_results(seed, played)


def resolve_policy_sets(policy: PolicySelection, cluster: ClusterDocument) -> list[PolicySet]:
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
    return [load_policy_set(one.strip(), settings) if isinstance(one, str) else one for one in wanted]


def build_scenario(
    jobs: Sequence[JobRow],
    demand: Sequence[DemandRow],
    cluster: ClusterDocument,
    policies: PolicySet,
    *,
    seed: int,
    curves: CurveCache,
    options: SimulationOptions = DEFAULT_OPTIONS,
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
        pools=build_pools(cluster),
        nodes=build_nodes(cluster, lambda gpu: _get_memory_bytes(gpu, curves)),
        submissions=build_true_submissions(jobs, cluster, curves, truth, elastic=policies.scales),
        demand=build_demand_traces(demand, cluster),
        delays=delays,
        seed=seed,
        forecast=options.forecast,
        truth=truth,
        queues=build_queues(cluster),
    )


def _get_memory_bytes(gpu: str, curves: CurveCache) -> int:
    """Memory of one GPU; that of a GPU which is known by measurements alone is taken for boundless, as their plans."""
    return (
        _UNLIMITED_BYTES if gpu not in list_gpu_names() and curves.has_measured_gpu(gpu) else load_gpu(gpu).memory_bytes
    )


def run_policy(
    scenario: Scenario, policies: PolicySet, *, curves: CurveCache, progress: Callable[[int], None] = lambda ended: None
) -> PolicyResult:
    """One policy set's report, and what happened over time.

    Raises:
        PolicyError: the policy set raised an error.
    """
    recorder, violations = ReportRecorder(scenario), ViolationCounter()
    simulation = Simulation(scenario, policies, observers=[recorder, violations], curves=curves)
    watch = ManualClock()
    started_s = watch.elapsed_s()
    with raise_as_policy_error(policies.name, simulation.clock):
        last = simulation.run(progress)
    wall_s = watch.elapsed_s() - started_s
    ended = simulation.memory_store.list_ended_jobs(limit=_NO_JOB_LIMIT)
    report, series = recorder.build_report(policies.name, last, ended, simulation.executor.work)
    return replace(report, wall_s=wall_s, violations=violations.count, violated=violations.describe()), series
