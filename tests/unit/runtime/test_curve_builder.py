"""CurveBuilder solves each shape once, the most urgent first."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor, Future
from dataclasses import replace
from typing import Any

import pytest

from scheduler.domain.commands import CurveSolved, GpuThroughputsChanged, SolverChanged
from scheduler.domain.gpu_sets import GpuShape
from scheduler.domain.job_records import MemoryRecord
from scheduler.domain.scaling_curve import CurveRequest, build_data_parallel_plan
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.tick_report import WantedShape
from scheduler.runtime.curve_builder import CurveBuilder
from scheduler.solver.curve import CurvePoint, compute_solver_fingerprint
from scheduler.solver.profiles.gpu_throughput import list_throughputs
from scheduler.solver.request import Infeasibility
from tests.builders import GPU, a_fleet, a_job, a_snapshot


class ManualPool(Executor):
    """Executor that holds its tasks until the test runs them."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Future[Any], Any, tuple[Any, ...]]] = []

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.waiting.append((future, fn, args))
        return future

    def run_one(self) -> None:
        future, fn, args = self.waiting.pop(0)
        try:
            future.set_result(fn(*args))
        except Exception as error:  # it travels in the future, as in any pool
            future.set_exception(error)


def solve(request: CurveRequest, shapes: tuple[GpuShape, ...]) -> Mapping[GpuShape, CurvePoint]:
    (shape,) = shapes
    match shape.gpus:
        case 1:
            return {shape: Infeasibility("needs 94.1 GB of 80.0 GB per GPU", "memory")}
        case 6:
            part = GpuShape.packed(GPU, 5, 8)
            return {part: build_data_parallel_plan(GPU, 5), shape: build_data_parallel_plan(GPU, 6)}
        case 7:
            raise ValueError("gpu 'abacus' is unknown")
        case 8:
            raise ZeroDivisionError
    return {shape: build_data_parallel_plan(GPU, shape.gpus)}


def builder(most: int = 4) -> tuple[CurveBuilder, ManualPool, Snapshot, str]:
    pool = ManualPool()
    jobs = [a_job(job_id, model="llama-2-7b", global_batch=8) for job_id in ("a", "b")]
    snapshot = a_snapshot(a_fleet(training=1, inference=0), jobs)
    return CurveBuilder(pool, in_flight_max=most, solve=solve), pool, snapshot, jobs[0].spec.curve_key


def wanted(key: str, *counts: int) -> list[WantedShape]:
    return [WantedShape(key, GpuShape.packed(GPU, count, 8)) for count in counts]


def test_shape_is_solved_once_for_all_requests() -> None:
    curves, pool, snapshot, key = builder()
    curves.request_shapes(snapshot, wanted(key, 2, 4, 2))
    curves.request_shapes(snapshot, wanted(key, 4, 2))
    assert [shapes[0].gpus for _, _, (_, shapes) in pool.waiting] == [2, 4]


def test_job_that_ran_out_of_memory_gets_a_curve_for_less_memory() -> None:
    curves, pool, snapshot, _ = builder()
    job = replace(snapshot.jobs["a"], memory=MemoryRecord(115))
    curves.request_shapes(replace(snapshot, jobs={**snapshot.jobs, "a": job}), wanted(job.curve_key, 2))
    [(_, _, (request, _))] = pool.waiting
    assert request == CurveRequest("llama-2-7b", "", 8, 0, memory_percent=115)


def test_pool_queue_is_bounded_and_has_the_most_urgent_shapes() -> None:
    curves, pool, snapshot, key = builder(most=2)
    curves.request_shapes(snapshot, wanted(key, 4, 2, 3))
    assert [shapes[0].gpus for _, _, (_, shapes) in pool.waiting] == [4, 2]
    pool.run_one()
    curves.collect_finished(0.0)
    curves.request_shapes(snapshot, wanted(key, 5, 3))
    assert [shapes[0].gpus for _, _, (_, shapes) in pool.waiting] == [2, 5]


def test_each_result_becomes_one_command() -> None:
    curves, pool, snapshot, key = builder()
    curves.request_shapes(snapshot, wanted(key, 2, 1))
    finished = [curves.has_finished]
    assert curves.collect_finished(5.0) == ()
    pool.run_one()
    pool.run_one()
    finished.append(curves.has_finished)
    assert finished == [False, True]
    two, one = (command.body for command in curves.collect_finished(5.0))
    assert isinstance(two, CurveSolved)
    assert isinstance(one, CurveSolved)
    assert two.plan == build_data_parallel_plan(GPU, 2)
    assert (one.plan, one.infeasible) == (None, "needs 94.1 GB of 80.0 GB per GPU")
    assert curves.collect_finished(5.0) == ()
    assert curves.is_idle


def test_solution_may_include_the_point_of_a_smaller_shape() -> None:
    curves, pool, snapshot, key = builder()
    curves.request_shapes(snapshot, wanted(key, 6))
    pool.run_one()
    bodies = [command.body for command in curves.collect_finished(0.0)]
    assert [body.shape.gpus for body in bodies if isinstance(body, CurveSolved)] == [5, 6]


def test_points_of_another_solver_are_outdated() -> None:
    curves, _, snapshot, _ = builder()
    solver, throughputs = (command.body for command in curves.list_solver_changes(snapshot, 5.0))
    assert solver == SolverChanged(compute_solver_fingerprint())
    assert throughputs == GpuThroughputsChanged(list_throughputs())
    current = replace(snapshot, solver=compute_solver_fingerprint(), gpu_throughputs=list_throughputs())
    assert curves.list_solver_changes(current, 5.0) == ()


def test_rejection_by_the_solver_affects_one_job_only() -> None:
    curves, pool, snapshot, key = builder()
    curves.request_shapes(snapshot, wanted(key, 7))
    pool.run_one()
    (command,) = curves.collect_finished(0.0)
    assert isinstance(command.body, CurveSolved)
    assert (command.body.plan, command.body.infeasible) == (None, "gpu 'abacus' is unknown")


def test_unexpected_solver_error_is_raised() -> None:
    curves, pool, snapshot, key = builder()
    curves.request_shapes(snapshot, wanted(key, 8))
    pool.run_one()
    with pytest.raises(ZeroDivisionError):
        curves.collect_finished(0.0)


def test_shape_of_an_unknown_job_is_not_solved() -> None:
    curves, pool, snapshot, _ = builder()
    curves.request_shapes(snapshot, wanted("gone/batch-8/seq-0", 2))
    assert pool.waiting == []
    assert curves.is_idle


def test_on_solved_gets_duration_and_gaps_of_each_solution() -> None:
    solved: list[tuple[float, list[float]]] = []
    _, pool, snapshot, key = builder()
    curves = CurveBuilder(
        pool, in_flight_max=4, solve=solve, on_solved=lambda took_s, gaps: solved.append((took_s, [*gaps]))
    )
    curves.request_shapes(snapshot, wanted(key, 1, 6, 7))
    for _ in range(3):
        pool.run_one()
    curves.collect_finished(1.0)
    assert [gaps for _, gaps in solved] == [[], [0.0, 0.0]], "no plan, two plans, and no call for the rejected shape"
    assert all(took_s > 0 for took_s, _ in solved)
