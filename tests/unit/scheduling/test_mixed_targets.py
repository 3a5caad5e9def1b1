"""Jobs that no single GPU model can hold start on several models, and jobs on several shrink and grow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from scheduler.domain import gpu_sets
from scheduler.domain.decisions import ReasonCode, ResizeJob, StartJob
from scheduler.domain.gpu_sets import Gpus, GpuShape
from scheduler.domain.job import Job
from scheduler.domain.job_queue import JobQueue
from scheduler.domain.job_state import JobState
from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan, Stage
from scheduler.domain.scaling_curve import ScalingCurve, build_data_parallel_plan
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.tick_report import TickResult, WantedShape
from scheduler.scheduling.cycle import SchedulingCycle
from scheduler.scheduling.legality import find_violation
from scheduler.scheduling.mutable_snapshot import MutableSnapshot
from scheduler.scheduling.policy_sets import load_policy_set
from scheduler.scheduling.scheduler import decide
from scheduler.scheduling.target_selection import extend_target
from scheduler.simulator.throughput_curves import CurveCache
from tests.builders import GPU, a_fleet, a_job, a_node, a_snapshot

OTHER, THIRD = "h100-80g", "v100-32g"
WHOLE = tuple(range(8))
MIXED = GpuShape.from_node_counts([(GPU, 8), (OTHER, 4)])
OTHER_WAY = GpuShape.from_node_counts([(GPU, 4), (OTHER, 8)])


def plan_over(first: int, second: int, step_s: float) -> ParallelPlan:
    """Return a plan of one stage on each model."""
    one, other = build_data_parallel_plan(GPU, first), build_data_parallel_plan(OTHER, second)
    stages = (Stage(0, 0, GPU, first, one.stages[0].strategies), Stage(1, 1, OTHER, second, other.stages[0].strategies))
    return replace(one, iteration_time_s=step_s, stages=stages)


def large(gpu: str = "") -> Job:
    return a_job("large", 12, model="llama-2-7b", global_batch=8, gpu=gpu)


def seen(curve: ScalingCurve, job: Job | None = None) -> Snapshot:
    """Return a fleet of 8 GPUs of each model, and a job that needs 12."""
    pools, nodes = a_fleet(training=1, inference=0)
    curves = {large().spec.curve_key: curve}
    return a_snapshot((pools, {**nodes, "h0": a_node("h0", gpu=OTHER)}), [job or large()], curves=curves)


def decided(snapshot: Snapshot) -> TickResult:
    return decide(snapshot, load_policy_set("ebbtide"))


def started(result: TickResult) -> list[Gpus]:
    return [decision.gpus for decision in result.decisions if isinstance(decision, StartJob)]


def test_job_too_large_for_one_model_starts_on_two() -> None:
    result = decided(seen(ScalingCurve({MIXED: plan_over(8, 4, 1.0)})))
    assert started(result) == [{"h0": (0, 1, 2, 3), "t0": tuple(range(8))}]


def plan_over_three(first: int, second: int, third: int, step_s: float) -> ParallelPlan:
    """Return a plan of one stage on each model."""
    plan = plan_over(first, second, step_s)
    third_stage = Stage(2, 2, THIRD, third, build_data_parallel_plan(THIRD, third).stages[0].strategies)
    return replace(plan, stages=(*plan.stages, third_stage))


def test_job_too_large_for_two_models_starts_on_three() -> None:
    shape = GpuShape.from_node_counts([(GPU, 8), (OTHER, 8), (THIRD, 4)])
    pools, nodes = a_fleet(training=1, inference=0)
    nodes = {**nodes, "h0": a_node("h0", gpu=OTHER), "v0": a_node("v0", gpu=THIRD)}
    job = replace(large(), spec=replace(large().spec, min_gpus=20, max_gpus=20))
    snapshot = a_snapshot((pools, nodes), [job])
    requested = {wanted.shape for wanted in decided(snapshot).wanted_shapes}
    assert shape in requested
    solved = ScalingCurve({shape: plan_over_three(8, 8, 4, 1.0)})
    assert started(decided(replace(snapshot, curves={job.spec.curve_key: solved}))) == [
        {"t0": WHOLE, "h0": WHOLE, "v0": (0, 1, 2, 3)}
    ]


def test_mixed_start_respects_the_queue_limit() -> None:
    first = replace(large(), spec=replace(large().spec, priority=1))
    snapshot = seen(ScalingCurve({MIXED: plan_over(8, 4, 1.0)}), first)
    small = a_job("small", 4, gpu=OTHER)
    both = replace(snapshot, jobs={**snapshot.jobs, "small": small}, queues={"default": JobQueue("default")})
    assert len(started(decided(both))) == 2
    limited = replace(both, queues={"default": JobQueue("default", limit_gpus=15)})
    result = decided(limited)
    (start,) = started(result)
    assert (list(start), result.waiting["large"].code) == (["h0"], ReasonCode.WAITING_FOR_QUOTA)


def test_fastest_split_is_chosen() -> None:
    curve = ScalingCurve({MIXED: plan_over(8, 4, 1.0), OTHER_WAY: plan_over(4, 8, 0.5)})
    assert started(decided(seen(curve))) == [{"h0": tuple(range(8)), "t0": (0, 1, 2, 3)}]


def test_unsolved_splits_are_requested() -> None:
    result = decided(seen(ScalingCurve()))
    assert started(result) == []
    assert {WantedShape(large().spec.curve_key, shape) for shape in (MIXED, OTHER_WAY)} <= set(result.wanted_shapes)
    assert result.waiting["large"].code is ReasonCode.NO_MATCHING_FLAVOR


def test_job_with_a_gpu_model_is_not_mixed() -> None:
    result = decided(seen(ScalingCurve({MIXED: plan_over(8, 4, 1.0)}), large(gpu=GPU)))
    assert started(result) == []


def test_job_that_fits_one_model_waits_for_it() -> None:
    curve = ScalingCurve({MIXED: plan_over(8, 4, 1.0), GpuShape.packed(GPU, 8, 8): build_data_parallel_plan(GPU, 8)})
    assert started(decided(seen(curve, replace(large(), spec=replace(large().spec, min_gpus=8))))) == [
        {"t0": tuple(range(8))}
    ]


def test_solver_plan_for_two_models_is_legal() -> None:
    job = replace(large(), spec=replace(large().spec, global_batch=96))
    solved = CurveCache().get_job_point(job.spec, MIXED).plan
    assert solved is not None
    snapshot = replace(seen(ScalingCurve(), job), curves={job.spec.curve_key: ScalingCurve({MIXED: solved})})
    (start,) = decided(snapshot).decisions
    assert find_violation(MutableSnapshot(snapshot), start) is None
    assert {stage.gpu for stage in solved.stages} == {GPU, OTHER}


def data_parallel(gpus: int, step_s: float) -> ParallelPlan:
    """Return a plan for two layers."""
    plan = build_data_parallel_plan(GPU, gpus)
    return replace(plan, iteration_time_s=step_s, stages=(Stage(0, 1, GPU, gpus, (LayerStrategy(2, dp=gpus),)),))


def running(name: str, max_gpus: int, batch: int, on: Gpus) -> Job:
    job = a_job(name, 8, max_gpus, state=JobState.RUNNING, on=on, now_s=-5000.0, model="llama-2-7b", global_batch=batch)
    return replace(job, spec=replace(job.spec, steps=100_000))


def seen_with_mixed(
    on: Gpus, plan: ParallelPlan, own_step_s: Mapping[int, float], *others: Job, curves: Mapping[str, ScalingCurve]
) -> Snapshot:
    """Return a fleet of three nodes of one GPU model and one of another, and a job on both with these own plans."""
    pools, nodes = a_fleet(training=3, inference=0)
    mixed = running("mixed", 24, 8, on)
    mixed = replace(mixed, allocation=replace(mixed.allocation, plan=plan))
    own = {GpuShape.packed(GPU, gpus, 8): data_parallel(gpus, step_s) for gpus, step_s in own_step_s.items()}
    fleet = pools, {**nodes, "h0": a_node("h0", gpu=OTHER)}
    snapshot = a_snapshot(fleet, [mixed, *others])
    curve = ScalingCurve({**own, snapshot.shape_of(on): plan})
    return replace(snapshot, curves={**curves, mixed.spec.curve_key: curve})


def resized(snapshot: Snapshot) -> dict[str, Gpus]:
    return {each.job_id: each.gpus for each in decided(snapshot).decisions if isinstance(each, ResizeJob)}


def test_job_on_two_models_shrinks_for_one_that_gains_more() -> None:
    """Sixteen GPUs hardly speed `mixed` up, and make `steep`, which gets them once they are free, twice as fast."""
    steep = running("steep", 16, 16, {"t2": WHOLE})
    steep = replace(steep, allocation=replace(steep.allocation, plan=data_parallel(8, 10.0)))
    sizes = {GpuShape.packed(GPU, gpus, 8): data_parallel(gpus, step_s) for gpus, step_s in ((8, 10.0), (16, 5.0))}
    on, curves = {"t0": WHOLE, "t1": WHOLE, "h0": WHOLE}, {steep.spec.curve_key: ScalingCurve(sizes)}
    snapshot = seen_with_mixed(on, plan_over(16, 8, 9.8), {8: 10.0, 16: 9.9}, steep, curves=curves)
    assert {job: gpu_sets.count(gpus) for job, gpus in resized(snapshot).items()} == {"mixed": 8}


def test_job_on_two_models_grows_on_its_own_to_a_faster_part() -> None:
    """All own GPUs are free. Sixteen are as fast as 24."""
    on = {"t0": WHOLE, "h0": WHOLE}
    snapshot = seen_with_mixed(on, plan_over(8, 8, 9.0), {8: 10.0, 16: 5.0, 24: 5.0}, curves={})
    cycle, job = SchedulingCycle(snapshot, load_policy_set("ebbtide")), snapshot.jobs["mixed"]
    own = replace(job, allocation=replace(job.allocation, target={"t0": WHOLE}))
    target = extend_target(cycle, own, max_gpus=24, min_gpus=9)
    assert target is not None
    assert gpu_sets.count(target[0]) == 16


@pytest.mark.parametrize(("limit", "grown"), [(23, 0), (24, 1), (31, 1), (32, 2)])
def test_growth_over_models_stays_within_the_limit_that_jobs_share(limit: int, grown: int) -> None:
    """Each of two jobs gains from a node of the other model, and the limit permits none, one or both."""
    own, both = data_parallel(8, 10.0), GpuShape.from_node_counts([(GPU, 8), (OTHER, 8)])
    curve = ScalingCurve({GpuShape.packed(GPU, 8, 8): own, both: plan_over(8, 8, 5.0)})
    jobs = [running(f"j{batch}", 16, batch, {node: WHOLE}) for batch, node in ((8, "t0"), (16, "t1"))]
    pools, nodes = a_fleet(training=2, inference=0)
    snapshot = a_snapshot(
        (pools, {**nodes, **{name: a_node(name, gpu=OTHER) for name in ("h0", "h1")}}),
        [replace(job, allocation=replace(job.allocation, plan=own)) for job in jobs],
        curves={job.spec.curve_key: curve for job in jobs},
        queues={"default": JobQueue("default", 0, limit)},
    )
    assert len(resized(snapshot)) == grown


@pytest.mark.parametrize(("step_s", "grown"), [(5.0, 1), (10.5, 0)])
def test_job_on_two_models_grows_onto_a_third_if_that_gains(step_s: float, grown: int) -> None:
    on = {"t0": WHOLE, "h0": WHOLE}
    job = running("mixed", 24, 8, on)
    plan, three = plan_over(8, 8, 10.0), GpuShape.from_node_counts([(GPU, 8), (OTHER, 8), (THIRD, 8)])
    pools, nodes = a_fleet(training=1, inference=0)
    nodes = {**nodes, "h0": a_node("h0", gpu=OTHER), "v0": a_node("v0", gpu=THIRD)}
    snapshot = a_snapshot((pools, nodes), [replace(job, allocation=replace(job.allocation, plan=plan))])
    curve = ScalingCurve({snapshot.shape_of(on): plan, three: plan_over_three(8, 8, 8, step_s)})
    snapshot = replace(snapshot, curves={job.spec.curve_key: curve})
    assert [*resized(snapshot).values()] == [{**on, "v0": WHOLE}] * grown
