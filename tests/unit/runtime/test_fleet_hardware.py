"""The hardware of a snapshot reaches the controller, its curves, and the processes that solve them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

import pytest

from scheduler.domain.commands import CurveSolved, SolverChanged
from scheduler.domain.fleet import PoolNetwork
from scheduler.domain.gpu_sets import GpuShape
from scheduler.domain.hardware import GpuProfile
from scheduler.domain.machine import EstimatedGpu
from scheduler.domain.scaling_curve import CurveRequest, build_data_parallel_plan
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.tick_report import WantedShape
from scheduler.runtime.curve_builder import CurveBuilder
from scheduler.runtime.fleet_hardware import FleetHardwareLoader
from scheduler.solver.curve import CurvePoint, compute_solver_fingerprint
from scheduler.solver.profiles import catalog
from scheduler.solver.profiles.catalog import load_gpu, read_gpu_json
from scheduler.solver.profiles.fleet_hardware import get_fleet_hardware
from scheduler.store.memory_store import MemoryStore
from tests.builders import GPU, a_fleet, a_job, a_snapshot
from tests.unit.runtime.test_curve_builder import ManualPool

SHAPE = GpuShape.packed(GPU, 16, 8)
PLAIN = a_snapshot(a_fleet(training=2, inference=0), [a_job("j", model="gpt2", global_batch=64)])
[KEY] = PLAIN.curve_requests()


def with_profile(snapshot: Snapshot, efficiency: float) -> Snapshot:
    text = json.dumps({**json.loads(read_gpu_json(GPU)), "efficiency": efficiency})
    return replace(snapshot, gpu_profiles={GPU: GpuProfile(GPU, text, 1, 0.0)})


def with_network(snapshot: Snapshot, network: PoolNetwork) -> Snapshot:
    pools = {name: replace(pool, network=network) for name, pool in snapshot.pools.items()}
    return replace(snapshot, pools=pools)


def new_builder() -> tuple[CurveBuilder, ManualPool, list[float]]:
    """Return a builder and the efficiency that each solution was computed from."""
    pool, seen = ManualPool(), list[float]()

    def solve(request: CurveRequest, shapes: tuple[GpuShape, ...]) -> Mapping[GpuShape, CurvePoint]:
        seen.append(load_gpu(GPU).efficiency)
        return {shape: build_data_parallel_plan(GPU, shape.gpus) for shape in shapes}

    loader = FleetHardwareLoader(MemoryStore())
    return CurveBuilder(pool, in_flight_max=2, solve=solve, load_hardware=loader.load_for), pool, seen


def test_the_loader_follows_the_snapshot_and_keeps_equal_values() -> None:
    loader = FleetHardwareLoader(MemoryStore())
    loader.load_for(with_profile(PLAIN, 0.5))
    first = get_fleet_hardware()
    loader.load_for(replace(with_profile(PLAIN, 0.5), nodes={**PLAIN.nodes}))
    assert (load_gpu(GPU).efficiency, get_fleet_hardware() is first) == (0.5, True)
    loader.load_for(with_network(PLAIN, PoolNetwork(1e9, 1e-4)))
    assert (load_gpu(GPU).efficiency, load_gpu(GPU).inter_bandwidth_bytes_per_s) != (0.5, 1e9)
    assert load_gpu(GPU).gpus_per_nic == 8.0
    loader.load_for(PLAIN)
    assert get_fleet_hardware().digest == ""


def test_the_estimate_of_a_deleted_profile_counts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "_estimates", {})
    text = json.dumps({**json.loads(read_gpu_json(GPU)), "gpu": "x9-40g"})
    store = MemoryStore()
    loader = FleetHardwareLoader(store)
    node = replace(next(iter(PLAIN.nodes.values())), name="m0", gpu="x9-40g")
    described = {"x9-40g": GpuProfile("x9-40g", text, 1, 0.0)}
    loader.load_for(replace(PLAIN, gpu_profiles=described))
    store.machines.add_estimated_gpu(EstimatedGpu("x9-40g", text, "m0", 0.0))
    joined = replace(PLAIN, gpu_profiles=described, nodes={"m0": node})
    loader.load_for(joined)
    assert catalog.find_gpu_source("x9-40g", is_set_ignored=True) is None, "it is read when it is needed"
    loader.load_for(replace(joined, gpu_profiles={}))
    assert catalog.find_gpu_source("x9-40g") is catalog.GpuSource.ESTIMATED


def test_a_set_profile_drops_curves_and_travels_with_each_shape() -> None:
    curves, pool, seen = new_builder()
    changed = with_profile(PLAIN, 0.5)
    for snapshot in (PLAIN, changed):
        [solver, *_] = [command.body for command in curves.list_solver_changes(snapshot, 0.0)]
        assert solver == SolverChanged(compute_solver_fingerprint(), get_fleet_hardware().digests)
        curves.request_shapes(snapshot, [WantedShape(KEY, SHAPE)])
        pool.run_one()
        [solved] = curves.collect_finished(0.0)
        assert isinstance(solved.body, CurveSolved)
    assert seen == [load_gpu(GPU).efficiency if each is changed else seen[0] for each in (PLAIN, changed)]
    assert seen[1] == 0.5


def test_points_from_replaced_figures_are_dropped_and_solved_again() -> None:
    curves, pool, seen = new_builder()
    curves.request_shapes(PLAIN, [WantedShape(KEY, SHAPE)])
    changed = with_network(PLAIN, PoolNetwork(1e9, 1e-4))
    curves.request_shapes(changed, [WantedShape(KEY, SHAPE)])
    pool.run_one()
    curves.list_solver_changes(changed, 0.0)
    assert curves.collect_finished(0.0) == ()
    curves.request_shapes(changed, [WantedShape(KEY, SHAPE)])
    pool.run_one()
    curves.list_solver_changes(changed, 0.0)
    [solved] = curves.collect_finished(0.0)
    assert isinstance(solved.body, CurveSolved)
    assert len(seen) == 2


def test_a_change_of_another_gpu_model_keeps_solutions_in_the_making() -> None:
    curves, pool, _ = new_builder()
    curves.request_shapes(PLAIN, [WantedShape(KEY, SHAPE)])
    changed = replace(PLAIN, gpu_profiles={"l4": GpuProfile("l4", read_gpu_json("l4"), 1, 0.0)})
    [solver, *_] = [command.body for command in curves.list_solver_changes(changed, 0.0)]
    assert solver == SolverChanged(compute_solver_fingerprint(), get_fleet_hardware().digests)
    assert get_fleet_hardware().digests.keys() == {"l4"}
    pool.run_one()
    assert len(curves.collect_finished(0.0)) == 1
