"""True step times of a simulation. What they hide from policies is in its GroundTruth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache

from scheduler.domain.fleet import Node
from scheduler.domain.gpu_sets import GpuShape
from scheduler.domain.job import Job
from scheduler.domain.job_spec import JobSpec
from scheduler.domain.parallel_plan import STEP_TERMS, ParallelPlan
from scheduler.domain.relative_speed import RelativeSpeed, resolve_prior_speeds
from scheduler.domain.scaling_curve import CurveRequest
from scheduler.simulator.ground_truth import GroundTruth
from scheduler.solver.curve import build_solve_request
from scheduler.solver.evaluate import evaluate_unchecked
from scheduler.solver.profiles.learned_hardware import adjust_profile
from scheduler.solver.request import SolveRequest


class TrueStepTimes:
    """The true step time of a job on the GPUs, and under the plan, of its allocation."""

    def __init__(
        self, truth: GroundTruth, nodes: Iterable[Node], reference_gpu: str, gpu_throughputs: Mapping[str, float]
    ) -> None:
        """Args:
        reference_gpu, gpu_throughputs: as in Scenario.
        """
        self._truth = truth
        self._gpu_of_node = {node.name: node.gpu for node in nodes}
        self._slow_node = max(self._gpu_of_node, default="") if truth.slow_node != 1.0 else None
        self._linear_step_time_s = build_linear_truth(reference_gpu, gpu_throughputs)
        self._planned_s = cache(self._compute_planned_s)

    def compute_step_s(self, job: Job) -> float:
        """Return seconds per step of a job with GPUs and a plan."""
        target, plan = job.allocation.target, job.allocation.plan
        assert plan is not None, "a job with GPUs has a plan"
        shape = GpuShape.from_node_counts((self._gpu_of_node[name], len(indices)) for name, indices in target.items())
        slowdown = 1.0 / self._truth.slow_node if self._slow_node in target else 1.0
        return self._compute_s(job, plan, shape) * slowdown * self._truth.draw_step_time_factor(job.id, shape.gpus)

    def _compute_s(self, job: Job, plan: ParallelPlan, shape: GpuShape) -> float:
        request = job.spec.curve_request
        if request is None:
            counts = Counter[str]()
            for group in shape.groups:
                counts[group.gpu] += group.gpus
            return self._linear_step_time_s(job.spec, counts)
        if self._truth.hides_hardware and plan.terms:
            return self._planned_s(replace(request, frozen_layers=job.freezing.layers), shape, plan)
        return plan.profile_time_s or plan.iteration_time_s

    def _compute_planned_s(self, request: CurveRequest, shape: GpuShape, plan: ParallelPlan) -> float:
        return evaluate_unchecked(
            plan, correct_hardware(build_solve_request(request, shape), self._truth)
        ).iteration_time_s


def correct_hardware(request: SolveRequest, truth: GroundTruth) -> SolveRequest:
    """Return the request for GPUs and a network as fast as they truly are."""
    slowdowns = {"compute": 1.0 / truth.compute, "network": 1.0 / truth.network}
    factors = [slowdowns.get(name, 1.0) for name in STEP_TERMS]
    node_gpus = max(group.gpus_per_node for group in request.shape.groups)
    return replace(request, hardware=tuple(adjust_profile(each, factors, node_gpus) for each in request.hardware))


def build_linear_truth(
    reference: str, throughputs: Mapping[str, float]
) -> Callable[[JobSpec, Mapping[str, int]], float]:
    """Return the true step time, in seconds, of a job without a model on a number of GPUs by model.

    Speeds are those of GPU profiles, relative to the model that the job requests, or else to `reference`. A GPU model
    without a profile is as fast as the reference. Declared and measured speeds do not matter: they are what policies
    believe.
    """

    @cache
    def resolve(gpu: str) -> Mapping[str, RelativeSpeed]:
        return resolve_prior_speeds(gpu, {}, throughputs)

    def compute(spec: JobSpec, counts: Mapping[str, int]) -> float:
        speeds = resolve(spec.gpu or reference)
        return 1.0 / sum(count * (speeds[gpu].value if gpu in speeds else 1.0) for gpu, count in counts.items())

    return compute
