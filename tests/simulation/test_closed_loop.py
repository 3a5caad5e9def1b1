"""Jobs on a network that is not as its profile says: their plans become those for the true network."""

from __future__ import annotations

from dataclasses import replace

from scheduler.domain.decisions import ResizeJob, StartJob
from scheduler.domain.fleet import Node, Pool, PoolKind
from scheduler.domain.gpu_sets import GpuShape
from scheduler.domain.job_spec import JobSpec
from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.executors.simulated_run import Delays
from scheduler.scheduling.policy_sets import load_policy_set
from scheduler.simulator.demand import DemandChange
from scheduler.simulator.engine import Scenario, Simulation, TickRecord
from scheduler.simulator.ground_truth import GroundTruth
from scheduler.simulator.true_step_times import correct_hardware
from scheduler.simulator.workloads import Submission
from scheduler.solver.curve import build_solve_request
from scheduler.solver.evaluate import evaluate_unchecked
from scheduler.solver.search.plan_search import search_plan

GPU, HOUR_S = "a100-80g", 3600.0
TRUTH = GroundTruth(network=0.125)


class PlanRecorder:
    """The plans on 32 GPUs, in the order in which they were chosen."""

    def __init__(self) -> None:
        self.plans: list[ParallelPlan] = []

    def on_tick(self, tick: TickRecord) -> None:
        for decision in tick.report.decisions:
            if isinstance(decision, StartJob | ResizeJob):
                self.plans.append(decision.plan)

    def on_demand_change(self, change: DemandChange) -> None:
        """Do nothing: there is no inference."""


def test_an_owner_learns_that_the_network_is_slow() -> None:
    spec = JobSpec("train", 32, 32, model="llama-2-7b", global_batch=32, sequence_length=4096)
    (request, shape), recorder = (spec.curve_request, GpuShape.packed(GPU, 32, 8)), PlanRecorder()
    assert request is not None
    true_request = correct_hardware(build_solve_request(request, shape), TRUTH)
    best = search_plan(true_request, tolerance=1e-3)
    best_plan = best.full_shape_plan or best.result
    assert isinstance(best_plan, ParallelPlan)
    nodes = tuple(Node(f"node-{at}", "train", GPU, 8, 80 * 10**9) for at in range(4))
    jobs = tuple(
        Submission(at * 2 * HOUR_S, f"job-{at}", replace(spec, steps=2000), 32, 0.0, user="ann") for at in range(3)
    )
    pools = (Pool("train", PoolKind.TRAINING),)
    Simulation(
        Scenario(pools, nodes, jobs, (), Delays(), 0, truth=TRUTH), load_policy_set("ebbtide"), observers=(recorder,)
    ).run()
    steps_s = [evaluate_unchecked(plan, true_request).iteration_time_s for plan in recorder.plans]
    assert steps_s[0] > 2.0 * best_plan.iteration_time_s
    assert steps_s[-1] < 1.35 * best_plan.iteration_time_s
