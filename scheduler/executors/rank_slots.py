"""The place of each rank: its number on its node, and its GPU. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from scheduler.domain.gpu_sets import RankPlacement


@dataclass(frozen=True, slots=True)
class RankSlot:
    """Position of a rank: its index among the job's ranks on `node`, and its GPU there."""

    rank: int
    local_rank: int
    node: str
    gpu: int


@lru_cache(maxsize=4096)
def assign_rank_slots(seats: RankPlacement) -> tuple[RankSlot, ...]:
    """Return the slot of each rank. Ranks on a node are numbered in order.

    Cached, because it is asked for every live run in every tick.
    """
    counts, places = Counter[str](), list[RankSlot]()
    for rank, (node, gpu) in enumerate(seats):
        places.append(RankSlot(rank, counts[node], node, gpu))
        counts[node] += 1
    return tuple(places)
