"""Calibration of the costs of an iteration from measured latencies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, inf, log

import numpy as np

from scheduler.serving.latency_tails import PoolTails
from scheduler.serving.length_moments import compute_moments
from scheduler.serving.replica_load import PoolLoad, compute_load
from scheduler.serving.replica_model import IterationCosts, ReplicaModel
from scheduler.serving.request_mix import Floats, RequestMix

FACTOR_MAX = 10.0
"""Largest factor between a derived and a calibrated cost, either way. Larger ones mean a wrong GPU, model or row."""
PRIOR_WEIGHT = 0.02
"""Weight of the derived costs against a measured row. It decides only what the rows leave open."""
ROBUST_SCALE = 0.1
"""Relative error from which a row counts less than quadratically (soft L1)."""
_FITTED = ("base_s", "prefill_token_s", "decode_sequence_s", "kv_token_s")


@dataclass(frozen=True, slots=True)
class MeasuredLatency:
    """A measured run of one replica.

    Attributes:
        mix: requests of the run. With `concurrency` above 0 its rate does not count.
        concurrency: requests that were always in flight; 0 if they arrived at the rate of the mix.
        tpot_s: mean time per output token in seconds. `ttft_s`: mean time to first token; 0 if unknown. It is not used
            with a concurrency, because clients that start together wait for each other.
    """

    mix: RequestMix
    tpot_s: float
    ttft_s: float = 0.0
    concurrency: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.tpot_s < inf or not 0 <= self.ttft_s < inf:
            raise ValueError(f"`tpot` is {self.tpot_s} and `ttft` is {self.ttft_s}. Use seconds above 0.")


@dataclass(frozen=True, slots=True)
class CalibratedCosts:
    """Costs that were fitted to rows, and the mean relative error of the latencies of those rows."""

    costs: IterationCosts
    error: float


def calibrate_costs(replica: ReplicaModel, rows: Sequence[MeasuredLatency]) -> CalibratedCosts:
    """Return the costs under which the model predicts the measured rows, starting from those of `replica`.

    The relative errors are minimised by bounded least squares with a loss that outliers hardly move.

    Raises:
        ValueError: there is no row, or a row is beyond what the replica could ever serve.
    """
    from scipy.optimize import least_squares  # slow to load, and most processes calibrate nothing

    if not rows:
        raise ValueError("`measurements` is empty. Give at least one measured run, better two at different loads.")
    free = [name for name in _FITTED if getattr(replica.costs, name) > 0]

    def compute_residuals(logs: Floats) -> Floats:
        errors = _compute_errors(_scale(replica, dict(zip(free, logs, strict=True))), rows)
        return np.concatenate([errors, PRIOR_WEIGHT * logs])

    bound = log(FACTOR_MAX)
    fit = least_squares(
        compute_residuals, np.zeros(len(free)), bounds=(-bound, bound), loss="soft_l1", f_scale=ROBUST_SCALE
    )
    fitted = _scale(replica, dict(zip(free, fit.x, strict=True)))
    error = float(np.abs(np.expm1(_compute_errors(fitted, rows))).mean())
    return CalibratedCosts(fitted.costs, error)


def _scale(replica: ReplicaModel, logs: dict[str, float]) -> ReplicaModel:
    values = {name: getattr(replica.costs, name) * exp(factor) for name, factor in logs.items()}
    ratio = values["prefill_token_s"] / replica.costs.prefill_token_s
    pairs_s = replica.costs.attention_pair_s * ratio
    return replace(replica, costs=replace(replica.costs, **values, attention_pair_s=pairs_s))


def _compute_errors(replica: ReplicaModel, rows: Sequence[MeasuredLatency]) -> Floats:
    """Return the logarithm of predicted over measured latencies."""
    errors = []
    for row in rows:
        ttft_s, tpot_s = predict_means(replica, row)
        errors.append(log(tpot_s / row.tpot_s))
        if row.ttft_s and not row.concurrency:
            errors.append(log(ttft_s / row.ttft_s))
    return np.array(errors)


_OVERLOAD_S = 10.0
"""Latency in seconds at full utilization. It grows with the utilization, so that a fit can leave such costs."""


def predict_means(replica: ReplicaModel, row: MeasuredLatency) -> tuple[float, float]:
    """Return the mean TTFT and TPOT in seconds of one replica under the requests of a row.

    With a fixed concurrency, each request passes through its prompt and its steps in turn, so an iteration has
    concurrency / (steps + 1) prompts, and decodes the others. Waits for a place in the batch are left out: a run that
    is useful for calibration has none.
    """
    costs, moments = replica.costs, compute_moments(row.mix, replica.costs)
    if row.concurrency:
        prompts = row.concurrency / (moments.steps + 1)
        running = row.concurrency - prompts
        iteration_s = costs.base_s + running * moments.sequence_s + prompts * moments.prefill_s
        return iteration_s, iteration_s
    pool = PoolLoad(row.mix.rate_per_s, row.mix.arrival_scv, 1)
    state = compute_load(moments, replica, pool)
    if not state.is_stable:
        overload_s = _OVERLOAD_S * row.mix.rate_per_s * moments.work_s
        return overload_s, overload_s
    ttft_s = PoolTails(moments, replica, pool, state).compute_mean_ttft()
    return min(ttft_s, _OVERLOAD_S), min(state.iteration_s, _OVERLOAD_S)
