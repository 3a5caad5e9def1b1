"""Replicas that a pool needs so that its requests meet a latency objective."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from math import ceil, inf, sqrt

from scheduler.serving.latency_tails import PoolTails
from scheduler.serving.length_moments import LengthMoments, compute_moments
from scheduler.serving.replica_load import PoolLoad, compute_load
from scheduler.serving.replica_model import ReplicaModel
from scheduler.serving.request_mix import RequestMix

REPLICAS_MAX = 100_000
RATE_MARGIN, BURST_MARGIN = 0.04, 0.03
"""Parts of the rate that are added before sizing, so that the error of the model does not leave a pool too small.

The second one is for bursts: it is multiplied by the SCV of arrivals above 1, and divided by the square root of the
replicas over which bursts spread. Both come from comparisons with a token-by-token simulation."""
OVERFLOW_MAX = 0.1
"""Largest probability that the KV cache overflows. Above it, preempted requests are computed again so often that the
pool falls behind: with greedy admission its latency then grows without bound."""
TTFT_MARGIN = 0.06
"""Part of the bound on TTFT that sizing leaves free, for the same reason: its tail is approximate."""
_QUANTILE_STEPS = 10


class CapacityError(ValueError):
    """No number of replicas meets the objective. The message names the limit and the value that would do."""


class BindingLimit(StrEnum):
    """The limit that one replica less would exceed."""

    TTFT = "ttft"
    TPOT = "tpot"
    KV_CACHE = "kv_cache"
    SEQUENCES = "sequences"
    THROUGHPUT = "throughput"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class LatencyObjective:
    """Bounds in seconds on TTFT and TPOT that a share `percentile` of requests meets, such as 0.95."""

    ttft_s: float
    tpot_s: float
    percentile: float = 0.95

    def __post_init__(self) -> None:
        for field in ("ttft_s", "tpot_s"):
            value = getattr(self, field)
            if not 0 < value < inf:
                raise ValueError(f"`{field}` is {value}. Use a finite number of seconds above 0.")
        if not 0 < self.percentile < 1:
            raise ValueError(f"`percentile` is {self.percentile}. Use a share above 0 and below 1, such as 0.95.")


@dataclass(frozen=True, slots=True)
class Capacity:
    """A sized pool.

    Attributes:
        ttft_s, tpot_s: expected latencies at the objective's percentile.
        running: mean running requests of a replica. `kv_share`: mean use of its KV cache.
        utilization: part of the time that requests add to iterations.
        binding: the limit that one replica less would exceed.
    """

    replicas: int
    gpus: int
    ttft_s: float
    tpot_s: float
    running: float
    kv_share: float
    utilization: float
    binding: BindingLimit


def size_pool(mix: RequestMix, replica: ReplicaModel, objective: LatencyObjective) -> Capacity:
    """Return the smallest pool that meets the objective.

    Raises:
        CapacityError: no number of replicas meets the objective.
    """
    return PoolSizer(mix, replica, objective).size(mix.rate_per_s, mix.arrival_scv)


def predict_pool(mix: RequestMix, replica: ReplicaModel, replicas: int) -> PoolTails:
    """Return the latency tails of a pool of a given size."""
    load = PoolLoad(mix.rate_per_s, mix.arrival_scv, replicas)
    return _predict(load, replica, compute_moments(mix, replica.costs))


def _predict(load: PoolLoad, replica: ReplicaModel, moments: LengthMoments) -> PoolTails:
    return PoolTails(moments, replica, load, compute_load(moments, replica, load))


class PoolSizer:
    """Sizes of pools for requests of the same lengths, whose moments are computed once."""

    def __init__(self, mix: RequestMix, replica: ReplicaModel, objective: LatencyObjective) -> None:
        self._replica = replica
        self._objective = objective
        self._moments = compute_moments(mix, replica.costs)
        self._is_feasible = False

    def size(self, rate_per_s: float, arrival_scv: float) -> Capacity:
        """Return the smallest pool that meets the objective at a rate per second and a SCV of arrivals.

        Raises:
            CapacityError: no number of replicas meets the objective.
        """
        self.check_feasible()
        search = _Search(rate_per_s, arrival_scv, self._replica, self._objective, self._moments)
        fewest = max(ceil(rate_per_s * self._moments.work_s), 1)
        most = fewest
        while not search.meets(most):
            if most >= REPLICAS_MAX:
                raise CapacityError(f"`rate` is {rate_per_s:g}, which needs more than {REPLICAS_MAX} replicas.")
            fewest, most = most + 1, min(most + max(most // 4, 1), REPLICAS_MAX)
        while fewest < most:
            middle = (fewest + most) // 2
            fewest, most = (fewest, middle) if search.meets(middle) else (middle + 1, most)
        return search.describe(most)

    def check_feasible(self) -> None:
        """Raise CapacityError unless an almost idle pool meets the objective and holds the longest request."""
        if self._is_feasible:
            return
        moments, replica, objective = self._moments, self._replica, self._objective
        if moments.longest > replica.limits.kv_tokens:
            raise CapacityError(
                f"a request has {moments.longest:.0f} tokens, but the KV cache of a replica holds "
                f"{replica.limits.kv_tokens}. Use a larger tensor degree or shorter requests."
            )
        idle = _predict(PoolLoad(1e-6, 1.0, 1), replica, moments)
        for field, bound_s, compute_tail in (
            ("tpot", objective.tpot_s, idle.build_tpot_tail()),
            ("ttft", objective.ttft_s * (1 - TTFT_MARGIN), idle.build_ttft_tail()),
        ):
            if compute_tail(bound_s) > 1 - objective.percentile:
                reached_s = _find_quantile(compute_tail, bound_s, objective.percentile)
                raise CapacityError(
                    f"`objective.{field}` leaves {bound_s:.3g} s, but an idle replica needs {reached_s:.3g} s at the "
                    f"percentile {objective.percentile:g}. Allow more time, or use a larger tensor degree."
                )
        self._is_feasible = True


@dataclass(frozen=True, slots=True)
class _Search:
    """One search for the number of replicas."""

    rate_per_s: float
    arrival_scv: float
    replica: ReplicaModel
    objective: LatencyObjective
    moments: LengthMoments

    def predict(self, replicas: int) -> PoolTails:
        """Return the tails of a pool under the rate with its margin."""
        margin = RATE_MARGIN + BURST_MARGIN * max(self.arrival_scv - 1, 0.0) / sqrt(replicas)
        return _predict(
            PoolLoad(self.rate_per_s * (1 + margin), self.arrival_scv, replicas), self.replica, self.moments
        )

    def meets(self, replicas: int) -> bool:
        tails, allowed = self.predict(replicas), 1 - self.objective.percentile
        return (
            tails.compute_overflow() <= OVERFLOW_MAX
            and tails.compute_ttft_tail(self.objective.ttft_s * (1 - TTFT_MARGIN)) <= allowed
            and tails.compute_tpot_tail(self.objective.tpot_s) <= allowed
        )

    def describe(self, replicas: int) -> Capacity:
        load, objective = PoolLoad(self.rate_per_s, self.arrival_scv, replicas), self.objective
        tails = _predict(load, self.replica, self.moments)
        return Capacity(
            replicas=replicas,
            gpus=replicas * self.replica.gpus,
            ttft_s=_find_quantile(tails.build_ttft_tail(), objective.ttft_s, objective.percentile),
            tpot_s=_find_quantile(tails.build_tpot_tail(), objective.tpot_s, objective.percentile),
            running=tails.state.running,
            kv_share=tails.state.kv_tokens / self.replica.limits.kv_tokens,
            utilization=tails.state.utilization,
            binding=self._find_binding(replicas),
        )

    def _find_binding(self, replicas: int) -> BindingLimit:
        if replicas == 1:
            return BindingLimit.NONE
        fewer, allowed = self.predict(replicas - 1), 1 - self.objective.percentile
        if not fewer.state.is_stable:
            return BindingLimit.THROUGHPUT
        if fewer.compute_tpot_tail(self.objective.tpot_s) > allowed:
            return BindingLimit.TPOT
        if fewer.compute_prompt_wait().probability >= fewer.compute_slot_wait().probability:
            return BindingLimit.TTFT
        limits, state = self.replica.limits, fewer.state
        by_cache = state.kv_tokens / limits.kv_tokens > state.running / limits.sequences
        return BindingLimit.KV_CACHE if by_cache else BindingLimit.SEQUENCES


def _find_quantile(compute_tail: Callable[[float], float], start_s: float, percentile: float) -> float:
    """Return the smallest bound in seconds that the share `percentile` meets, by bisection; infinite above 1 h."""
    low, high = 0.0, start_s
    while compute_tail(high) > 1 - percentile:
        low, high = high, 2 * high
        if high > 3_600:
            return inf
    for _ in range(_QUANTILE_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if compute_tail(middle) <= 1 - percentile else (middle, high)
    return high
