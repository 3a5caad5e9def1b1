"""Tails of the time to first token (TTFT) and of the time per output token (TPOT) of a pool.

The tails are probabilities that a request exceeds a bound. TTFT adds the rest of the running iteration, the wait for a
place in the batch, the wait for earlier prompts, and the request's own prompt. TPOT is the mean iteration of a
request's decode steps, which fluctuates with the running requests and with the prompts that arrive meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import erfc, exp, inf, lgamma, log, sqrt

import numpy as np

from scheduler.serving.length_moments import LengthMoments
from scheduler.serving.replica_load import PoolLoad, ReplicaLoad
from scheduler.serving.replica_model import ReplicaModel
from scheduler.serving.request_mix import Floats

Tail = Callable[[float], float]
"""Probability above a bound in seconds."""
_NODES, _NODE_WEIGHTS = np.polynomial.hermite_e.hermegauss(5)
_NODE_WEIGHTS = _NODE_WEIGHTS / _NODE_WEIGHTS.sum()
LOAD_MAX = 0.98
"""Largest load of a replica to which a fluctuation of the rate is followed."""
LOCAL_DISPERSION = 0.1
"""Variance over mean of the prompts that a balancing router sends to one replica of many, in a time."""
_RESIDUALS = np.array([1 / 6, 1 / 2, 5 / 6])
"""Parts of an iteration that remain when a request arrives: midpoints of equal shares of a uniform distribution."""


@dataclass(frozen=True, slots=True)
class Wait:
    """A wait that is 0 with probability 1 - `probability`, else exponential with mean `mean_s`."""

    probability: float
    mean_s: float

    def compute_tail(self, bounds_s: Floats) -> Floats:
        """Return the probability of a wait above each bound; 1 below 0."""
        if self.mean_s <= 0 or self.probability <= 0:
            return (bounds_s < 0).astype(np.float64)
        beyond = np.maximum(bounds_s, 0.0)
        tail = self.probability * np.exp(-beyond / self.mean_s) if self.mean_s < inf else self.probability + 0 * beyond
        return np.where(bounds_s < 0, 1.0, tail)


def compute_erlang_c(servers: int, offered: float) -> float:
    """Return the probability that an arrival waits in M/M/c (Erlang C); 1 if `offered` erlangs exceed the servers.

    Computed from the inverse of Erlang B, whose recursion is stable, or from the sum of logarithms for many servers.
    """
    if offered >= servers:
        return 1.0
    if offered <= 0:
        return 0.0
    if servers <= 400:
        inverse = 1.0
        for count in range(1, servers + 1):
            inverse = 1.0 + inverse * count / offered
    else:
        tails = servers * log(offered) - lgamma(servers + 1) - offered
        inverse = float(_compute_gamma_tails(servers + 1, offered)) / exp(tails) if tails > -700 else inf
    blocking = 1.0 / inverse
    return blocking / (1 - offered / servers * (1 - blocking))


@dataclass(frozen=True, slots=True)
class PoolTails:
    """Latencies of a pool in its steady state. Every tail is 1 if the pool cannot keep up."""

    moments: LengthMoments
    replica: ReplicaModel
    pool: PoolLoad
    state: ReplicaLoad

    @property
    def chunk_tokens(self) -> float:
        """Tokens of prompts that an iteration can take: the budget that running requests leave."""
        return max(self.replica.limits.batched_tokens - self.state.running, 1.0)

    def compute_prompt_wait(self) -> Wait:
        """Return the wait for earlier prompts: M/G/c with Erlang C and the correction of Allen and Cunneen.

        A prompt occupies a replica for its own seconds and for its share of the decode part of iterations. Source:
        Allen, "Probability, Statistics, and Queueing Theory", 2nd ed., section 5.3.4. Bursts add to it the wait for
        those that arrived at the same time and went to the same replica.
        """
        moments, state, servers = self.moments, self.state, self.pool.replicas
        overhead_s = state.decode_iteration_s / self.chunk_tokens
        mean_s = moments.prefill_s + overhead_s * moments.prompt
        ratio = (mean_s / moments.prefill_s) ** 2
        scv = max(ratio * moments.prefill_square_s2 / mean_s**2 - 1, 0.0)
        offered = self.pool.rate_per_s * mean_s
        if offered >= servers:
            return Wait(1.0, inf)
        burst, alone = self.pool.arrival_scv, 1 / servers**2
        queued = compute_erlang_c(servers, offered)
        mean_wait_s = queued * mean_s / (servers - offered) * (burst + scv) / 2
        behind = max(burst - 1, 0.0) / (burst + 1) * alone
        mean_wait_s += max(burst - 1, 0.0) / 4 * mean_s * servers / (servers - offered) * alone
        probability = 1 - (1 - queued) * (1 - behind)
        return Wait(probability, mean_wait_s / probability if probability else 0.0)

    def compute_slot_wait(self) -> Wait:
        """Return the wait for a place in the batch, by the KV cache or by the number of sequences.

        Places are servers that a request holds for all its steps. With many servers, the probability to wait follows
        from the distance of the mean to the limit in standard deviations (Halfin and Whitt, Operations Research 29(3),
        1981, theorem 1), which holds for variances other than that of a Poisson process as well.
        """
        limits, state, moments = self.replica.limits, self.state, self.moments
        if moments.steps == 0:
            return Wait(0.0, 0.0)
        waits = []
        for limit, mean, variance, size in (
            (limits.kv_tokens - moments.prompt, state.kv_tokens, state.kv_variance, moments.context),
            (float(limits.sequences), state.running, state.running_variance, 1.0),
        ):
            gap = limit - mean
            if gap <= 0:
                return Wait(1.0, inf)
            beta = gap / sqrt(max(variance, 1e-12))
            residence_s = moments.steps * state.iteration_s
            waits.append(Wait(_compute_halfin_whitt(beta), residence_s * size / gap / self.pool.replicas))
        return max(waits, key=lambda wait: wait.probability)

    def compute_overflow(self) -> float:
        """Return the probability that the running requests grow beyond the KV cache, so that one is preempted."""
        state, capacity = self.state, self.replica.limits.kv_tokens
        if not state.is_stable:
            return 1.0
        return _compute_normal_share((state.kv_tokens - capacity) / sqrt(max(state.kv_variance, 1e-12)))

    def compute_mean_ttft(self) -> float:
        """Return the mean time to first token in seconds of a stable pool whose batch has places left."""
        _, shares = self.moments.prompt_groups
        wait = self.compute_prompt_wait()
        queued_s = wait.probability * wait.mean_s if wait.probability else 0.0
        return float(shares @ self._compute_own_s()) + self._busy * self.state.iteration_s / 2 + queued_s

    def compute_ttft_tail(self, bound_s: float) -> float:
        """Return the probability that a request waits longer than `bound_s` for its first token."""
        return self.build_ttft_tail()(bound_s)

    def build_ttft_tail(self) -> Tail:
        """Return the function from a bound in seconds to the probability of a longer time to first token."""
        if not self.state.is_stable:
            return _exceed_always
        _, shares = self.moments.prompt_groups
        spent_s = self._compute_own_s()[:, None] + self._busy * self.state.iteration_s * _RESIDUALS
        prompt_wait, slot_wait = self.compute_prompt_wait(), self.compute_slot_wait()

        def compute(bound_s: float) -> float:
            rest_s = bound_s - spent_s
            kept = (1 - prompt_wait.compute_tail(rest_s)) * (1 - slot_wait.compute_tail(rest_s))
            return float(shares @ (1 - kept).mean(axis=1))

        return compute

    @property
    def _busy(self) -> float:
        """Probability that an arrival finds an iteration in progress, at most."""
        return min(self.state.running + self.state.utilization, 1.0)

    def _compute_own_s(self) -> Floats:
        """Return the seconds of the iterations that compute the prompt of each group, of shape [groups]."""
        prompts, _ = self.moments.prompt_groups
        costs, state = self.replica.costs, self.state
        iterations = np.ceil(prompts / self.chunk_tokens)
        own_s = costs.prefill_token_s * prompts + costs.attention_pair_s * prompts**2 / 2
        return np.asarray(iterations * state.decode_iteration_s + own_s)

    def compute_tpot_tail(self, bound_s: float) -> float:
        """Return the probability that the mean time between a request's tokens exceeds `bound_s`."""
        return self.build_tpot_tail()(bound_s)

    def build_tpot_tail(self) -> Tail:
        """Return the function from a bound in seconds to the probability of a longer time per output token."""
        state, moments, costs = self.state, self.moments, self.replica.costs
        if not state.is_stable:
            return _exceed_always
        if moments.steps == 0:
            return lambda bound_s: 0.0
        steps, shares = moments.step_groups
        averaging = _compute_averaging(steps * (1 - state.decode_share) / moments.steps)[:, None]
        rates = self.pool.replica_rate_per_s * (1 + state.rate_deviation * np.sqrt(averaging) * _NODES)
        rates = np.clip(rates, self.pool.replica_rate_per_s / 100, LOAD_MAX / moments.work_s)
        iterations_s = state.idle_iteration_s / (1 - rates * moments.work_s)
        floors_s = iterations_s * (1 - rates * moments.prefill_s)
        mean_s, variance_s2 = self._compute_prompt_share(rates * iterations_s, steps[:, None])
        own_noise = moments.sequence_s**2 * state.routing_variance
        own_noise += costs.kv_token_s**2 * state.running * moments.context_variance
        variance_s2 = variance_s2 + averaging * own_noise
        shape, per_s = mean_s**2 / variance_s2, mean_s / variance_s2
        largest_s = self.chunk_tokens * (costs.prefill_token_s + costs.attention_pair_s * moments.longest)

        def compute(bound_s: float) -> float:
            rest_s = bound_s - floors_s
            above = (rest_s <= 0).astype(np.float64)
            between = (rest_s > 0) & (rest_s < largest_s)
            above[between] = _compute_gamma_tails(shape[between], rest_s[between] * per_s[between])
            return float(shares @ (above @ _NODE_WEIGHTS))

        return compute

    def _compute_prompt_share(self, arrivals: Floats, steps: Floats) -> tuple[Floats, Floats]:
        """Return mean and variance of the seconds that prompts add to the mean of `steps` iterations.

        Steps last longer the more prompts arrive, and more prompts arrive the longer they last: their time is a busy
        period that starts with the decode parts, and its variance has the factor 1 / (1 - load)^3 (Kleinrock, "Queueing
        Systems", vol. 1, section 5.8). Only fluctuations that all replicas share do so. A router sends fewer prompts
        to a replica that is behind, so each replica's own fluctuations are those of prompt lengths alone.

        Args:
            arrivals: prompts per iteration.
        """
        moments, pool = self.moments, self.pool
        parts = 1 / pool.replicas
        rest = 1 - pool.replica_rate_per_s * moments.prefill_s
        square_s2 = moments.prefill_s**2
        local_s2 = moments.prefill_square_s2 - square_s2
        shared_s2 = (local_s2 + pool.arrival_scv * square_s2) / rest**2
        variance_s2 = arrivals / steps * ((1 - parts) * (local_s2 + LOCAL_DISPERSION * square_s2) + parts * shared_s2)
        followers = max(pool.arrival_scv - 1, 0.0) / 2 * parts / steps / rest
        return (arrivals + followers) * moments.prefill_s, np.maximum(variance_s2, 1e-18)


def _exceed_always(bound_s: float) -> float:
    """Return the tail of a pool that cannot keep up."""
    return 1.0


def _compute_halfin_whitt(beta: float) -> float:
    """Return the probability to wait at `beta` standard deviations of spare places."""
    if beta > 8:
        return 0.0
    density = exp(-(beta**2) / 2) / sqrt(2 * np.pi)
    return float(1 / (1 + beta * _compute_normal_share(beta) / density))


def _compute_normal_share(deviations: float) -> float:
    """Return the probability that a normal variable is below a number of standard deviations from its mean."""
    return erfc(-deviations / sqrt(2)) / 2


def _compute_gamma_tails(shapes: Floats | int, bounds: Floats | float) -> Floats:
    """Return the probabilities that gamma variables of scale 1 exceed bounds."""
    from scipy.special import (
        gammaincc,
    )  # half a second of CPU time, which processes that never size pools need not spend

    return np.asarray(gammaincc(shapes, bounds), dtype=np.float64)


def _compute_averaging(windows: Floats) -> Floats:
    """Return by which factor a mean over each window lowers the variance of an Ornstein-Uhlenbeck process.

    Windows are multiples of the relaxation time.
    """
    lengths = np.maximum(windows, 1e-6)
    return np.asarray(2 * (np.exp(-lengths) - 1 + lengths) / lengths**2)
