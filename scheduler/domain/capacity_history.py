"""Use of the GPUs of each pool: at one moment, and integrated over bins of time.

Every GPU of a pool is in exactly one use, so the uses add up to the pool's GPUs.

GPUs of inference and training pools:
    inference: used by inference
    used: held by jobs, on a node that training owns
    lent_used: held by jobs, on a node of an inference pool
    lent_idle: on a lent or recalled node, held by no job and used by no inference
    free: up and used by none. On a node of an inference pool that is not lent, a reserve of inference.
    other: used by pods of another scheduler
    down: on a node that is down, or unused on a cordoned, draining or quarantined node

An offered node is not lent yet, because inference may still run on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple


class PoolUse(NamedTuple):
    """GPUs of a pool by use at one moment, with its demand and the jobs that wait for its GPU models.

    Args:
        lent_idle_waited, free_waited: the part of `lent_idle` and `free` that a pending job could hold by its GPU
            model. `free_waited` of an inference pool is the reserve that was not lent.
        lent_nodes: nodes that are lent or recalled.
        demand_gpus: reported number of GPUs that inference needs; None without a reading.
        is_short: whether demand exceeds the GPUs that are up and not lent, while some are lent.
        pending_jobs, pending_gpus: pending jobs that accept a GPU model of the pool, and the sum of their minima.
    """

    inference: int = 0
    used: int = 0
    lent_used: int = 0
    lent_idle: int = 0
    free: int = 0
    other: int = 0
    down: int = 0
    lent_idle_waited: int = 0
    free_waited: int = 0
    lent_nodes: int = 0
    demand_gpus: float | None = None
    is_short: bool = False
    pending_jobs: int = 0
    pending_gpus: int = 0

    @property
    def gpus(self) -> int:
        """All GPUs of the pool, up or not."""
        return self.inference + self.used + self.lent_used + self.lent_idle + self.free + self.other + self.down


@dataclass(frozen=True, slots=True)
class CapacityTier:
    """Bins of one width, in seconds, and for how many days they are stored."""

    step_s: int
    days: int


MINUTES, TEN_MINUTES, HOURS = CapacityTier(60, 2), CapacityTier(600, 14), CapacityTier(3600, 400)
"""Tiers of bins. The days of the last one are a setting."""
CAPACITY_TIERS = (MINUTES, TEN_MINUTES, HOURS)
"""All tiers, the narrowest bins first. A pool has 14,496 bins after 400 days."""
BIN_S = MINUTES.step_s
CHECKPOINT_STEP_S = 300
"""Time between two checkpoints of the fleet, in seconds."""
CHECKPOINT_DAYS = 2
"""For how many days checkpoints that are not hourly are stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityBin:
    """GPU-seconds of one pool by use in the `step_s` seconds from `at_s`.

    Args:
        at_s: start of the bin, a multiple of `step_s`, in seconds since 1970 (UTC).
        seconds: how much of the bin was observed. The uses add up to the pool's GPUs times these seconds.
        demand_gpu_s, demand_s: demand integrated over the seconds in which there was a reading.
        short_s: seconds in which lending left inference short.
        lent_node_s: node-seconds of nodes that were lent or recalled.
        lends, recalls, returns, late_returns: nodes whose loan began, was recalled, or ended by a return, and returns
            after the deadline.

    The other fields are as in `PoolUse`, `..._gpu_s` integrated and `..._max` the maximum.
    """

    pool: str
    step_s: int
    at_s: int
    seconds: float = 0.0
    inference_gpu_s: float = 0.0
    used_gpu_s: float = 0.0
    lent_used_gpu_s: float = 0.0
    lent_idle_gpu_s: float = 0.0
    free_gpu_s: float = 0.0
    other_gpu_s: float = 0.0
    down_gpu_s: float = 0.0
    lent_idle_waited_gpu_s: float = 0.0
    free_waited_gpu_s: float = 0.0
    lent_node_s: float = 0.0
    demand_gpu_s: float = 0.0
    demand_s: float = 0.0
    short_s: float = 0.0
    lends: int = 0
    recalls: int = 0
    returns: int = 0
    late_returns: int = 0
    demand_gpus_max: float = 0.0
    lent_nodes_max: int = 0
    pending_jobs_max: int = 0
    pending_gpus_max: int = 0

    @property
    def capacity_gpu_s(self) -> float:
        """GPU-seconds of all GPUs of the pool, up or not."""
        return sum(self.uses_gpu_s.values())

    @property
    def uses_gpu_s(self) -> Mapping[str, float]:
        """GPU-seconds by use, which add up to the capacity."""
        return {use: float(getattr(self, f"{use}_gpu_s")) for use in GPU_USES}

    def merge(self, other: CapacityBin) -> CapacityBin:
        """Return the sums and maxima of two bins, with the place of this one."""
        sums = {name: getattr(self, name) + getattr(other, name) for name in SUMMED_FIELDS}
        return replace(self, **sums, **{name: max(getattr(self, name), getattr(other, name)) for name in MAX_FIELDS})


GPU_USES = ("inference", "used", "lent_used", "lent_idle", "free", "other", "down")
"""Uses that add up to the GPUs of a pool."""
SUMMED_FIELDS = (
    "seconds", *(f"{use}_gpu_s" for use in GPU_USES), "lent_idle_waited_gpu_s", "free_waited_gpu_s", "lent_node_s",
    "demand_gpu_s", "demand_s", "short_s", "lends", "recalls", "returns", "late_returns",
)  # fmt: skip
MAX_FIELDS = ("demand_gpus_max", "lent_nodes_max", "pending_jobs_max", "pending_gpus_max")


def build_bins(pool: str, use: PoolUse, *, from_s: float, to_s: float) -> Iterator[CapacityBin]:
    """Yield the narrowest bins of a pool whose use did not change between two times."""
    while from_s < to_s:
        at_s = int(from_s // BIN_S) * BIN_S
        end_s = min(to_s, float(at_s + BIN_S))
        yield _build_bin(pool, use, at_s, end_s - from_s)
        from_s = end_s


def roll_up(bins: Iterable[CapacityBin], step_s: int) -> tuple[CapacityBin, ...]:
    """Return the bins merged into bins of `step_s` seconds, by pool and time."""
    merged: dict[tuple[str, int], CapacityBin] = {}
    for each in bins:
        at_s = each.at_s // step_s * step_s
        known = merged.get((each.pool, at_s))
        if known is not None:
            merged[each.pool, at_s] = known.merge(each)
        else:
            merged[each.pool, at_s] = each if each.step_s == step_s else replace(each, step_s=step_s, at_s=at_s)
    return tuple(merged[key] for key in sorted(merged))


def _build_bin(pool: str, use: PoolUse, at_s: int, seconds: float) -> CapacityBin:
    return CapacityBin(
        pool=pool,
        step_s=BIN_S,
        at_s=at_s,
        seconds=seconds,
        inference_gpu_s=use.inference * seconds,
        used_gpu_s=use.used * seconds,
        lent_used_gpu_s=use.lent_used * seconds,
        lent_idle_gpu_s=use.lent_idle * seconds,
        free_gpu_s=use.free * seconds,
        other_gpu_s=use.other * seconds,
        down_gpu_s=use.down * seconds,
        lent_idle_waited_gpu_s=use.lent_idle_waited * seconds,
        free_waited_gpu_s=use.free_waited * seconds,
        lent_node_s=use.lent_nodes * seconds,
        demand_gpu_s=(use.demand_gpus or 0.0) * seconds,
        demand_s=0.0 if use.demand_gpus is None else seconds,
        short_s=seconds if use.is_short else 0.0,
        demand_gpus_max=use.demand_gpus or 0.0,
        lent_nodes_max=use.lent_nodes,
        pending_jobs_max=use.pending_jobs,
        pending_gpus_max=use.pending_gpus,
    )
