"""Candidates: complete strategies as columns, a spread with its sharding, recompute and offload.

Left out is what cannot win (with a property test): ZeRO-1 where the worker has ZeRO-2 and there is one micro-batch.
Both then reduce once, and ZeRO-2 holds less.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from scheduler.domain.parallel_plan import LayerStrategy, Recompute
from scheduler.solver.costs.spreads import Limits, Spreads, spreads
from scheduler.solver.instance import Ints
from scheduler.solver.profiles.hardware_profile import Dimension

RECOMPUTES = (Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL)
"""A column of recomputes holds positions in this."""


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Columns [N]; `spread` points into `spreads`, `hybrid` is 1 where ZeRO-3 shards inside a node alone."""

    spreads: Spreads
    spread: Ints
    zero: Ints
    hybrid: Ints
    shard_group: Ints
    recompute: Ints
    offload: Ints

    @property
    def micro_batches(self) -> Ints:
        return self.spreads.micro_batches[self.spread]

    @classmethod
    def of(cls, strategies: list[LayerStrategy], *, micro_batches: int, batch: int) -> Candidates:
        """The given strategies, at `micro_batches` micro-batches of `batch` samples, a column each."""
        columns = np.array(
            [
                (micro_batches, batch // one.dp, one.tp, one.sequence_sharding, one.dp, one.ulysses, one.ring, one.ep)
                for one in strategies
            ],
            dtype=np.int64,
        )
        taken = Spreads(*columns.T)
        groups = np.array([one.shard_group for one in strategies], dtype=np.int64)
        zero = np.array([one.zero for one in strategies], dtype=np.int64)
        return cls(
            spreads=taken,
            spread=np.arange(len(strategies)),
            zero=zero,
            hybrid=((zero == 3) & (groups < taken.replicas)).astype(np.int64),
            shard_group=groups,
            recompute=np.array([RECOMPUTES.index(one.recompute) for one in strategies], dtype=np.int64),
            offload=np.array([one.offload for one in strategies], dtype=np.int64),
        )

    def strategy(self, number: int) -> LayerStrategy:
        """Candidate `number` as one layer's strategy."""
        own, spread = self.spreads, self.spread[number]
        return LayerStrategy(
            layers=1,
            tp=int(own.tp[spread]),
            sequence_sharding=bool(own.sharded[spread]),
            dp=int(own.dp[spread]),
            zero=int(self.zero[number]),
            shard_group=int(self.shard_group[number]),
            ulysses=int(own.ulysses[spread]),
            ring=int(own.ring[spread]),
            ep=int(own.ep[spread]),
            recompute=RECOMPUTES[self.recompute[number]],
            offload=bool(self.offload[number]),
        )


@lru_cache(maxsize=1024)
def candidates(
    limits: Limits, dimensions: frozenset[Dimension], node_gpus: int, gpus: int, global_batch: int
) -> Candidates:
    """Every strategy on a stage of `gpus` GPUs that may win, by ascending number of micro-batches."""
    base = spreads(limits, dimensions, node_gpus, gpus, global_batch)
    variants = _variants(dimensions)
    spread = np.repeat(np.arange(len(base.tp)), len(variants))
    zero, hybrid, recompute, offload = np.tile(variants.T, len(base.tp))
    replicas, ep = base.replicas[spread], base.ep[spread]
    in_node = node_gpus // base.tp[spread]
    group = np.where(zero == 0, 1, np.where(hybrid == 1, in_node, replicas))
    allowed = (zero == 0) | (replicas > 1)
    allowed &= (hybrid == 0) | ((in_node > 1) & (in_node < replicas) & ((in_node % ep == 0) | (ep % in_node == 0)))
    allowed &= (offload == 0) | (zero > 0) | (replicas == 1)
    if Dimension.ZERO in dimensions:
        allowed &= (zero != 1) | (base.micro_batches[spread] > 1)
    return Candidates(*(base, *(column[allowed] for column in (spread, zero, hybrid, group, recompute, offload))))


def _variants(dimensions: frozenset[Dimension]) -> Ints:
    """Rows (zero, hybrid, recompute, offload) that the worker supports."""
    zeros = [(0, 0)]
    zeros += [(1, 0), (2, 0)] if Dimension.ZERO in dimensions else []
    zeros += [(3, 0)] if Dimension.FSDP in dimensions else []
    zeros += [(3, 1)] if Dimension.HYBRID_SHARD in dimensions else []
    recomputes = [0]
    recomputes += [1] if Dimension.SELECTIVE_RECOMPUTE in dimensions else []
    recomputes += [2] if Dimension.RECOMPUTE in dimensions else []
    offloads = [0, 1] if Dimension.OFFLOAD in dimensions else [0]
    rows = [(*zero, recompute, offload) for zero in zeros for offload in offloads for recompute in recomputes]
    return np.array(rows, dtype=np.int64)
