"""`simulate`: runs a trace under policy sets and returns a report. For several seeds in parallel, see `seed_sweep`."""

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
from scheduler.domain.lending_policy import DAY_S
from scheduler.domain.recall_receipts import count_outcomes
from scheduler.executors.simulated_run import Delays
from scheduler.scheduling.policies.settings import PolicySettings
from scheduler.scheduling.policy_sets import PolicySet, load_policy_set
from scheduler.simulator.checkpoint_sizes import compute_checkpoint_bytes
from scheduler.simulator.demand import COMBINED, FORECASTERS, DemandChange, build_demand_traces
from scheduler.simulator.engine import Scenario, Simulation, TickRecord
from scheduler.simulator.ground_truth import NOTHING_HIDDEN, GroundTruth, build_true_submissions
from scheduler.simulator.recorder import ReportRecorder
from scheduler.simulator.report import PolicyResult, SimulationReport
from scheduler.simulator.throughput_curves import CurveCache
from scheduler.simulator.workloads import count_gpu_models
from scheduler.solver.profiles.catalog import list_gpu_names, load_gpu
from scheduler.solver.profiles.gpu_throughput import list_throughputs

if TYPE_CHECKING:
    from scheduler.domain.tick_report import Invariant, Violation
    from scheduler.runtime.clock import Clock


class PolicyError(RuntimeError):
    """A policy set raised an error. The message names policy set, simulated time, error and line of code.

    `__cause__` is the original error if it was raised in this process.
    """


class ViolationCounter:
    """Counter of decisions that were dropped because they violate an invariant.

    It keeps the first of each invariant.
    """

    def __init__(self) -> None:
        self._first: dict[Invariant, tuple[float, Violation]] = {}
        self._counts: dict[Invariant, int] = {}

    def on_tick(self, tick: TickRecord) -> None:
        for violation in tick.report.violations:
            self._first.setdefault(violation.invariant, (tick.report.now_s, violation))
            self._counts[violation.invariant] = self._counts.get(violation.invariant, 0) + 1

    def on_demand_change(self, change: DemandChange) -> None:
        """Do nothing: demand violates no invariant."""

    @property
    def count(self) -> int:
        return sum(self._counts.values())

    def describe(self) -> tuple[str, ...]:
        """Describe, for each violated invariant, the number of dropped decisions and the first of them."""
        return tuple(
            f"{law}: {self._counts[law]} decisions dropped, the first at {at_s:g} s for {first.subject}: {first.detail}"
            for law, (at_s, first) in self._first.items()
        )


@contextmanager
def raise_as_policy_error(policy: str, clock: Clock) -> Iterator[None]:
    """Re-raise errors of the block as PolicyError with the name of the policy set and the simulated time.

    Raises:
        PolicyError: the block raised any error.
    """
    try:
        yield
    except Exception as error:
        place = extract_tb(error.__traceback__)[-1]
        raise PolicyError(
            f"policy {policy} failed at {clock.now_s():g} s: {type(error).__name__}: {error} "
            f"({Path(place.filename).name} line {place.lineno}, in {place.name})"
        ) from error


PolicySelection = str | PolicySet | Sequence[str | PolicySet]
ProgressCallback = Callable[[int, int], None]
_NO_JOB_LIMIT = 10**12
_UNLIMITED_BYTES = 2**60


@dataclass(frozen=True, slots=True)
class SimulationInputs:
    """The input files of a simulation. `demand` is empty if the cluster has no inference pool."""

    jobs: tuple[JobRow, ...]
    demand: tuple[DemandRow, ...]
    cluster: ClusterDocument


@dataclass(frozen=True, slots=True)
class SimulationOptions:
    """Options of a simulation.

    Args:
        forecast: one of `FORECASTERS`.
        profiles: measured throughput, which takes precedence over the solver.
        truth: differences between the cluster and the policies' view of it. Its seed is that of the simulation.
    """

    forecast: str = COMBINED
    profiles: tuple[MeasuredSteps, ...] = ()
    truth: GroundTruth = NOTHING_HIDDEN

    def __post_init__(self) -> None:
        if self.forecast not in FORECASTERS:
            raise ValueError(f"forecast: got {self.forecast!r}; allowed: {', '.join(FORECASTERS)}")


DEFAULT_OPTIONS = SimulationOptions()


def load_inputs(
    jobs_path: Path,
    demand_path: Path | None,
    cluster_path: Path,
    *,
    workload: str = "",
    profiles: Iterable[MeasuredSteps] = (),
) -> SimulationInputs:
    """Read and check the input files of a simulation.

    Args:
        demand_path: may be None if the cluster has no inference pool.
        workload: the name of a workload in a jobs file with several.
        profiles: measured throughput. GPU models that only these contain need no solver profile.

    Raises:
        ValueError: a file cannot be read or is not valid. The message names file, field or line, value and accepted
            values.
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
    """Refuse demand that ends long before the first job: the two files probably have different time origins."""
    last = max(demand, key=lambda row: row.time_s, default=None)
    length_s = last.time_s - demand[0].time_s if last else 0.0
    if last and last.time_s + max(length_s, DAY_S) < jobs[0].submit_time_s:
        allowed = f"demand until the first submission at {jobs[0].submit_time_s:g}"
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
    """Simulate a trace under each policy set.

    Args:
        policy: names separated by commas, or a list of names and policy sets. A custom policy set may combine any
            functions and keeps its own settings.
        progress: called as `progress(done, total)` with the ended jobs over all policy sets.

    Example:


    >>> from dataclasses import replace
    >>> from scheduler.documents.simulation import ClusterDocument
    >>> from scheduler.documents.trace_files import JobRow
    >>> from scheduler.scheduling.policies.job_order import first_come
    >>> from scheduler.scheduling.policy_sets import load_policy_set
    >>> def last_come(snapshot, settings):
    ...     return first_come(snapshot, settings)[::-1]
    >>> mine = replace(load_policy_set("fifo"), name="lifo", order=last_come)
    >>> pool = {"name": "training", "kind": "training", "nodes": 1, "gpus_per_node": 8, "gpu": "a100-80g"}
    >>> jobs = [JobRow(line=n, job_id=f"job-{n}", submit_time_s=0.0, duration_s=600.0 / n, gpus=n) for n in (3, 8)]
    >>> report = simulate(jobs, [], ClusterDocument.model_validate({"pools": [pool]}), ["fifo", mine], seed=0)
    >>> [(policy.policy, policy.jct_s.mean) for policy in report.policies]
    [('fifo', 237.5), ('lifo', 175.0)]

    Raises:
        ValueError: jobs, demand, cluster and policies do not fit together. The message names accepted values.
        PolicyError: a policy set raised an error.
    """
    sets, curves = resolve_policy_sets(policy, cluster), CurveCache(options.profiles)
    scenarios = [build_scenario(jobs, demand, cluster, one, seed=seed, curves=curves, options=options) for one in sets]
    total = len(jobs) * len(sets)
    results: list[PolicyResult] = []
    for number, (scenario, policies) in enumerate(zip(scenarios, sets, strict=True)):

        def report_progress(ended: int, before: int = number * len(jobs)) -> None:
            if progress is not None:
                progress(before + ended, total)

        results.append(run_policy(scenario, policies, curves=curves, progress=report_progress))
    return SimulationReport.from_results(seed, results)


def resolve_policy_sets(policy: PolicySelection, cluster: ClusterDocument) -> list[PolicySet]:
    """Load named policy sets with the settings of the cluster. Custom policy sets are returned unchanged.

    Raises:
        ValueError: a name is unknown.
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
    """Build the scenario for one policy set. Without elastic policies, jobs have the GPU counts of the trace.

    Run times of a trace include the start of the job, so that a first start takes no time unless the cluster document
    sets it. Restarts take time, and more of it the larger the job's checkpoint is.

    Raises:
        ValueError: jobs, demand and cluster do not fit together.
    """
    table, truth = cluster.reconfiguration_s, replace(options.truth, seed=seed)
    submissions = build_true_submissions(jobs, cluster, curves, truth, elastic=policies.scales)
    delays = Delays(start_s=cluster.start_s, reconfiguration_s=table[DEFAULT_MODEL], reconfiguration_s_by_model=table)
    if cluster.storage_bytes_per_s is not None:
        sizes = compute_checkpoint_bytes(submissions, count_gpu_models(cluster).most_common)
        delays = replace(delays, storage_bytes_per_s=cluster.storage_bytes_per_s, checkpoint_bytes=sizes)
    return Scenario(
        pools=build_pools(cluster),
        nodes=build_nodes(cluster, lambda gpu: _get_memory_bytes(gpu, curves)),
        submissions=submissions,
        demand=build_demand_traces(demand, cluster),
        delays=delays,
        seed=seed,
        forecast=options.forecast,
        truth=truth,
        queues=build_queues(cluster),
        gpu_throughputs=list_throughputs(),
    )


def _get_memory_bytes(gpu: str, curves: CurveCache) -> int:
    """Return the memory of a GPU. It is unlimited for models that are only measured, as their plans use none."""
    return (
        _UNLIMITED_BYTES if gpu not in list_gpu_names() and curves.has_measured_gpu(gpu) else load_gpu(gpu).memory_bytes
    )


def run_policy(
    scenario: Scenario, policies: PolicySet, *, curves: CurveCache, progress: Callable[[int], None] = lambda ended: None
) -> PolicyResult:
    """Run a scenario under one policy set and return its figures and series.

    Raises:
        PolicyError: the policy set raised an error.
    """
    recorder, violations = ReportRecorder(scenario, policies.settings), ViolationCounter()
    simulation = Simulation(scenario, policies, observers=[recorder, violations], curves=curves)
    started_s = simulation.clock.elapsed_s()
    with raise_as_policy_error(policies.name, simulation.clock):
        last = simulation.run(progress)
    wall_s = simulation.clock.elapsed_s() - started_s
    ended = simulation.memory_store.list_ended_jobs(limit=_NO_JOB_LIMIT)
    executor = simulation.executor
    report, series = recorder.build_report(
        policies.name, last, ended, executor.work, unserved=executor.list_unserved_demand()
    )
    receipts = (*simulation.memory_store.lending.receipts, *last.recalls.values())
    outcomes = {outcome.value: count for outcome, count in count_outcomes(receipts).items()}
    report = replace(report, wall_s=wall_s, recall_outcomes=outcomes)
    return replace(report, violations=violations.count, violated=violations.describe()), series
