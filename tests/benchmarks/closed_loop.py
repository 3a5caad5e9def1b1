"""A simulated day on hardware that is not as its profile says: learning it, knowing it, and neither.

The network has an eighth of the bandwidth of the profile, the GPUs 0.7 of its rate, and one node of them 0.8 of that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from random import Random
from statistics import fmean, median

from scheduler.domain.commands import CurveSolved
from scheduler.domain.decisions import ResizeJob, StartJob
from scheduler.domain.fleet import Node, Pool, PoolKind
from scheduler.domain.gpu_sets import GpuShape
from scheduler.domain.job_spec import JobSpec
from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.domain.scaling_curve import CurveRequest
from scheduler.domain.tick_report import WantedShape
from scheduler.executors.simulated_run import Delays
from scheduler.scheduling.policy_sets import load_policy_set
from scheduler.simulator.demand import DemandChange
from scheduler.simulator.engine import Scenario, Simulation, TickRecord
from scheduler.simulator.ground_truth import GroundTruth
from scheduler.simulator.throughput_curves import CurveCache
from scheduler.simulator.true_step_times import correct_hardware
from scheduler.simulator.workloads import Submission
from scheduler.solver.curve import CURVE_TOLERANCE, build_curve_solved, build_solve_request
from scheduler.solver.evaluate import evaluate_unchecked
from scheduler.solver.search.plan_search import search_plan

TRUTH = GroundTruth(compute=0.7, network=0.125, slow_node=0.8)
GPU, NODES, NODE_GPUS, JOBS = "a100-80g", 16, 8, 60
MODELS = ("qwen3-8b", "llama-2-13b", "qwen3-32b", "llama-2-70b")
BATCHES, OWNERS = (32, 64, 128), 6
DAY_S = 86_400.0


class BlindCurves(CurveCache):
    """Curves by the profiles, whatever was learned."""

    def get_point(self, request: CurveRequest, shape: GpuShape) -> CurveSolved:
        return replace(super().get_point(replace(request, constants=()), shape), curve_key=request.key)


class KnowingCurves(CurveCache):
    """Curves by the true hardware."""

    def _compute_point(self, request: CurveRequest, wanted: WantedShape) -> CurveSolved:
        true_request = correct_hardware(build_solve_request(replace(request, constants=()), wanted.shape), TRUTH)
        found = search_plan(true_request, tolerance=CURVE_TOLERANCE)
        point = found.full_shape_plan or found.result
        if isinstance(point, ParallelPlan) and point.world_size != wanted.shape.gpus:
            return CurveSolved(wanted.curve_key, wanted.shape, None, found.remark)
        return build_curve_solved(wanted.curve_key, wanted.shape, point)


@dataclass(frozen=True, slots=True)
class ChosenPlan:
    """A plan that a decision chose at `at_s`, and its true step time over that of the best plan on its GPUs."""

    at_s: float
    ratio: float


class PlanReferee:
    """Compares each chosen plan with the best for the true hardware."""

    def __init__(self) -> None:
        self.chosen: list[ChosenPlan] = []
        self._find_best_s = cache(_find_best_s)
        self._price_s = cache(_price_s)

    def on_tick(self, tick: TickRecord) -> None:
        for decision in tick.report.decisions:
            if isinstance(decision, StartJob | ResizeJob):
                request = tick.after.jobs[decision.job_id].spec.curve_request
                assert request is not None
                shape = tick.after.shape_of(decision.gpus)
                ratio = self._price_s(request, shape, decision.plan) / self._find_best_s(request, shape)
                self.chosen.append(ChosenPlan(tick.after.now_s, ratio))

    def on_demand_change(self, change: DemandChange) -> None:
        """Do nothing: there is no inference."""


def _price_s(request: CurveRequest, shape: GpuShape, plan: ParallelPlan) -> float:
    return evaluate_unchecked(plan, correct_hardware(build_solve_request(request, shape), TRUTH)).iteration_time_s


def _find_best_s(request: CurveRequest, shape: GpuShape) -> float:
    found = search_plan(correct_hardware(build_solve_request(request, shape), TRUTH), tolerance=CURVE_TOLERANCE)
    best = found.full_shape_plan or found.result
    assert isinstance(best, ParallelPlan), f"no plan on {shape}"
    return best.iteration_time_s


def build_scenario(seed: int) -> Scenario:
    """Return a day of elastic jobs of several owners, of 1 to 6 hours on 16 GPUs by the profile."""
    random = Random(seed)
    nodes = tuple(Node(f"node-{at:02}", "train", GPU, NODE_GPUS, 80 * 10**9) for at in range(NODES))
    curves, submissions = CurveCache(), []
    for number in range(JOBS):
        model, batch = random.choice(MODELS), random.choice(BATCHES)
        spec = JobSpec(f"{model} {number}", 16, 64, model=model, global_batch=batch, sequence_length=4096)
        plan = curves.get_job_point(spec, GpuShape.packed(GPU, 16, NODE_GPUS)).plan
        assert plan is not None
        steps = round(random.uniform(1.0, 6.0) * 3600.0 / plan.iteration_time_s)
        at_s = random.uniform(0.0, DAY_S)
        owner = f"owner-{random.randrange(OWNERS)}"
        submissions.append(Submission(at_s, f"job-{number}", replace(spec, steps=steps), 16, 0.0, user=owner))
    pools = (Pool("train", PoolKind.TRAINING),)
    ordered = tuple(sorted(submissions, key=lambda each: each.at_s))
    return Scenario(pools, nodes, ordered, (), Delays(), seed, truth=TRUTH)


def play(scenario: Scenario, curves: CurveCache) -> tuple[float, PlanReferee]:
    """Return the mean job completion time in seconds, and the judged plans."""
    referee = PlanReferee()
    simulation = Simulation(scenario, load_policy_set("ebbtide"), observers=(referee,), curves=curves)
    simulation.run()
    ended = simulation.memory_store.list_ended_jobs(limit=JOBS)
    times_s = [job.state_since_s - job.submitted_at_s for job in ended]
    return fmean(times_s), referee


def rows() -> Iterator[tuple[str, str, str]]:
    for seed in range(2):
        scenario = build_scenario(seed)
        known_s, _ = play(scenario, KnowingCurves())
        learned_s, learned = play(scenario, CurveCache())
        blind_s, blind = play(scenario, BlindCurves())
        yield f"seed {seed}: mean JCT, learning over knowing", "1.05", f"{learned_s / known_s:.3f}"
        yield f"seed {seed}: mean JCT, without learning over knowing", "-", f"{blind_s / known_s:.3f}"
        for name, referee in (("learning", learned), ("without learning", blind)):
            for first, last in ((0, 6), (6, 12), (12, 24), (24, 99)):
                ratios = [each.ratio for each in referee.chosen if first <= each.at_s / 3600.0 < last]
                if ratios:
                    told = f"{median(ratios):.3f}, mean {fmean(ratios):.3f}, worst {max(ratios):.2f} of {len(ratios)}"
                    yield f"seed {seed}: {name}: plans of hours {first} to {last}, true step over best", "1.05", told
