"""Points of the scaling curve."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from scheduler.domain.commands import CurveSolved
from scheduler.domain.gpu_sets import GpuShape
from scheduler.domain.hardware import FleetHardware
from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.domain.scaling_curve import CurveRequest, ScalingCurve
from scheduler.solver.curve import (
    CURVE_TOLERANCE,
    build_curve_solved,
    compute_solver_fingerprint,
    list_canonical_shapes,
    solve_curve,
    solve_point,
)
from scheduler.solver.profiles.catalog import ProfileError, load_gpu, load_model, read_gpu_json
from scheduler.solver.profiles.fleet_hardware import use_fleet_hardware
from scheduler.solver.request import Infeasibility, RequestError, SolveRequest
from scheduler.solver.search.plan_search import solve_plan

TINY = CurveRequest(model="tiny-gpt", profile_json="", global_batch=12, sequence_length=0)


def own_profile(*, layers: int) -> str:
    """Four of these layers are tiny-gpt."""
    architecture = {
        "layers": layers, "hidden": 128, "heads": 4, "kv_heads": 4, "ffn": 512, "vocabulary": 256,
        "sequence_length": 128, "learned_positions": True, "biases": True,
    }  # fmt: skip
    return json.dumps({"name": "mine", "architecture": architecture})


def test_canonical_shapes_are_counts_inside_a_node_and_then_whole_nodes() -> None:
    shapes = list_canonical_shapes("a100-80g", gpus_per_node=4, gpus_max=14)
    assert [(shape.gpus, shape.nodes) for shape in shapes] == [(1, 1), (2, 1), (3, 1), (4, 1), (8, 2), (12, 3)]
    assert len(list_canonical_shapes("cpu", gpus_per_node=8, gpus_max=3)) == 3


@pytest.mark.parametrize(("gpus_per_node", "gpus_max"), [(0, 8), (8, 0)])
def test_counts_below_one_are_rejected(gpus_per_node: int, gpus_max: int) -> None:
    with pytest.raises(RequestError, match="both must be at least 1"):
        list_canonical_shapes("cpu", gpus_per_node=gpus_per_node, gpus_max=gpus_max)


def test_more_slots_train_the_reference_model_faster() -> None:
    points = [solve_point(TINY, shape) for shape in list_canonical_shapes("cpu", gpus_per_node=4, gpus_max=4)]
    plans = [point for point in points if isinstance(point, ParallelPlan)]
    assert [plan.world_size for plan in plans] == [1, 2, 3, 4]
    assert sorted(plan.samples_per_s for plan in plans) == [plan.samples_per_s for plan in plans]


def test_memory_correction_excludes_plans_that_fit_only_as_predicted() -> None:
    """A job that uses 1.5 times the predicted memory gets slower plans that fit it, under their own key."""
    request, shape = CurveRequest("llama-2-7b", "", 64, 0), GpuShape.packed("a100-80g", 8, 8)
    corrected = replace(request, memory_percent=150)
    plain, thrifty = solve_point(request, shape), solve_point(corrected, shape)
    assert isinstance(plain, ParallelPlan)
    assert isinstance(thrifty, ParallelPlan)
    memory_bytes = load_gpu("a100-80g").memory_bytes
    assert plain.peak_bytes_per_gpu * 150 > 100 * memory_bytes >= thrifty.peak_bytes_per_gpu * 150
    assert thrifty.iteration_time_s > plain.iteration_time_s
    assert (request.key, corrected.key) == ("llama-2-7b/batch-64/seq-0", "llama-2-7b/batch-64/seq-0/memory-150")
    hopeless = solve_point(replace(request, memory_percent=2000), shape)
    assert isinstance(hopeless, Infeasibility)
    assert f"of {memory_bytes / 20e9:.1f} GB per GPU" in hopeless.reason


def test_curve_points_are_proven_within_tolerance() -> None:
    request = CurveRequest(model="gpt2", profile_json="", global_batch=16, sequence_length=0)
    shapes = list_canonical_shapes("l40s", gpus_per_node=8, gpus_max=24)
    points = solve_curve(request, shapes)
    assert list(points) == list(shapes)
    for shape, point in points.items():
        best = solve_plan(SolveRequest(load_model("gpt2"), (load_gpu("l40s"),), shape, 16))
        if isinstance(best, Infeasibility):
            assert point == best
            continue
        assert isinstance(point, ParallelPlan)
        assert point.world_size == shape.gpus
        assert point.optimality_gap <= CURVE_TOLERANCE + 1e-9
        assert point.iteration_time_s * (1 - CURVE_TOLERANCE - 1e-9) <= best.iteration_time_s <= point.iteration_time_s


def test_mixed_shape_also_yields_the_point_of_its_faster_model() -> None:
    mixed, alone = GpuShape.from_node_counts([("a100-80g", 2), ("t4", 1)]), GpuShape.packed("a100-80g", 2, 2)
    points = solve_curve(TINY, (mixed,))
    assert set(points) == {mixed, alone}
    curve = ScalingCurve({shape: plan for shape, plan in points.items() if isinstance(plan, ParallelPlan)})
    assert curve.faster_subset(mixed) == alone
    own = curve.plans[mixed]
    assert {stage.gpu: stage.gpus for stage in own.stages} == {"a100-80g": 2, "t4": 1}


def test_point_of_one_model_depends_on_its_own_hardware_only() -> None:
    """A change of the other model's hardware therefore keeps it."""
    mixed, alone = GpuShape.from_node_counts([("a100-80g", 2), ("t4", 1)]), GpuShape.packed("a100-80g", 2, 2)
    slower = json.dumps({**json.loads(read_gpu_json("t4")), "efficiency": 0.01})
    found = [solve_curve(TINY, (mixed,))[alone], solve_curve(TINY, (alone,))[alone]]
    use_fleet_hardware(FleetHardware({"t4": slower}))
    found += [solve_curve(TINY, (mixed,))[alone]]
    assert all(isinstance(point, ParallelPlan) for point in found)
    assert len({replace(point, optimality_gap=0.0) for point in found if isinstance(point, ParallelPlan)}) == 1


def test_infeasible_mixed_shape_yields_the_point_of_one_model() -> None:
    """One layer cannot be split into the two stages that two GPU models need."""
    single = CurveRequest("", own_profile(layers=1), 12, 0)
    points = solve_curve(single, (GpuShape.from_node_counts([("a100-80g", 1), ("t4", 1)]),))
    alone, refused = points.values()
    assert isinstance(alone, ParallelPlan)
    assert isinstance(refused, Infeasibility)
    assert f"1x1 {alone.stages[0].gpu} alone takes" in refused.reason


def test_points_become_commands() -> None:
    shape = GpuShape.packed("cpu", 2, 2)
    plan = solve_point(TINY, shape)
    assert build_curve_solved("key", shape, plan) == CurveSolved(
        "key", shape, plan if isinstance(plan, ParallelPlan) else None
    )
    assert build_curve_solved("key", shape, Infeasibility("too big", "memory")) == CurveSolved(
        "key", shape, None, "too big"
    )


def test_the_fingerprint_follows_code_and_profiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fingerprint() -> str:
        monkeypatch.setattr("scheduler.solver.curve.files", lambda _: tmp_path)
        return compute_solver_fingerprint.__wrapped__()

    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "t4.json").write_text("{}")
    (tmp_path / "search.py").write_text("x = 1")
    before = fingerprint()
    (tmp_path / "search.pyc").write_text("compiled")
    assert fingerprint() == before
    (tmp_path / "data" / "t4.json").write_text('{"gpu": "t4"}')
    changed = fingerprint()
    (tmp_path / "search.py").write_text("x = 2")
    assert len({before, changed, fingerprint()}) == 3


def test_a_point_can_be_solved_in_another_process() -> None:
    shape = GpuShape.packed("cpu", 2, 2)
    call = pickle.loads(pickle.dumps(partial(solve_curve, TINY, (shape,))))
    assert call() == {shape: solve_point(TINY, shape)}


def test_inline_profile_replaces_a_shipped_model() -> None:
    own = CurveRequest("", own_profile(layers=4), 12, 0)
    shape = GpuShape.packed("cpu", 2, 2)
    assert solve_point(own, shape) == solve_point(TINY, shape)


def test_a_shape_that_cannot_split_the_batch_is_infeasible() -> None:
    assert isinstance(solve_point(TINY, GpuShape.packed("cpu", 5, 5)), Infeasibility)


def test_unknown_model_and_gpu_are_rejected() -> None:
    with pytest.raises(ProfileError, match="model is 'gpt9'"):
        solve_point(CurveRequest("gpt9", "", 12, 0), GpuShape.packed("cpu", 1, 1))
    with pytest.raises(ProfileError, match="gpu is 'tpu'"):
        solve_point(TINY, GpuShape.packed("tpu", 1, 1))
