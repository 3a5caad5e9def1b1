"""Working quantile of a pool that promises a share of short intervals."""

from __future__ import annotations

from scheduler.domain.lending_policy import LendingPolicy
from scheduler.domain.shortages import WINDOW_INTERVALS, ShortageRecord

_STEPS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Working shares of exceeded forecasts, relative to the promised share of short intervals. Steps keep the number of
levels small."""
_FIRST_STEP = 0.1
_LEVEL_MIN = 0.5


def find_working_quantile(rules: LendingPolicy, record: ShortageRecord) -> float:
    """Return the quantile of the forecast by which a pool lends now.

    With a promised share of short intervals, the quantile follows the part of the window's budget that is left. A new
    pool begins at a tenth of the share, because early shortages weigh most. A pool that was never short for the whole
    window lends at ten times the share: most exceeded forecasts leave nothing short, as loans follow whole nodes and
    headroom. The step is proportional to what is left, so that the last interval of a budget is approached and not
    overshot.
    """
    target = rules.shortage_target
    if target is None:
        assert rules.quantile is not None
        return rules.quantile
    grown = min(1.0, record.intervals / WINDOW_INTERVALS)
    largest = _FIRST_STEP + (_STEPS[-1] - _FIRST_STEP) * grown
    wanted = _STEPS[0] + (largest - _STEPS[0]) * record.compute_budget_left(target)
    step = max(each for each in _STEPS if each <= wanted + 1e-9)
    return _compute_level(target, step)


def list_working_quantiles(rules: LendingPolicy) -> tuple[float, ...]:
    """Return all quantiles that a promise can choose, ascending; none if the quantile is fixed."""
    target = rules.shortage_target
    return () if target is None else tuple(sorted({_compute_level(target, step) for step in _STEPS}))


def _compute_level(target: float, step: float) -> float:
    return max(_LEVEL_MIN, 1.0 - target * step)
