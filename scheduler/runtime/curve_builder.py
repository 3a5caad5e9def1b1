"""CurveBuilder: solves the shapes that jobs need, in a process pool, the minimum first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future
from functools import partial

from scheduler.domain.command import Command, CurveSolved, SolverChanged
from scheduler.domain.gpu_shape import GpuShape
from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.domain.scaling_curve import CurveRequest
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.tick_report import WantedShape
from scheduler.runtime.clock import RealClock
from scheduler.solver.curve import Point, curve_solved, solve_curve, solver_fingerprint

Points = Mapping[GpuShape, Point]
Solve = Callable[[CurveRequest, tuple[GpuShape, ...]], Points]


def _unheard(seconds: float, gaps: Iterable[float]) -> None:
    """Where nobody counts."""


class CurveBuilder:
    """Content-addressed: one model at one batch on one shape is solved once, whoever asks, for as long as the
    snapshot or this builder remembers it. A tick reports what is wanted in the order in which it is needed, so a
    short queue in front of the pool keeps the most urgent shape next.

    Shapes are solved one at a time. Beyond the caches of a pool's process a curve's shapes share none of the work
    (llama-2-7b) to a seventh of it (llama-2-70b), and a batch would keep its first answer back until the last."""

    def __init__(
        self,
        pool: Executor,
        *,
        most_in_flight: int,
        solve: Solve = solve_curve,
        on_solved: Callable[[float, Iterable[float]], None] = _unheard,
    ) -> None:
        """`on_solved` is told how long a shape took, in s, and the proven gaps of the plans found."""
        self._pool = pool
        self._most_in_flight = most_in_flight
        self._solve = solve
        self._on_solved = on_solved
        self._in_flight: dict[WantedShape, Future[tuple[Points, float]]] = {}

    def want(self, snapshot: Snapshot, wanted_shapes: Iterable[WantedShape]) -> None:
        """Start solving; what does not fit now is wanted again at the next tick."""
        requests = snapshot.curve_requests()
        for wanted in wanted_shapes:
            if len(self._in_flight) >= self._most_in_flight:
                return
            request = requests.get(wanted.curve_key)
            if request is not None and wanted not in self._in_flight:
                self._in_flight[wanted] = self._pool.submit(partial(_timed, self._solve), request, (wanted.shape,))

    def finished(self, now_s: float) -> tuple[Command, ...]:
        """The points solved since the last call, as commands for the next tick.

        A model or GPU that the solver refuses is an answer: that job can never run, and the others go on. Any other
        error of the solver is raised here: it is a bug.
        """
        done = [wanted for wanted, future in self._in_flight.items() if future.done()]
        solved = [point for wanted in done for point in self._answer(wanted)]
        return tuple(
            Command(f"curve/{point.curve_key}/{point.shape}", now_s, point, actor="solver") for point in solved
        )

    def outdated(self, snapshot: Snapshot, now_s: float) -> tuple[Command, ...]:
        """The command that drops the points of another version of the solver or of its profiles, if there are any."""
        solver = solver_fingerprint()
        if snapshot.solver == solver:
            return ()
        return (Command(f"solver/{solver}", now_s, SolverChanged(solver), actor="solver"),)

    @property
    def is_idle(self) -> bool:
        return not self._in_flight

    @property
    def has_finished(self) -> bool:
        return any(future.done() for future in self._in_flight.values())

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _answer(self, wanted: WantedShape) -> Iterator[CurveSolved]:
        try:
            points, seconds = self._in_flight.pop(wanted).result()
        except ValueError as refused:
            yield CurveSolved(wanted.curve_key, wanted.shape, None, str(refused))
        else:
            plans = (point for point in points.values() if isinstance(point, ParallelPlan))
            self._on_solved(seconds, [plan.optimality_gap for plan in plans])
            for shape, point in points.items():
                yield curve_solved(wanted.curve_key, shape, point)


def _timed(solve: Solve, request: CurveRequest, shapes: tuple[GpuShape, ...]) -> tuple[Points, float]:
    """What was solved, and the seconds that it took where it was."""
    clock = RealClock()
    started_s = clock.elapsed_s()
    return solve(request, shapes), clock.elapsed_s() - started_s
