"""Healthy fleets of different kinds have no problems at any look, and the faults of a simulation are named."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random

import pytest

from scheduler.documents.simulation import ClusterDocument, ClusterQueueDocument
from scheduler.domain.problems import Problem, ProblemCode
from scheduler.runtime.problem_recorder import measure_gpu_time
from scheduler.scheduling.policy_sets import PolicySet, load_policy_set
from scheduler.scheduling.problems.detection import find_problems
from scheduler.scheduling.problems.evidence import Evidence
from scheduler.scheduling.problems.job_activity import ActivityLog
from scheduler.simulator.demand import DemandChange
from scheduler.simulator.engine import Simulation, TickRecord
from scheduler.simulator.fault_injection import FaultInjector, FaultKind, FaultRates, SeededFaultInjector
from scheduler.simulator.simulate import SimulationOptions, build_scenario
from scheduler.simulator.throughput_curves import CurveCache
from tests.simulation.synthetic import small_cluster, synthetic_demand, synthetic_jobs

FLEETS = 20
POLICIES = ("ebbtide", "ebbtide", "fifo", "ebbtide", "srtf", "lyra", "ebbtide", "las", "afs", "ebbtide-loaning")
LOOK_S = 300.0
OPTIONS = SimulationOptions(forecast="oracle")


@dataclass(slots=True)
class Watcher:
    """Looks for problems every few minutes of a simulation."""

    policies: PolicySet
    simulation: Simulation | None = None
    log: ActivityLog = field(default_factory=ActivityLog)
    looks: int = 0
    found: list[Problem] = field(default_factory=list)
    next_look_s: float = 0.0

    def on_demand_change(self, change: DemandChange) -> None:
        pass

    def on_tick(self, tick: TickRecord) -> None:
        assert self.simulation is not None
        self.log.record(tick.report.events)
        now_s = tick.after.now_s
        if now_s < self.next_look_s:
            return
        self.next_look_s = now_s + LOOK_S
        self.looks += 1
        evidence = Evidence(
            now_s,
            self.policies.settings,
            lends=self.policies.lends,
            failed_jobs=self.simulation.memory_store.list_ended_jobs(limit=5),
            activity=self.log.count(now_s),
            gpu_time=measure_gpu_time(self.simulation.memory_store, now_s),
        )
        failed = tuple(job for job in evidence.failed_jobs if job.state == "failed")
        self.found += find_problems(tick.after, replace(evidence, failed_jobs=failed))


def watch(seed: int, policy: str, cluster: ClusterDocument, faults: FaultRates | None = None) -> Watcher:
    """Simulate half a day of jobs, and return the problems."""
    random = Random(f"fleet/{seed}")
    policies = load_policy_set(policy)
    inference = sum(pool.nodes for pool in cluster.pools if pool.kind == "inference")
    gap_s, mean_s = random.choice((600.0, 1200.0, 2400.0)), random.choice((1800.0, 5400.0))
    jobs = synthetic_jobs(seed, 18, gap_s=gap_s, mean_s=mean_s, sizes=(1, 2, 4, 8))
    if cluster.queues:
        jobs = tuple(replace(job, queue=random.choice(("research", "products", "default"))) for job in jobs)
    demand = synthetic_demand(seed, 2, peak_gpus=6.4 * inference) if inference else ()
    scenario = build_scenario(jobs, demand, cluster, policies, seed=seed, curves=CurveCache(), options=OPTIONS)
    watcher = Watcher(policies)
    names = tuple(node.name for node in scenario.nodes)
    injector: FaultInjector | None = SeededFaultInjector(seed, names, faults) if faults else None
    watcher.simulation = Simulation(scenario, policies, observers=[watcher], faults=injector)
    watcher.simulation.run()
    return watcher


def healthy_cluster(seed: int) -> ClusterDocument:
    """Return a cluster of one of several kinds: with and without inference, elastic jobs, and guaranteed queues."""
    random = Random(f"cluster/{seed}")
    cluster = small_cluster(training=random.choice((1, 2, 4)), inference=random.choice((2, 3, 6)))
    if seed % 5 == 2:
        cluster = cluster.model_copy(update={"pools": cluster.pools[:1]})
    if seed % 4 == 1:
        cluster = cluster.model_copy(update={"elastic": None})
    if seed % 3 == 0:
        queues = [
            ClusterQueueDocument(name="research", guaranteed_gpus=4),
            ClusterQueueDocument(name="products", guaranteed_gpus=2, limit_gpus=16),
        ]
        cluster = cluster.model_copy(update={"queues": queues})
    return cluster


@pytest.mark.parametrize("seed", range(FLEETS))
def test_healthy_fleet_has_no_problems(seed: int) -> None:
    watcher = watch(seed, POLICIES[seed % len(POLICIES)], healthy_cluster(seed))
    assert watcher.looks > 20
    assert [problem.cause for problem in watcher.found] == []


def test_faults_of_a_simulation_are_named() -> None:
    rates = FaultRates(until_s=40_000.0, mean_gap_s={FaultKind.NODE_LOSS: 4_000.0, FaultKind.WORKER_CRASH: 400.0})
    watcher = watch(3, "ebbtide", small_cluster(training=2, inference=2), rates)
    codes = {problem.code for problem in watcher.found}
    assert {ProblemCode.NODE_DOWN, ProblemCode.JOB_THRASHING, ProblemCode.JOB_FAILED} <= codes
