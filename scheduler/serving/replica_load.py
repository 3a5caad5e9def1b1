"""The steady state of one replica of a pool under a share of the requests."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, sqrt

from scheduler.serving.length_moments import LengthMoments
from scheduler.serving.replica_model import ReplicaModel

ROUTING_NOISE = 0.5
"""Variance of the running requests of a replica when the router balances them: counts differ by about one."""


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """Requests that arrive at a pool: rate per second over all replicas, and the SCV of times between arrivals."""

    rate_per_s: float
    arrival_scv: float
    replicas: int

    @property
    def replica_rate_per_s(self) -> float:
        return self.rate_per_s / self.replicas


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """The steady state of one replica.

    Attributes:
        utilization: part of each second that requests add to iterations; the rest are bases of iterations. At 1 no
            replica keeps up.
        iteration_s: mean iteration during the decode steps of a request; infinite above full utilization.
        decode_iteration_s: the part of it that is not prompts.
        running: mean requests that run, and `running_variance`.
        decode_share: part of `decode_iteration_s` that running requests add.
        kv_tokens: mean tokens in the KV cache, and `kv_variance`.
    """

    utilization: float
    iteration_s: float
    idle_iteration_s: float
    decode_iteration_s: float
    running: float
    routing_variance: float
    rate_deviation: float
    running_variance: float
    decode_share: float
    kv_tokens: float
    kv_variance: float

    @property
    def is_stable(self) -> bool:
        return self.iteration_s < inf


_OVERLOADED = ReplicaLoad(inf, inf, inf, inf, inf, inf, 0.0, inf, 1.0, inf, inf)


def compute_load(moments: LengthMoments, replica: ReplicaModel, load: PoolLoad) -> ReplicaLoad:
    """Return the steady state of each replica.

    Little's law gives the running requests as rate x steps x iteration, and each adds to the iteration, so the
    iteration is the fixed point base / (1 - rate x work). A request also meets itself: the running requests that it
    sees are the mean plus variance over mean.

    The variance is that of a linearised birth-death process: arrivals of dispersion (1 + SCV) / 2, and a drift back
    that is weaker the more a longer batch slows its own departures. Replicas behind a balancing router share it.
    """
    rate, costs = load.replica_rate_per_s, replica.costs
    utilization = rate * moments.work_s
    if utilization >= 1:
        return _OVERLOADED
    followers = max(load.arrival_scv - 1, 0.0) / 2 / load.replicas
    seen = 1.0
    for _ in range(3):
        iteration_s = (costs.base_s + seen * moments.sequence_s) / (1 - utilization)
        running = rate * moments.steps * iteration_s
        decode_iteration_s = costs.base_s + (running + seen) * moments.sequence_s
        decode_share = min(running * moments.sequence_s / decode_iteration_s, 0.999)
        dispersion = (1 + load.arrival_scv) / 2 / (1 - decode_share) / load.replicas
        noise = (1 - 1 / load.replicas) * min(ROUTING_NOISE / max(running, 1e-12), 1.0)
        seen = dispersion + noise + followers
    variance = running * (dispersion + noise)
    cached = running * moments.context + rate * iteration_s * moments.prompt
    return ReplicaLoad(
        utilization=utilization,
        iteration_s=iteration_s,
        idle_iteration_s=costs.base_s + seen * moments.sequence_s,
        decode_iteration_s=decode_iteration_s,
        running=running,
        routing_variance=running * noise,
        rate_deviation=(1 - utilization) * sqrt(dispersion / max(running, 1e-12)),
        running_variance=variance,
        decode_share=decode_share,
        kv_tokens=cached,
        kv_variance=running * moments.context_variance + moments.context**2 * variance,
    )
