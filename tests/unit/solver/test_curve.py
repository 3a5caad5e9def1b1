"""Points of the scaling curve."""

from __future__ import annotations

import json
import pickle
from functools import partial

import pytest

from scheduler.domain.gpu_shape import GpuShape
from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.domain.scaling_curve import CurveRequest
from scheduler.solver.curve import canonical_shapes, solve_point
from scheduler.solver.profiles.shipped import ProfileError
from scheduler.solver.request import Infeasible, RequestError

TINY = CurveRequest(model="tiny-gpt", profile_json="", global_batch=12, sequence_length=0)


def test_canonical_shapes_are_counts_inside_a_node_and_then_whole_nodes() -> None:
    shapes = canonical_shapes("a100-80g", gpus_per_node=4, gpus_max=14)
    assert [(shape.gpus, shape.nodes) for shape in shapes] == [(1, 1), (2, 1), (3, 1), (4, 1), (8, 2), (12, 3)]
    assert len(canonical_shapes("cpu", gpus_per_node=8, gpus_max=3)) == 3


@pytest.mark.parametrize(("gpus_per_node", "gpus_max"), [(0, 8), (8, 0)])
def test_counts_below_one_are_refused(gpus_per_node: int, gpus_max: int) -> None:
    with pytest.raises(RequestError, match="both must be at least 1"):
        canonical_shapes("cpu", gpus_per_node=gpus_per_node, gpus_max=gpus_max)


def test_more_slots_train_the_reference_model_faster() -> None:
    points = [solve_point(TINY, shape) for shape in canonical_shapes("cpu", gpus_per_node=4, gpus_max=4)]
    plans = [point for point in points if isinstance(point, ParallelPlan)]
    assert [plan.world_size for plan in plans] == [1, 2, 3, 4]
    assert sorted(plan.samples_per_s for plan in plans) == [plan.samples_per_s for plan in plans]


def test_a_point_can_be_solved_in_another_process() -> None:
    call = pickle.loads(pickle.dumps(partial(solve_point, TINY, GpuShape.packed("cpu", 2, 2))))
    assert call() == solve_point(TINY, GpuShape.packed("cpu", 2, 2))


def test_an_own_profile_takes_the_place_of_a_preset() -> None:
    architecture = {
        "layers": 4, "hidden": 128, "heads": 4, "kv_heads": 4, "ffn": 512, "vocabulary": 256,
        "sequence_length": 128, "learned_positions": True, "biases": True,
    }  # fmt: skip
    own = CurveRequest("", json.dumps({"name": "mine", "architecture": architecture}), 12, 0)
    shape = GpuShape.packed("cpu", 2, 2)
    assert solve_point(own, shape) == solve_point(TINY, shape)


def test_a_shape_that_cannot_split_the_batch_is_infeasible() -> None:
    assert isinstance(solve_point(TINY, GpuShape.packed("cpu", 5, 5)), Infeasible)


def test_unknown_models_and_gpus_are_refused() -> None:
    with pytest.raises(ProfileError, match="model is 'gpt9'"):
        solve_point(CurveRequest("gpt9", "", 12, 0), GpuShape.packed("cpu", 1, 1))
    with pytest.raises(ProfileError, match="gpu is 'tpu'"):
        solve_point(TINY, GpuShape.packed("tpu", 1, 1))
