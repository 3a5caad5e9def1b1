"""CurveBuilder: solves the shapes that jobs need, in a process pool, the minimum first.

DemandWatch: keeps a forecaster for each lending pool up to date, and turns it into commands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future
from functools import partial
from typing import Protocol

from scheduler.domain.commands import Command, CurveSolved, ForecastMade, SolverChanged
from scheduler.domain.fleet import Forecast, Pool, PoolKind
from scheduler.domain.gpu_sets import GpuShape
from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.domain.scaling_curve import CurveRequest
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.tick_report import WantedShape
from scheduler.runtime.clock import RealClock
from scheduler.solver.curve import CurvePoint, build_curve_solved, compute_solver_fingerprint, solve_curve
from scheduler.store.protocol import Store

Points = Mapping[GpuShape, CurvePoint]
SolveFunction = Callable[[CurveRequest, tuple[GpuShape, ...]], Points]


def _ignore_solve(seconds: float, gaps: Iterable[float]) -> None:
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
        in_flight_max: int,
        solve: SolveFunction = solve_curve,
        on_solved: Callable[[float, Iterable[float]], None] = _ignore_solve,
    ) -> None:
        """`on_solved` is told how long a shape took, in s, and the proven gaps of the plans found."""
        self._pool = pool
        self._in_flight_max = in_flight_max
        self._solve = solve
        self._on_solved = on_solved
        self._in_flight: dict[WantedShape, Future[tuple[Points, float]]] = {}

    def request_shapes(self, snapshot: Snapshot, wanted_shapes: Iterable[WantedShape]) -> None:
        """Start solving; what does not fit now is wanted again at the next tick."""
        requests = snapshot.curve_requests()
        for wanted in wanted_shapes:
            if len(self._in_flight) >= self._in_flight_max:
                return
            request = requests.get(wanted.curve_key)
            if request is not None and wanted not in self._in_flight:
                self._in_flight[wanted] = self._pool.submit(partial(_time_solve, self._solve), request, (wanted.shape,))

    def collect_finished(self, now_s: float) -> tuple[Command, ...]:
        """The points solved since the last call, as commands for the next tick.

        A model or GPU that the solver refuses is an answer: that job can never run, and the others go on. Any other
        error of the solver is raised here: it is a bug.
        """
        done = [wanted for wanted, future in self._in_flight.items() if future.done()]
        solved = [point for wanted in done for point in self._collect_points(wanted)]
        return tuple(
            Command(f"curve/{point.curve_key}/{point.shape}", now_s, point, actor="solver") for point in solved
        )

    def list_solver_changes(self, snapshot: Snapshot, now_s: float) -> tuple[Command, ...]:
        """The command that drops the points of another version of the solver or of its profiles, if there are any."""
        solver = compute_solver_fingerprint()
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

    def _collect_points(self, wanted: WantedShape) -> Iterator[CurveSolved]:
        try:
            points, seconds = self._in_flight.pop(wanted).result()
        except ValueError as refused:
            yield CurveSolved(wanted.curve_key, wanted.shape, None, str(refused))
        else:
            plans = (point for point in points.values() if isinstance(point, ParallelPlan))
            self._on_solved(seconds, [plan.optimality_gap for plan in plans])
            for shape, point in points.items():
                yield build_curve_solved(wanted.curve_key, shape, point)


def _time_solve(solve: SolveFunction, request: CurveRequest, shapes: tuple[GpuShape, ...]) -> tuple[Points, float]:
    """What was solved, and the seconds that it took where it was."""
    clock = RealClock()
    started_s = clock.elapsed_s()
    return solve(request, shapes), clock.elapsed_s() - started_s


class Forecaster(Protocol):
    """What the watch needs of scheduler.forecast.forecaster.SeasonalForecaster."""

    def observe(self, time_s: float, gpus: float) -> None: ...

    def forecast(self, now_s: float, horizon_s: float, *, quantiles: tuple[float, ...]) -> Forecast: ...


class DemandForecaster:
    """A new leader reads the recorded demand once; after that each reading passes by in the snapshot."""

    def __init__(self, store: Store, new_forecaster: Callable[[], Forecaster], *, history_s: float) -> None:
        self._store = store
        self._new_forecaster = new_forecaster
        self._history_s = history_s
        self._forecasters: dict[str, Forecaster] = {}
        self._last_reading_s: dict[str, float] = {}

    def make_forecasts(self, snapshot: Snapshot, now_s: float) -> tuple[Command, ...]:
        """A fresh forecast for each inference pool that lends and whose demand is known."""
        made = [self._make_forecast(snapshot, pool, now_s) for pool in snapshot.pools.values() if _lends(pool)]
        return tuple(command for command in made if command is not None)

    def _make_forecast(self, snapshot: Snapshot, pool: Pool, now_s: float) -> Command | None:
        if pool.name not in snapshot.demand:
            return None
        forecaster = self._forecasters.get(pool.name)
        if forecaster is None:
            forecaster = self._forecasters[pool.name] = self._new_forecaster()
        self._feed_new_readings(forecaster, pool.name, now_s)
        if pool.name not in self._last_reading_s:  # its last reading is older than what is remembered
            return None
        rules, levels = pool.lending, _choose_quantiles(pool)
        forecast = forecaster.forecast(now_s, rules.horizon_s, quantiles=levels)
        if rules.loan_s_min > rules.horizon_s:
            forecast = forecast.with_min_loan_forecast(forecaster.forecast(now_s, rules.loan_s_min, quantiles=levels))
        return Command(f"forecast/{pool.name}/{now_s}", now_s, ForecastMade(pool.name, forecast), actor="forecast")

    def _feed_new_readings(self, forecaster: Forecaster, pool: str, now_s: float) -> None:
        since_s = self._last_reading_s.get(pool, now_s - self._history_s)
        for reading in self._store.list_readings(pool, since_s=since_s):
            if reading.at_s > self._last_reading_s.get(pool, float("-inf")):
                forecaster.observe(reading.at_s, reading.asked_gpus)
                self._last_reading_s[pool] = reading.at_s


def _lends(pool: Pool) -> bool:
    return pool.kind is PoolKind.INFERENCE and pool.lending.enabled


def _choose_quantiles(pool: Pool) -> tuple[float, ...]:
    """What people like to see, and the level that the pool's owner lends by."""
    return tuple(sorted({0.5, 0.9, 0.95, 0.99, pool.lending.quantile}))
