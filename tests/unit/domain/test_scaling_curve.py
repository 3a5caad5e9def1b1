"""Curve keys, and subsets of a shape on which a job is at least as fast."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.domain.gpu_sets import GpuShape
from scheduler.domain.job_records import FrozenLayers, MemoryRecord
from scheduler.domain.scaling_curve import LINEAR_CURVE, CurveRequest, ScalingCurve, build_data_parallel_plan, curve_key
from tests.builders import GPU, a_curve, a_job

OTHER = "l40s"
ONE_NODE = GpuShape.packed(GPU, 8, 8)
TWO_NODES = GpuShape.packed(GPU, 16, 8)


def test_subset_that_is_at_least_as_fast_is_found() -> None:
    assert a_curve({ONE_NODE: 10.0, TWO_NODES: 11.0}).faster_subset(TWO_NODES) == ONE_NODE
    assert a_curve({ONE_NODE: 10.0, TWO_NODES: 10.0}).faster_subset(TWO_NODES) == ONE_NODE
    assert a_curve({ONE_NODE: 10.0, TWO_NODES: 9.9}).faster_subset(TWO_NODES) is None
    assert LINEAR_CURVE.faster_subset(TWO_NODES) is None


def test_fastest_subset_is_found_and_the_smallest_of_equals() -> None:
    times_s = {GpuShape.packed(GPU, count, 8): step_s for count, step_s in ((2, 8.0), (4, 7.0), (6, 7.0), (8, 9.0))}
    curve = a_curve(times_s)
    assert curve.faster_subset(ONE_NODE) == GpuShape.packed(GPU, 4, 8)
    assert curve.faster_subset(ONE_NODE, 5) == GpuShape.packed(GPU, 6, 8), "the job may not have fewer than 5"
    assert curve.faster_subset(ONE_NODE, 7) is None


def test_faster_shape_that_is_no_subset_is_ignored() -> None:
    """Six GPUs of one node are no subset of two nodes with four GPUs each."""
    spread = GpuShape.from_node_counts([(GPU, 4), (GPU, 4)])
    assert a_curve({spread: 10.0, GpuShape.packed(GPU, 6, 8): 5.0}).faster_subset(spread) is None
    subset = GpuShape.from_node_counts([(GPU, 4), (GPU, 2)])
    assert a_curve({spread: 10.0, subset: 5.0}).faster_subset(spread) == subset


def test_one_gpu_model_alone_is_a_subset_of_a_mixed_shape() -> None:
    mixed = GpuShape.from_node_counts([(GPU, 8), (OTHER, 8)])
    assert a_curve({mixed: 12.0, ONE_NODE: 10.0}).faster_subset(mixed) == ONE_NODE
    assert a_curve({mixed: 12.0, TWO_NODES: 1.0}).faster_subset(mixed) is None


def test_shape_without_a_plan_has_no_faster_subset() -> None:
    curve = a_curve({ONE_NODE: 10.0}).with_infeasible(TWO_NODES, "needs 94.1 GB of 80.0 GB")
    assert curve.faster_subset(TWO_NODES) is None
    assert ScalingCurve().faster_subset(TWO_NODES) is None
    assert a_curve({TWO_NODES: 9.0}).plan_for(TWO_NODES) == replace(
        build_data_parallel_plan(GPU, 16), iteration_time_s=9.0
    )


@pytest.mark.parametrize(
    ("percent", "frozen", "suffix"),
    [(100, 0, ""), (115, 0, "/memory-115"), (100, 4, "/frozen-4"), (115, 4, "/memory-115/frozen-4")],
)
def test_curve_key_contains_memory_correction_and_frozen_layers(percent: int, frozen: int, suffix: str) -> None:
    key = f"gpt2/batch-64/seq-0{suffix}"
    request = CurveRequest("gpt2", "", 64, 0, memory_percent=percent, frozen_layers=frozen)
    assert request.key == curve_key("gpt2", "", 64, 0, memory_percent=percent, frozen_layers=frozen) == key
    spec = a_job("j", 1, model="gpt2", global_batch=64).spec
    job = replace(a_job("j", 1), spec=spec, memory=MemoryRecord(percent), freezing=FrozenLayers(frozen, frozen))
    assert (job.curve_key, job.next_curve_key, job.curve_requests) == (key, key, (request,))
    plain = replace(job, spec=a_job("j", 1).spec)
    assert (plain.curve_key, plain.next_curve_key, plain.curve_requests) == ("linear", "linear", ())
