"""Generated worlds whose inference nodes have another GPU model than training."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import inf
from random import Random

from scheduler.domain import gpu_sets
from scheduler.domain.fleet import DemandReading, NodeState
from scheduler.domain.gpu_sets import Gpus, GpuShape
from scheduler.domain.job import Job
from scheduler.domain.job_state import JobState
from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan, Stage
from scheduler.domain.scaling_curve import ScalingCurve, build_data_parallel_plan
from scheduler.domain.snapshot import Snapshot, Switches
from tests.builders import GPU, a_job, a_loan, a_spec
from tests.properties.worlds import CURVE, World, a_world, observe

UNLIKE, RELATIVE_SPEED = "t4", 0.3


def an_unlike_world(seed: int) -> World:
    """Return the world of a seed with other inference GPUs. Jobs that hold both models have a model and a mixed plan.

    In half of the worlds no job is pending, each running job has whole nodes of training, and all others are lent.
    """
    random, world = Random(f"unlike/{seed}"), a_world(seed)
    snapshot = world.snapshot
    nodes = {
        name: replace(node, gpu=UNLIKE) if node.pool == "inference" else node for name, node in snapshot.nodes.items()
    }
    unlike = replace(snapshot, nodes=nodes, cached_index=None)
    jobs = {job_id: _fit_job(unlike, job) for job_id, job in snapshot.jobs.items()}
    if random.random() < 0.5:
        unlike = _lend_all(unlike)
        jobs = _place_on_whole_nodes(random, unlike)
    per_node = next(iter(nodes.values())).gpus
    curve = snapshot.curves[CURVE]
    assert isinstance(curve, ScalingCurve)
    own = {shape: build_plan({GPU: shape.gpus}, plan.iteration_time_s) for shape, plan in curve.plans.items()}
    curves = {CURVE: _with_unlike_shapes(random, ScalingCurve(own, curve.infeasible), per_node)}
    unlike = replace(unlike, jobs=jobs, curves=curves)
    return World(unlike, observe(random, unlike))


def _lend_all(snapshot: Snapshot) -> Snapshot:
    nodes = {
        name: replace(node, state=NodeState.UP, cordoned=False, draining=False) for name, node in snapshot.nodes.items()
    }
    loans = {name: a_loan(name) for name, node in nodes.items() if node.pool == "inference"}
    demand = {"inference": DemandReading(snapshot.now_s, 0.0, 0.0)}
    idle = replace(snapshot, nodes=nodes, loans=loans, demand=demand, forecasts={}, switches=Switches())
    return replace(idle, full_pass_at_s=-inf)


def _place_on_whole_nodes(random: Random, snapshot: Snapshot) -> dict[str, Job]:
    owned = sorted(name for name, node in snapshot.nodes.items() if node.pool == "training")
    jobs: dict[str, Job] = {}
    while owned:
        names = [owned.pop() for _ in range(min(len(owned), random.choice((1, 2))))]
        target = {name: tuple(range(snapshot.nodes[name].gpus)) for name in names}
        gpus = gpu_sets.count(target)
        spec = a_spec(1, 16 * gpus, model="llama-2-7b", global_batch=8, steps=random.choice((2_000, 50_000)))
        job = a_job(f"m{len(jobs)}", state=JobState.RUNNING, on=target, now_s=snapshot.now_s - 950.0)
        plan = build_plan({GPU: gpus}, 1.0 / gpus)
        jobs[job.id] = replace(job, spec=spec, allocation=replace(job.allocation, plan=plan))
    return jobs


def build_plan(counts: dict[str, int], step_s: float) -> ParallelPlan:
    """Return a plan for a model of two layers: a pipeline with one stage per GPU model."""
    gpus, layers = sum(counts.values()), 2 // len(counts)
    stages = (
        Stage(at * layers, (at + 1) * layers - 1, gpu, each, (LayerStrategy(layers, dp=each),))
        for at, (gpu, each) in enumerate(counts.items())
    )
    return replace(build_data_parallel_plan(GPU, gpus), iteration_time_s=step_s, stages=tuple(stages))


def _fit_job(snapshot: Snapshot, job: Job) -> Job:
    counts = _count_models(snapshot, job.allocation.target)
    if UNLIKE not in counts:
        return job
    spec = replace(job.spec, gpu="", model="llama-2-7b" if len(counts) > 1 else job.spec.model)
    plan = build_plan(counts, 1.0 / gpu_sets.count(job.allocation.target))
    return replace(job, spec=spec, allocation=replace(job.allocation, plan=plan))


def _count_models(snapshot: Snapshot, gpus: Gpus) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for name, indices in gpus.items():
        counts[snapshot.nodes[name].gpu] += len(indices)
    return dict(sorted(counts.items()))


def _with_unlike_shapes(random: Random, curve: ScalingCurve, per_node: int) -> ScalingCurve:
    """Add shapes of both models with a random efficiency; some are infeasible or not solved."""
    for own in (0, 1, 2, 3):
        for other in (1, 2, 3, 4):
            dice = random.random()
            shape = GpuShape.from_node_counts([(GPU, per_node)] * own + [(UNLIKE, per_node)] * other)
            speed = per_node * (own + RELATIVE_SPEED * other) * random.uniform(0.7, 1.0)
            counts = {gpu: per_node * nodes for gpu, nodes in ((GPU, own), (UNLIKE, other)) if nodes}
            if dice < 0.1:
                curve = curve.with_infeasible(shape, "does not fit")
            elif dice < 0.8:
                curve = curve.with_plan(shape, build_plan(counts, 1.0 / speed))
    return curve
