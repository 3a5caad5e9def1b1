"""Bytes that the ranks of real re-plans read of their checkpoint, relative to what they need and to the lower bound.

The lower bound is what the new ranks need and the GPUs could not have kept, for any order of ranks (see `resharding`).
Ranks are new processes and keep nothing, so "moved" counts data read from pieces that another node wrote. One replica
writes, on any node, so the result can be above or below the lower bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from scheduler.domain.events import EventCode
from scheduler.domain.job_records import LoadTraffic
from scheduler.resharding.placement import GpuSlot, Placement, build_layer_tensors
from scheduler.resharding.rank_mapping import map_ranks
from scheduler.solver.profiles.catalog import load_model
from scheduler.store.protocol import Page
from scheduler.store.sql_store import SqlStore

STATE_BYTES = 12.0
"""Bytes per parameter with AdamW in fp32."""


def rows(model: str, loads: Sequence[LoadTraffic], placements: Sequence[Placement]) -> Iterator[tuple[str, str, str]]:
    """Loads of consecutive re-plans, and the placements before, between and after them."""
    needed, read, moved = ([getattr(load, f"{kind}_bytes") for load in loads] for kind in ("needed", "read", "moved"))
    ratios = [of_read / of_needed for of_read, of_needed in zip(read, needed, strict=True)]
    told = f"{sum(read) / sum(needed):.3f}, worst {max(ratios):.3f} of {len(loads)}, {sum(needed) / 1e6:.0f} MB needed"
    yield f"read of checkpoints over needed, {model}", "1.05", told
    floor = sum(_floor_bytes(model, old, new) for old, new in pairwise(placements))
    told = f"{sum(moved) / floor:.3f}; {sum(moved) / 1e6:.0f} MB, the floor {floor / 1e6:.0f} MB"
    yield f"read of other nodes' pieces over the mapping's floor, {model}", "1.05", told


def placement(store: SqlStore) -> Placement:
    """Return the current placement of the job's ranks."""
    snapshot = store.load().snapshot
    allocation = snapshot.jobs["job"].allocation
    assert allocation.plan is not None
    return Placement(allocation.plan, tuple(GpuSlot(*seat) for seat in snapshot.rank_placement(allocation)))


def loads(store: SqlStore) -> list[LoadTraffic]:
    """Return the bytes of the re-plans reported so far."""
    events = [stored.event for stored in store.list_events(Page(limit=1000), subject="job")]
    told = [event.numbers for event in events if event.code is EventCode.JOB_REPLANNED]
    return [LoadTraffic(*(int(one[f"{kind}_bytes"]) for kind in ("needed", "read", "moved"))) for one in told]


def _floor_bytes(model: str, old: Placement, new: Placement) -> float:
    profile = load_model(model)
    sizes = [STATE_BYTES * run.parameters for run in profile.layers for _ in range(run.layers)]
    sizes[0] += STATE_BYTES * profile.embedding.parameters
    sizes[-1] += STATE_BYTES * profile.head.parameters
    return map_ranks(old, new.plan, new.slots, build_layer_tensors(sizes)).floor_bytes
