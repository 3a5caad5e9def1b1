"""Ranks that compute more slowly than the others of their run. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from scheduler.domain.observation import Straggler

SLOWDOWN_MIN = 1.3


def find_straggler(probes_s: Mapping[int, float], nodes: Sequence[str]) -> Straggler | None:
    """Return the slowest rank if it takes SLOWDOWN_MIN times the median of the others or more, else None.

    Each probe is already the median over several windows, so a short disturbance is not flagged.

    Args:
        probes_s: median time of the fixed computation by rank. Ranks without one are left out.
        nodes: node of each rank.
    """
    if len(probes_s) < 2:
        return None
    rank = max(probes_s, key=lambda each: (probes_s[each], -each))
    others_s = median(seconds for other, seconds in probes_s.items() if other != rank)
    if others_s <= 0 or probes_s[rank] < SLOWDOWN_MIN * others_s:
        return None
    return Straggler(rank, nodes[rank], probes_s[rank], others_s)
