"""What moving bytes costs: ring collectives as latency plus bytes over bandwidth (Thakur et al. 2005, section 4).

`size_bytes` is the whole message: what every rank holds before an all-reduce, or after an all-gather.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Link:
    """The slowest hop of a group's ring, as one GPU sees it."""

    bandwidth_bytes_per_s: float
    latency_s: float


def all_gather_s(size_bytes: float, ranks: int, link: Link) -> float:
    """Each of `ranks - 1` steps passes one share of the message on."""
    steps = ranks - 1
    return steps * (link.latency_s + size_bytes / ranks / link.bandwidth_bytes_per_s)


def reduce_scatter_s(size_bytes: float, ranks: int, link: Link) -> float:
    """The mirror image of an all-gather, at the same cost; adding up is free beside the transfer."""
    return all_gather_s(size_bytes, ranks, link)


def all_reduce_s(size_bytes: float, ranks: int, link: Link) -> float:
    """A reduce-scatter followed by an all-gather."""
    return 2 * all_gather_s(size_bytes, ranks, link)


def send_s(size_bytes: float, link: Link) -> float:
    """One message to one peer."""
    return link.latency_s + size_bytes / link.bandwidth_bytes_per_s
