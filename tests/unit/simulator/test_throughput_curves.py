"""Measured curves: measured points, interpolation and shapes without a plan."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from scheduler.documents.throughput import ExecPlan, StepByGpuCount, StepByLocalBatch, StepByPlacement
from scheduler.domain.gpu_sets import GpuShape
from scheduler.domain.job_spec import JobSpec
from scheduler.domain.parallel_plan import ParallelPlan, Recompute
from scheduler.simulator.throughput_curves import CurveCache, PlanOrReason, build_measured_curves

ZERO, ONLY_TENSOR = ExecPlan(zero=2), ExecPlan(data=1, tensor=8)


def shape(*counts: int, gpu: str = "a800-80g") -> GpuShape:
    return GpuShape.from_node_counts((gpu, count) for count in counts)


def placed(times_s: dict[tuple[int, ...], float], plan: ExecPlan = ZERO) -> tuple[StepByPlacement, ...]:
    return tuple(StepByPlacement("a800-80g", "gpt2", at, plan, time_s) for at, time_s in times_s.items())


def point(
    steps: Iterable[StepByPlacement | StepByLocalBatch | StepByGpuCount], at: GpuShape, batch: int = 16
) -> PlanOrReason:
    (curves,) = build_measured_curves([steps])
    return curves.get_point("gpt2", batch, at)


def time_s(
    steps: Iterable[StepByPlacement | StepByLocalBatch | StepByGpuCount], at: GpuShape, batch: int = 16
) -> float:
    found = point(steps, at, batch)
    assert isinstance(found, ParallelPlan), found
    assert found.world_size == at.gpus
    return found.iteration_time_s


def test_only_measured_counts_have_a_plan_in_any_placement() -> None:
    steps = [StepByGpuCount("t4", "gpt2", 16, gpus, 8.0 / gpus) for gpus in (1, 2, 4)]
    assert time_s(steps, shape(4, gpu="t4")) == time_s(steps, shape(3, 1, gpu="t4")) == 2.0
    assert point(steps, shape(3, gpu="t4")) == "gpt2 at batch 16 was measured on 1 t4, 2 t4, 4 t4"
    assert isinstance(point(steps, shape(4)), str), "another GPU model was not measured"
    (curves,) = build_measured_curves([tuple(steps)])
    assert [curves.covers("gpt2", 16), curves.covers("gpt2", 32), curves.covers("bert", 16)] == [True, False, False]


def test_best_plan_of_a_placement_is_used() -> None:
    steps = (*placed({(8,): 1.0}), *placed({(8,): 0.75}, ONLY_TENSOR), *placed({(8,): 0.9}, ExecPlan(recompute=True)))
    best = point(steps, shape(8))
    assert isinstance(best, ParallelPlan)
    assert (best.iteration_time_s, best.stages[0].strategies[0].tp) == (0.75, 8)


def test_measured_plan_becomes_a_parallel_plan() -> None:
    whole = point(placed({(8, 8, 8, 8, 8, 8): 2.0}, ExecPlan(3, 4, 4)), shape(*[8] * 6), batch=4)
    assert isinstance(whole, ParallelPlan)
    first = whole.stages[0].strategies[0]
    assert (len(whole.stages), first.dp, first.tp, first.zero, whole.global_batch) == (4, 3, 4, 0, 4)
    offloaded = point(placed({(2, 2): 2.0}, ExecPlan(zero=2, recompute=True, offload=True)), shape(2, 2))
    assert isinstance(offloaded, ParallelPlan)
    strategy = offloaded.stages[0].strategies[0]
    assert (strategy.dp, strategy.shard_group, strategy.offload, strategy.recompute) == (4, 4, True, Recompute.FULL)
    assert (offloaded.samples_per_s, offloaded.peak_bytes_per_gpu) == (8.0, 0)


def test_fewer_nodes_are_no_slower() -> None:
    steps = placed({(6, 6, 6, 6): 5.0, (4, 4, 4, 4, 4, 4): 6.0}, ExecPlan(6, 4, 1))
    assert time_s(steps, shape(8, 8, 8)) == 6.0
    assert time_s(steps, shape(6, 6, 6, 6)) == 5.0
    assert isinstance(point(steps, shape(8, 8, 7, 1)), str), "a part of four does not fit on one"


def test_time_between_two_placements_is_interpolated() -> None:
    steps = placed({(2,): 1.8, (4,): 1.0, (8,): 0.6, (1, 1): 2.6, (5, 3): 0.8})
    assert time_s(steps, shape(3)) == pytest.approx(1.4)
    assert time_s(steps, shape(6)) == pytest.approx(0.8)
    assert time_s(steps, shape(3, 1)) == pytest.approx(2.6 - 1.8 * 2 / 6)
    assert [time_s(steps, shape(gpus)) for gpus in range(2, 9)] == sorted(
        (time_s(steps, shape(gpus)) for gpus in range(2, 9)), reverse=True
    ), "more GPUs are not slower where the measured ones are not"


def test_interpolation_is_an_upper_bound_of_a_convex_curve() -> None:
    measured: dict[tuple[int, ...], float] = {(gpus,): 4.0 / gpus + 0.1 for gpus in (1, 2, 4, 8)}
    for gpus in range(1, 9):
        assert time_s(placed(measured), shape(gpus)) >= 4.0 / gpus + 0.1 - 1e-12


def test_no_extrapolation_and_no_interpolation_of_other_plans() -> None:
    assert isinstance(point(placed({(2,): 1.8, (4,): 1.0}), shape(8)), str)
    assert isinstance(point(placed({(4,): 1.8, (8,): 1.0}, ExecPlan(1, 4, 1)), shape(6)), str)
    assert isinstance(point(placed({(4,): 1.8}), shape(2)), str)
    mixed = GpuShape.from_node_counts([("a800-80g", 4), ("t4", 4)])
    assert isinstance(point(placed({(4, 4): 1.0}), mixed), str)


def shared(at: tuple[int, ...], samples: dict[int, tuple[float, float]]) -> list[StepByLocalBatch]:
    return [StepByLocalBatch("t4", "gpt2", len(at), sum(at), at, local, *times) for local, times in samples.items()]


def test_local_batch_is_split_into_measured_micro_batches() -> None:
    steps = shared((2, 1), {4: (1.0, 0.25), 8: (1.5, 0.25)})
    at = shape(2, 1, gpu="t4")
    assert time_s(steps, at, batch=24) == 1.5
    assert time_s(steps, at, batch=18) == 1.25, "six samples, between four and eight"
    assert time_s(steps, at, batch=48) == 1.5 + 1.25, "two micro-batches; the first waits for nobody"
    assert "fewer than 4 samples" in str(point(steps, at, batch=9))
    assert isinstance(point(steps, shape(3, gpu="t4")), str)


def test_slowest_measurement_wins_and_large_shapes_use_counts() -> None:
    steps = [*shared((2, 1), {8: (1.5, 0.25)}), *shared((2, 1), {8: (2.0, 0.25)}), *shared((2, 1), {8: (1.0, 0.5)})]
    assert time_s(steps, shape(2, 1, gpu="t4"), batch=24) == 2.0
    many = [StepByLocalBatch("t4", "gpt2", 6, 24, (), 8, 3.0, 1.0)]
    assert time_s(many, shape(*[4] * 6, gpu="t4"), batch=192) == 3.0
    assert isinstance(point(many, shape(*[4] * 5, gpu="t4"), batch=160), str)


def test_measured_curves_take_precedence_over_the_solver() -> None:
    book = CurveCache([placed({(8,): 123.0}, ONLY_TENSOR)])
    spec = JobSpec("a", 8, 8, model="gpt2", global_batch=16)
    plan = book.get_job_point(spec, shape(8)).plan
    assert plan is not None
    assert plan.iteration_time_s == 123.0
    assert book.get_job_point(spec, shape(4)).infeasible.startswith("gpt2 was not measured on 1x4 a800-80g")
    solved = book.get_job_point(JobSpec("a", 8, 8, model="bert-large", global_batch=16), shape(8)).plan
    assert solved is not None
