"""What lending gains for jobs without a model depends on the GPU model that is lent."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.documents.document import parse_document
from scheduler.documents.simulation import ClusterDocument
from scheduler.documents.trace_files import DemandRow, JobRow
from scheduler.domain.fleet import LoanState
from scheduler.domain.gpu_sets import count
from scheduler.scheduling.policy_sets import PolicySet, load_policy_set
from scheduler.simulator.demand import DemandChange
from scheduler.simulator.engine import Scenario, Simulation, TickRecord
from scheduler.simulator.simulate import SimulationOptions, build_scenario, simulate
from scheduler.simulator.throughput_curves import CurveCache
from scheduler.solver.profiles.gpu_throughput import list_throughputs

NO_DEMAND = tuple(DemandRow(2 + hour, hour * 3600.0, "served", 0.0, is_load=False) for hour in range(48))
KNOWN_DEMAND = SimulationOptions(forecast="oracle")  # a forecast from readings lends nothing on the first day
RIGID = tuple(JobRow(2 + n, f"job-{n}", 60.0 * n, 7200.0, 8) for n in range(6))


def cluster(lent: str, *, inference: int = 3, own: str = "v100-32g") -> ClusterDocument:
    hardware = {"gpus_per_node": 8}
    pools = [
        {"name": "own", "kind": "training", "nodes": 1, "gpu": own, **hardware},
        {"name": "served", "kind": "inference", "nodes": inference, "gpu": lent, "lending": {}, **hardware},
    ]
    return parse_document(ClusterDocument, {"pools": pools})


def build_lending(document: ClusterDocument, policies: PolicySet) -> Scenario:
    return build_scenario(RIGID, NO_DEMAND, document, policies, seed=0, curves=CurveCache(), options=KNOWN_DEMAND)


def mean_completion_s(lent: str, policy: str = "ebbtide") -> float:
    (result,) = simulate(RIGID, NO_DEMAND, cluster(lent), policy, seed=0, options=KNOWN_DEMAND).policies
    assert result.violations == 0
    return result.jct_s.mean


class StepTimes:
    """GPU-seconds per step of the running jobs, as the scheduler knows them, by GPU model; and active loans."""

    def __init__(self) -> None:
        self.by_model: dict[str, set[float]] = {}
        self.loans = 0

    def on_tick(self, tick: TickRecord) -> None:
        self.loans += sum(loan.state is LoanState.ACTIVE for loan in tick.after.loans.values())
        for job in tick.after.jobs.values():
            if job.step_time_s() < float("inf"):
                gpu = tick.after.nodes[min(job.allocation.target)].gpu
                step_gpu_s = job.step_time_s() * count(job.allocation.target)
                self.by_model.setdefault(gpu, set()).add(round(step_gpu_s, 6))

    def on_demand_change(self, change: DemandChange) -> None:
        """Do nothing."""


def test_lending_slower_gpus_gains_less() -> None:
    times_s = {lent: mean_completion_s(lent) for lent in ("t4", "v100-32g", "a100-80g")}
    alone_s = mean_completion_s("v100-32g", "fifo")
    assert times_s["a100-80g"] < times_s["v100-32g"] < times_s["t4"] < alone_s


@pytest.mark.parametrize("lent", ["t4", "h100-80g"])
def test_jobs_run_at_the_speed_of_the_lent_model(lent: str) -> None:
    policies, seen = load_policy_set("ebbtide"), StepTimes()
    scenario = build_scenario(
        RIGID, NO_DEMAND, cluster(lent), policies, seed=0, curves=CurveCache(), options=KNOWN_DEMAND
    )
    Simulation(scenario, policies, observers=[seen]).run()
    throughputs = list_throughputs()
    assert seen.loans
    slowdown = round(throughputs["v100-32g"] / throughputs[lent], 6)
    assert seen.by_model == {"v100-32g": {1.0}, lent: {slowdown}}


def test_scheduler_learns_the_true_speed_of_a_lent_model() -> None:
    """The table says that both models are equally fast. In the simulated world, a T4 is much slower."""
    policies = load_policy_set("ebbtide")
    scenario = build_scenario(
        RIGID, NO_DEMAND, cluster("t4"), policies, seed=0, curves=CurveCache(), options=KNOWN_DEMAND
    )
    simulation = Simulation(scenario, policies, observers=[seen := StepTimes()])
    simulation._scenario = replace(scenario, gpu_throughputs={"t4": 1.0, "v100-32g": 1.0})
    simulation.run()
    throughputs = list_throughputs()
    assert max(seen.by_model["t4"]) == pytest.approx(throughputs["v100-32g"] / throughputs["t4"], rel=0.01)


def test_fleet_of_one_model_gives_the_same_report_without_the_table() -> None:
    policies = load_policy_set("ebbtide")
    scenario = build_scenario(
        RIGID, NO_DEMAND, cluster("v100-32g"), policies, seed=0, curves=CurveCache(), options=KNOWN_DEMAND
    )
    ended = []
    for each in (scenario, replace(scenario, gpu_throughputs={})):
        simulation = Simulation(each, policies)
        simulation.run()
        jobs = simulation.memory_store.list_ended_jobs(limit=100)
        ended.append({job.id: (job.state_since_s, job.account) for job in jobs})
    assert ended[0] == ended[1]
