"""Programme: a mixed integer programme in sparse form, solved by HiGHS."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from scheduler.solver.instance import Floats, Ints


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """What HiGHS returned: `values` of all columns, empty without a solution; a proven bound; its own clock."""

    values: Floats
    bound: float
    proven: bool
    status: str
    time_s: float


class Programme:
    """Minimise cost x under lower <= A x <= upper, 0 <= x <= most, some x whole. Grows column by column, row by row."""

    def __init__(self) -> None:
        self.size = 0
        self._costs: list[Floats] = []
        self._mosts: list[Floats] = []
        self._whole: list[Ints] = []
        self._rows: list[tuple[float, float, Ints, Floats]] = []

    def columns(self, cost_s: ArrayLike, *, most: float = 1.0, whole: bool = False) -> Ints:
        """Numbers of new columns, in the shape of their costs; an infinite cost bars the column (it stays 0)."""
        costs = np.asarray(cost_s, dtype=np.float64)
        barred = np.isinf(costs)
        self._costs.append(np.where(barred, 0.0, costs).ravel())
        self._mosts.append(np.where(barred, 0.0, most).ravel())
        self._whole.append(np.full(costs.size, whole, dtype=np.int64))
        self.size += costs.size
        return np.arange(self.size - costs.size, self.size).reshape(costs.shape)

    def row(self, *terms: tuple[ArrayLike, ArrayLike], lower: float = -inf, upper: float = inf) -> None:
        """A row over (columns, factors) pairs; infinite factors, those of barred columns, count as 0."""
        indices = [np.asarray(columns, dtype=np.int64).ravel() for columns, _ in terms]
        shaped = [np.broadcast_to(np.asarray(factors, float), np.shape(columns)).ravel() for columns, factors in terms]
        factors = np.concatenate(shaped)
        kept = np.isfinite(factors) & (factors != 0.0)
        self._rows.append((lower, upper, np.concatenate(indices)[kept], factors[kept]))

    def equal(self, left: Ints, right: Ints) -> None:
        """The sums of two sets of columns agree."""
        self.row((left, 1.0), (right, -1.0), lower=0.0, upper=0.0)

    def solve(self, *, time_limit_s: float, cutoff: float) -> Answer:
        """Runs HiGHS on one thread, to a gap of 0; solutions at or above `cutoff` are not looked for.

        Raises:
            ModuleNotFoundError: highspy is not installed.
        """
        highspy = _highspy()
        highs = highspy.Highs()
        options = {"output_flag": False, "threads": 1, "random_seed": 0, "mip_rel_gap": 0.0, "mip_abs_gap": 0.0}
        limits = {"time_limit": max(time_limit_s, 0.0), "objective_bound": cutoff}
        for name, value in {**options, **limits}.items():
            highs.setOptionValue(name, value)
        starts = np.cumsum([0, *(len(row[2]) for row in self._rows)])
        entries = int(starts[-1])
        highs.passModel(
            self.size,
            len(self._rows),
            entries,
            int(highspy.MatrixFormat.kRowwise),
            int(highspy.ObjSense.kMinimize),
            0.0,
            np.concatenate(self._costs),
            np.zeros(self.size),
            np.concatenate(self._mosts),
            np.array([row[0] for row in self._rows]),
            np.array([row[1] for row in self._rows]),
            starts.astype(np.int32),
            np.concatenate([row[2] for row in self._rows]).astype(np.int32),
            np.concatenate([row[3] for row in self._rows]),
            np.concatenate(self._whole).astype(np.int32),
        )
        highs.run()
        return _answer(highspy, highs, cutoff)


def _answer(highspy: Any, highs: Any, cutoff: float) -> Answer:
    states = highspy.HighsModelStatus
    state, info = highs.getModelStatus(), highs.getInfo()
    found = info.primal_solution_status == highspy.kSolutionStatusFeasible
    none = state in (states.kInfeasible, states.kUnboundedOrInfeasible, states.kObjectiveBound)
    return Answer(
        values=np.array(highs.getSolution().col_value) if found and not none else np.empty(0),
        bound=cutoff if none else min(info.mip_dual_bound, cutoff),
        proven=none or state == states.kOptimal,
        status=highs.modelStatusToString(state).lower(),
        time_s=highs.getRunTime(),
    )


def _highspy() -> Any:
    try:
        import highspy
    except ModuleNotFoundError:
        raise ModuleNotFoundError("solver 'milp' needs highspy; install it: pip install ebbtide[milp]") from None
    return highspy
