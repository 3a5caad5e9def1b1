"""Estimated GPU profiles reach the controller and the processes that solve plans."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from scheduler.domain.commands import GpuThroughputsChanged
from scheduler.domain.fleet import Node
from scheduler.domain.gpu_sets import GpuShape
from scheduler.domain.machine import EstimatedGpu, GpuDevice, MachineInventory
from scheduler.domain.scaling_curve import CurveRequest, build_data_parallel_plan
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.tick_report import WantedShape
from scheduler.runtime.curve_builder import CurveBuilder
from scheduler.runtime.estimated_gpus import EstimatedGpuLoader
from scheduler.solver.curve import CurvePoint
from scheduler.solver.profiles import catalog
from scheduler.solver.profiles.catalog import list_estimated_gpus
from scheduler.solver.profiles.estimated_gpu import estimate_profile
from scheduler.store.memory_store import MemoryStore
from tests.builders import a_fleet, a_job, a_snapshot
from tests.unit.runtime.test_curve_builder import ManualPool

GPU = "x9-40g"
NODE = Node("m0", "training", GPU, 8, 40 * 2**30)


@pytest.fixture(autouse=True)
def no_estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "_estimates", {})


@pytest.fixture
def store() -> MemoryStore:
    """A store with an estimated profile."""
    made, device = MemoryStore(), GpuDevice(0, "x9", "", 40 * 2**30)
    profile_json = estimate_profile(MachineInventory(gpus=(device,)))
    made.machines.add_estimated_gpu(EstimatedGpu(GPU, profile_json, "m0", 0.0))
    return made


def test_estimates_are_loaded_when_a_node_needs_one(store: MemoryStore) -> None:
    loader = EstimatedGpuLoader(store)
    loader.load_for(Snapshot(nodes={"t0": Node("t0", "training", "l4", 8, 24 * 10**9)}))
    assert list_estimated_gpus() == {}
    loader.load_for(Snapshot(nodes={"m0": NODE}))
    assert list_estimated_gpus().keys() == {GPU}


def test_an_estimate_that_is_stored_after_its_node_is_still_found(store: MemoryStore) -> None:
    late, snapshot = MemoryStore(), Snapshot(nodes={"m0": NODE})
    loader = EstimatedGpuLoader(late)
    loader.load_for(snapshot)
    late.machines.add_estimated_gpu(store.machines.list_estimated_gpus()[0])
    loader.load_for(snapshot)
    assert list_estimated_gpus().keys() == {GPU}


def test_a_new_node_changes_the_throughputs_of_the_controller(store: MemoryStore) -> None:
    curves = CurveBuilder(ManualPool(), in_flight_max=1, load_hardware=EstimatedGpuLoader(store).load_for)
    bodies = [command.body for command in curves.list_solver_changes(Snapshot(nodes={"m0": NODE}), 0.0)]
    [changed] = [body for body in bodies if isinstance(body, GpuThroughputsChanged)]
    assert changed.throughputs[GPU] > 0.0


def test_estimates_travel_with_the_shapes_that_need_them(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    known = list[set[str]]()

    def solve(request: CurveRequest, shapes: tuple[GpuShape, ...]) -> Mapping[GpuShape, CurvePoint]:
        known.append(set(list_estimated_gpus()))
        return {shape: build_data_parallel_plan(shape.groups[0].gpu, shape.gpus) for shape in shapes}

    snapshot = a_snapshot(a_fleet(training=1, inference=0), [a_job("j", model="gpt2", global_batch=8)])
    pool = ManualPool()
    curves = CurveBuilder(pool, in_flight_max=2, solve=solve)
    EstimatedGpuLoader(store).load_for(Snapshot(nodes={"m0": NODE}))
    [key] = snapshot.curve_requests()
    curves.request_shapes(snapshot, [WantedShape(key, GpuShape.packed(gpu, 8, 8)) for gpu in ("l4", GPU)])
    monkeypatch.setattr(catalog, "_estimates", {})  # as in a process of the pool
    for _ in range(2):
        pool.run_one()
    assert known == [set(), {GPU}]
