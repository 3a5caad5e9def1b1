"""CurveBuilder: solved points of scaling curves, for ticks that request them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial

from scheduler.domain.commands import (
    Command,
    CommandBody,
    CurveSolved,
    GpuThroughputsChanged,
    SolverChanged,
)
from scheduler.domain.gpu_sets import GpuShape
from scheduler.domain.hardware import FleetHardware
from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.domain.scaling_curve import CurveRequest
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.tick_report import WantedShape
from scheduler.runtime.clock import RealClock
from scheduler.solver.curve import CurvePoint, build_curve_solved, compute_solver_fingerprint, solve_curve
from scheduler.solver.profiles.catalog import add_estimated_gpus, list_estimated_gpus
from scheduler.solver.profiles.fleet_hardware import get_fleet_hardware, use_fleet_hardware
from scheduler.solver.profiles.gpu_throughput import list_throughputs

Points = Mapping[GpuShape, CurvePoint]
SolveFunction = Callable[[CurveRequest, tuple[GpuShape, ...]], Points]


def _ignore_solve(seconds: float, gaps: Iterable[float]) -> None:
    """Do nothing."""


def _keep_hardware(snapshot: Snapshot) -> None:
    """Do nothing: plan from the profiles that this process knows."""


@dataclass(frozen=True, slots=True)
class _Solution:
    """A solution in the making, and the hardware of its GPU models when it was begun."""

    future: Future[tuple[Points, float]]
    hardware: FleetHardware


class CurveBuilder:
    """Solver of the shapes that ticks request, in a process pool.

    A shape of a model at one batch size is solved once for all jobs, as long as the snapshot or this builder has it. A
    tick lists shapes in order of urgency, so that a short queue in front of the pool solves the most urgent one next.

    Shapes are solved one at a time: a batch would delay its first result until its last. Apart from the caches of each
    process, shapes of one curve share at most a seventh of their work (llama-2-70b).
    """

    def __init__(
        self,
        pool: Executor,
        *,
        in_flight_max: int,
        solve: SolveFunction = solve_curve,
        on_solved: Callable[[float, Iterable[float]], None] = _ignore_solve,
        load_hardware: Callable[[Snapshot], None] = _keep_hardware,
    ) -> None:
        """Args:
        on_solved: called with the duration of a solution in seconds and the optimality gaps of its plans.
        load_hardware: makes the profiles and networks of a snapshot known to this process.
        """
        self._pool = pool
        self._in_flight_max = in_flight_max
        self._solve = solve
        self._on_solved = on_solved
        self._load_hardware = load_hardware
        self._in_flight: dict[WantedShape, _Solution] = {}

    def request_shapes(self, snapshot: Snapshot, wanted_shapes: Iterable[WantedShape]) -> None:
        """Start solving. Shapes beyond the limit are requested again by the next tick."""
        self._load_hardware(snapshot)
        requests = snapshot.curve_requests()
        for wanted in wanted_shapes:
            if len(self._in_flight) >= self._in_flight_max:
                return
            request = requests.get(wanted.curve_key)
            if request is not None and wanted not in self._in_flight:
                gpus = {group.gpu for group in wanted.shape.groups}
                hardware = get_fleet_hardware().select_gpus(gpus)
                solve = partial(_time_solve, self._solve, list_estimated_gpus(gpus), hardware)
                self._in_flight[wanted] = _Solution(self._pool.submit(solve, request, (wanted.shape,)), hardware)

    def collect_finished(self, now_s: float) -> tuple[Command, ...]:
        """Return the points solved since the last call, as commands for the next tick.

        A model or GPU that the solver rejects is a result: the job can never run. Other errors of the solver are bugs
        and are raised here. Points from profiles that have changed meanwhile are dropped: ticks request them again.
        """
        done = [wanted for wanted, solution in self._in_flight.items() if solution.future.done()]
        solved = [point for wanted in done for point in self._collect_points(wanted)]
        return tuple(
            Command(f"curve/{point.curve_key}/{point.shape}", now_s, point, actor="solver") for point in solved
        )

    def list_solver_changes(self, snapshot: Snapshot, now_s: float) -> tuple[Command, ...]:
        """Return the commands that bring a snapshot of another solver, or of other hardware, up to date.

        They drop outdated curve points, and replace the table of throughputs by GPU model.
        """
        self._load_hardware(snapshot)
        solver, throughputs, fleet = compute_solver_fingerprint(), list_throughputs(), get_fleet_hardware()
        bodies: list[tuple[str, CommandBody]] = []
        if snapshot.solver != solver or snapshot.curve_hardware != fleet.digests:
            bodies.append(("solver", SolverChanged(solver, fleet.digests)))
        if snapshot.gpu_throughputs != throughputs:
            bodies.append(("throughputs", GpuThroughputsChanged(throughputs)))
        return tuple(Command(f"{name}/{solver}/{fleet.digest}", now_s, body, actor="solver") for name, body in bodies)

    @property
    def is_idle(self) -> bool:
        return not self._in_flight

    @property
    def has_finished(self) -> bool:
        return any(solution.future.done() for solution in self._in_flight.values())

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _collect_points(self, wanted: WantedShape) -> Iterator[CurveSolved]:
        solution = self._in_flight.pop(wanted)
        if solution.hardware != get_fleet_hardware().select_gpus(group.gpu for group in wanted.shape.groups):
            return
        try:
            points, seconds = solution.future.result()
        except ValueError as refused:
            yield CurveSolved(wanted.curve_key, wanted.shape, None, str(refused))
        else:
            plans = (point for point in points.values() if isinstance(point, ParallelPlan))
            self._on_solved(seconds, [plan.optimality_gap for plan in plans])
            for shape, point in points.items():
                yield build_curve_solved(wanted.curve_key, shape, point)


def _time_solve(
    solve: SolveFunction,
    estimates: Mapping[str, str],
    hardware: FleetHardware,
    request: CurveRequest,
    shapes: tuple[GpuShape, ...],
) -> tuple[Points, float]:
    """Solve, and return the points and the duration in seconds. Runs in a process of the pool.

    `estimates` are the estimated profiles of the shapes' GPU models, and `hardware` what was set about them. That
    process knows neither.
    """
    clock = RealClock()
    add_estimated_gpus(estimates)
    use_fleet_hardware(hardware)
    started_s = clock.elapsed_s()
    return solve(request, shapes), clock.elapsed_s() - started_s
