"""How much of what each new rank needs every old rank and every old node already holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.resharding.placement import LayerPlace, Placement, check_layers, layer_places
from scheduler.resharding.shards import Cut, cut
from scheduler.resharding.tensors import Extent, TensorFacts

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Overlap:
    """Bytes of model and optimizer state, as whole numbers, so that sums and comparisons are exact.

    `needed` [new ranks]; `by_rank` [new ranks, old ranks] is what of it that old rank holds; `by_node` [new ranks,
    nodes] what any rank on that node holds, copies counted once.
    """

    needed: Floats
    by_rank: Floats
    by_node: Floats
    nodes: tuple[str, ...]


def overlap(old: Placement, new_plan: ParallelPlan, tensors: Sequence[TensorFacts]) -> Overlap:
    """Intersects the rectangles of both plans. Layers that change in the same way are intersected once.

    Raises:
        ValueError: a plan contradicts itself, or the tensors belong to other layers than a plan has.
    """
    nodes = tuple(dict.fromkeys(seat.node for seat in old.seats))
    on_node = np.array([[seat.node == node for node in nodes] for seat in old.seats])
    needed = np.zeros(new_plan.world_size)
    by_rank = np.zeros((new_plan.world_size, old.plan.world_size))
    by_node = np.zeros((new_plan.world_size, len(nodes)))
    cut_once = cache(cut)
    common_once = cache(lambda was, now, extent: _common(cut_once(was, extent), cut_once(now, extent)))
    for (was, now, extent), element_bytes in _changes(old.plan, new_plan, tensors).items():
        old_cut, new_cut = cut_once(was.spread, extent), cut_once(now.spread, extent)
        common = common_once(was.spread, now.spread, extent)
        needed[now.ranks] += element_bytes * new_cut.elements[new_cut.holds]
        by_rank[now.ranks, was.ranks] += element_bytes * common[np.ix_(new_cut.holds, old_cut.holds)]
        present = held_somewhere(old_cut, on_node[was.ranks])
        by_node[now.ranks] += element_bytes * (common @ present)[new_cut.holds]
    return Overlap(np.rint(needed), np.rint(by_rank), np.rint(by_node), nodes)


def held_somewhere(cut: Cut, chosen: Flags) -> Flags:
    """[distinct boxes, sets]: whether a GPU of the set holds the box, for `chosen` [GPUs, sets]."""
    present = np.zeros((len(cut.boxes), chosen.shape[1]), dtype=np.bool_)
    np.logical_or.at(present, cut.holds, chosen)
    return present


def _changes(
    old: ParallelPlan, new: ParallelPlan, tensors: Sequence[TensorFacts]
) -> dict[tuple[LayerPlace, LayerPlace, Extent], float]:
    """Equal tensors of layers that lie alike before and alike after, with the sum of their `element_bytes`."""
    was, now = layer_places(old), layer_places(new)
    if len(was) != len(now):
        raise ValueError(f"the old plan has {len(was)} layers, the new one {len(now)}; both must plan the same model")
    check_layers(was, tensors)
    changes: defaultdict[tuple[LayerPlace, LayerPlace, Extent], float] = defaultdict(float)
    for tensor in tensors:
        changes[was[tensor.layer], now[tensor.layer], tensor.extent] += tensor.element_bytes
    return changes


def _common(old: Cut, new: Cut) -> Floats:
    """[new boxes, old boxes]: elements that both have."""
    first = np.maximum(new.boxes[:, None, :, 0], old.boxes[None, :, :, 0])
    end = np.minimum(new.boxes[:, None, :, 1], old.boxes[None, :, :, 1])
    elements: Floats = np.maximum(end - first, 0).astype(np.float64).prod(axis=2)
    return elements
