"""What a curve knows about GPUs that are wasted on its job."""

from __future__ import annotations

from dataclasses import replace

from scheduler.domain.gpu_shape import GpuShape
from scheduler.domain.scaling_curve import LINEAR_CURVE, ScalingCurve, data_parallel_plan
from tests.builders import GPU, a_curve

OTHER = "l40s"
ONE_NODE = GpuShape.packed(GPU, 8, 8)
TWO_NODES = GpuShape.packed(GPU, 16, 8)


def test_a_shape_is_wasteful_where_a_part_of_it_is_at_least_as_fast() -> None:
    assert a_curve({ONE_NODE: 10.0, TWO_NODES: 11.0}).better_part(TWO_NODES) == ONE_NODE
    assert a_curve({ONE_NODE: 10.0, TWO_NODES: 10.0}).better_part(TWO_NODES) == ONE_NODE
    assert a_curve({ONE_NODE: 10.0, TWO_NODES: 9.9}).better_part(TWO_NODES) is None
    assert LINEAR_CURVE.better_part(TWO_NODES) is None


def test_the_fastest_part_is_named_and_of_equals_the_smallest() -> None:
    times_s = {GpuShape.packed(GPU, count, 8): step_s for count, step_s in ((2, 8.0), (4, 7.0), (6, 7.0), (8, 9.0))}
    curve = a_curve(times_s)
    assert curve.better_part(ONE_NODE) == GpuShape.packed(GPU, 4, 8)
    assert curve.better_part(ONE_NODE, 5) == GpuShape.packed(GPU, 6, 8), "the job may not have fewer than 5"
    assert curve.better_part(ONE_NODE, 7) is None


def test_a_faster_shape_that_is_no_part_says_nothing() -> None:
    """Six GPUs of one node are not to be had from two nodes with four each."""
    spread = GpuShape.of_counts([(GPU, 4), (GPU, 4)])
    assert a_curve({spread: 10.0, GpuShape.packed(GPU, 6, 8): 5.0}).better_part(spread) is None
    part = GpuShape.of_counts([(GPU, 4), (GPU, 2)])
    assert a_curve({spread: 10.0, part: 5.0}).better_part(spread) == part


def test_one_gpu_model_alone_is_a_part_of_a_mixed_shape() -> None:
    mixed = GpuShape.of_counts([(GPU, 8), (OTHER, 8)])
    assert a_curve({mixed: 12.0, ONE_NODE: 10.0}).better_part(mixed) == ONE_NODE
    assert a_curve({mixed: 12.0, TWO_NODES: 1.0}).better_part(mixed) is None


def test_a_shape_without_a_plan_has_no_better_part() -> None:
    curve = a_curve({ONE_NODE: 10.0}).with_infeasible(TWO_NODES, "needs 94.1 GB of 80.0 GB")
    assert curve.better_part(TWO_NODES) is None
    assert ScalingCurve().better_part(TWO_NODES) is None
    assert a_curve({TWO_NODES: 9.0}).plan(TWO_NODES) == replace(data_parallel_plan(GPU, 16), iteration_time_s=9.0)
