"""Which rectangle of each tensor each rank of a plan holds at the end of a step, as the worker cuts them.

Ranks of a pipeline group count tensor parallelism fastest, then Ulysses, then ring, then data parallelism. Tensor
parallelism cuts first; FSDP2 then cuts axis 0 of what is left into chunks (torch.chunk: all but the last are equal), so
that a tensor cut twice on its rows has its rows in the order tensor rank, shard rank. Expert parallelism gives
consecutive replicas consecutive experts; FSDP cuts the rows of the experts that a rank has, over the replicas of the
shard group that have the same ones.

How much of what each new rank needs every old rank and every old node already holds.

Which GPUs of a job are cheapest to give back: those that hold least that nobody else of the job holds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.resharding.placement import (
    GpuSlot,
    LayerPlacement,
    LayerSharding,
    Placement,
    TensorExtent,
    TensorSpec,
    TensorSplit,
    check_tensor_layers,
    compute_layer_placements,
)

Ints = NDArray[np.int64]
Interval = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Shard:
    """A part of `tensors[tensor]`. Intervals are (first, end), the end not counted; a dense tensor is expert 0."""

    tensor: int
    experts: Interval
    rows: Interval
    columns: Interval

    @property
    def elements(self) -> int:
        sides = (end - first for first, end in (self.experts, self.rows, self.columns))
        return next(sides) * next(sides) * next(sides)


@dataclass(frozen=True, slots=True)
class TensorCut:
    """A tensor over the GPUs of a stage. Its distinct boxes are a partition of it; GPUs with the same one have copies.

    `boxes` [distinct, 3, 2] are intervals of experts, rows and columns, `holds` [GPUs] the box of each GPU.
    """

    boxes: Ints
    box_of_gpu: Ints

    @property
    def elements(self) -> Ints:
        """[distinct]"""
        return np.asarray((self.boxes[:, :, 1] - self.boxes[:, :, 0]).prod(axis=1))


def compute_shards(plan: ParallelPlan, tensors: Sequence[TensorSpec]) -> tuple[tuple[Shard, ...], ...]:
    """The shards of each rank, in the order of `tensors`; empty ones are left out.

    Raises:
        ValueError: the plan contradicts itself, or the tensors belong to other layers than it has.
    """
    places, cut_once = (
        compute_layer_placements(plan),
        cache(lambda spread, extent: compute_rank_boxes(spread, extent).tolist()),
    )
    check_tensor_layers(places, tensors)
    held: list[list[Shard]] = [[] for _ in range(plan.world_size)]
    for number, tensor in enumerate(tensors):
        place = places[tensor.layer]
        for rank, box in enumerate(cut_once(place.sharding, tensor.extent), place.first_rank):
            experts, rows, columns = map(tuple, box)
            if rows[0] < rows[1] and columns[0] < columns[1] and experts[0] < experts[1]:
                held[rank].append(Shard(number, experts, rows, columns))
    return tuple(map(tuple, held))


def cut_tensor(sharding: LayerSharding, extent: TensorExtent) -> TensorCut:
    """How the GPUs of a stage share a tensor."""
    boxes = compute_rank_boxes(sharding, extent)
    distinct, holds = np.unique(boxes.reshape(sharding.gpus, 6), axis=0, return_inverse=True)
    return TensorCut(distinct.reshape(-1, 3, 2), holds.reshape(-1))


def compute_rank_boxes(sharding: LayerSharding, extent: TensorExtent) -> Ints:
    """[GPUs, 3, 2]: intervals of experts, rows and columns that each GPU of a stage holds."""
    replica, tensor_rank = np.divmod(np.arange(sharding.gpus), sharding.tp)
    ep = sharding.ep if extent.experts else 1
    whole = np.zeros(sharding.gpus, dtype=np.int64)
    rows, columns = (whole, whole + extent.rows), (whole, whole + extent.columns)
    if extent.split is TensorSplit.ROWS:
        rows = _take_chunk(rows, sharding.tp, tensor_rank)
    elif extent.split is TensorSplit.COLUMNS:
        columns = _take_chunk(columns, sharding.tp, tensor_rank)
    sharers = max(1, sharding.shard_group // ep)
    rows = _take_chunk(rows, sharers, replica // ep % sharers)
    experts = _take_chunk((whole, whole + max(1, extent.experts)), ep, replica % ep)
    return np.stack([np.stack(axis, axis=1) for axis in (experts, rows, columns)], axis=1)


def _take_chunk(interval: tuple[Ints, Ints], parts: int, number: Ints) -> tuple[Ints, Ints]:
    """Part `number` of an interval cut as torch.chunk cuts: by the length rounded up, so that late parts may be
    short or empty."""
    first, end = interval
    size = -(-(end - first) // parts)
    return np.minimum(first + size * number, end), np.minimum(first + size * (number + 1), end)


Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class StateOverlap:
    """Bytes of model and optimizer state, as whole numbers, so that sums and comparisons are exact.

    `needed` [new ranks]; `by_rank` [new ranks, old ranks] is what of it that old rank holds; `by_node` [new ranks,
    nodes] what any rank on that node holds, copies counted once.
    """

    needed: Floats
    by_rank: Floats
    by_node: Floats
    nodes: tuple[str, ...]


def compute_overlap(old: Placement, new_plan: ParallelPlan, tensors: Sequence[TensorSpec]) -> StateOverlap:
    """Intersects the rectangles of both plans. Layers that change in the same way are intersected once.

    Raises:
        ValueError: a plan contradicts itself, or the tensors belong to other layers than a plan has.
    """
    nodes = tuple(dict.fromkeys(seat.node for seat in old.slots))
    on_node = np.array([[seat.node == node for node in nodes] for seat in old.slots])
    needed = np.zeros(new_plan.world_size)
    by_rank = np.zeros((new_plan.world_size, old.plan.world_size))
    by_node = np.zeros((new_plan.world_size, len(nodes)))
    cut_once = cache(cut_tensor)
    common_once = cache(lambda was, now, extent: _count_common_elements(cut_once(was, extent), cut_once(now, extent)))
    for (was, now, extent), element_bytes in _group_layer_changes(old.plan, new_plan, tensors).items():
        old_cut, new_cut = cut_once(was.sharding, extent), cut_once(now.sharding, extent)
        common = common_once(was.sharding, now.sharding, extent)
        needed[now.ranks] += element_bytes * new_cut.elements[new_cut.box_of_gpu]
        by_rank[now.ranks, was.ranks] += element_bytes * common[np.ix_(new_cut.box_of_gpu, old_cut.box_of_gpu)]
        present = find_held_boxes(old_cut, on_node[was.ranks])
        by_node[now.ranks] += element_bytes * (common @ present)[new_cut.box_of_gpu]
    return StateOverlap(np.rint(needed), np.rint(by_rank), np.rint(by_node), nodes)


def find_held_boxes(cut: TensorCut, members: Flags) -> Flags:
    """[distinct boxes, sets]: whether a GPU of the set holds the box, for `chosen` [GPUs, sets]."""
    present = np.zeros((len(cut.boxes), members.shape[1]), dtype=np.bool_)
    np.logical_or.at(present, cut.box_of_gpu, members)
    return present


def _group_layer_changes(
    old: ParallelPlan, new: ParallelPlan, tensors: Sequence[TensorSpec]
) -> dict[tuple[LayerPlacement, LayerPlacement, TensorExtent], float]:
    """Equal tensors of layers that lie alike before and alike after, with the sum of their `element_bytes`."""
    was, now = compute_layer_placements(old), compute_layer_placements(new)
    if len(was) != len(now):
        raise ValueError(f"the old plan has {len(was)} layers, the new one {len(now)}; both must plan the same model")
    check_tensor_layers(was, tensors)
    changes: defaultdict[tuple[LayerPlacement, LayerPlacement, TensorExtent], float] = defaultdict(float)
    for tensor in tensors:
        changes[was[tensor.layer], now[tensor.layer], tensor.extent] += tensor.element_bytes
    return changes


def _count_common_elements(old: TensorCut, new: TensorCut) -> Floats:
    """[new boxes, old boxes]: elements that both have."""
    first = np.maximum(new.boxes[:, None, :, 0], old.boxes[None, :, :, 0])
    end = np.minimum(new.boxes[:, None, :, 1], old.boxes[None, :, :, 1])
    elements: Floats = np.maximum(end - first, 0).astype(np.float64).prod(axis=2)
    return elements


def compute_release_costs(
    placement: Placement, tensors: Sequence[TensorSpec], candidates: Sequence[Collection[GpuSlot]]
) -> tuple[float, ...]:
    """For each set of GPUs, for example those of one node, the bytes of model and optimizer state that only GPUs of the
    set hold: what has to leave them, under whatever plan the job then continues.

    Raises:
        ValueError: a candidate has a GPU on which no rank sits, the plan contradicts itself, or the tensors belong to
            other layers than it has.
    """
    places = compute_layer_placements(placement.plan)
    check_tensor_layers(places, tensors)
    stays = _mark_remaining_ranks(placement, candidates)
    cost, cut_once = np.zeros(len(candidates)), cache(cut_tensor)
    for (place, extent), element_bytes in _group_equal_tensors(places, tensors).items():
        cutting = cut_once(place.sharding, extent)
        lost = ~find_held_boxes(cutting, stays[place.ranks])
        cost += element_bytes * (cutting.elements @ lost)
    return tuple(np.rint(cost).tolist())


def compute_held_bytes(plan: ParallelPlan, tensors: Sequence[TensorSpec]) -> tuple[float, ...]:
    """Of each rank, the bytes of model and optimizer state on its GPU.

    Raises:
        ValueError: the plan contradicts itself, or the tensors belong to other layers than it has.
    """
    places, held = compute_layer_placements(plan), np.zeros(plan.world_size)
    check_tensor_layers(places, tensors)
    for (place, extent), element_bytes in _group_equal_tensors(places, tensors).items():
        cutting = cut_tensor(place.sharding, extent)
        held[place.ranks] += element_bytes * cutting.elements[cutting.box_of_gpu]
    return tuple(np.rint(held).tolist())


def _group_equal_tensors(
    places: Sequence[LayerPlacement], tensors: Sequence[TensorSpec]
) -> Mapping[tuple[LayerPlacement, TensorExtent], float]:
    """Equal tensors of layers that lie alike, with the sum of their `element_bytes`."""
    alike: defaultdict[tuple[LayerPlacement, TensorExtent], float] = defaultdict(float)
    for tensor in tensors:
        alike[places[tensor.layer], tensor.extent] += tensor.element_bytes
    return alike


def _mark_remaining_ranks(placement: Placement, candidates: Sequence[Collection[GpuSlot]]) -> Flags:
    """[ranks, candidates]: whether the rank's GPU is not in the set."""
    ranks = {seat: rank for rank, seat in enumerate(placement.slots)}
    stays = np.ones((len(ranks), len(candidates)), dtype=np.bool_)
    for number, candidate in enumerate(candidates):
        for seat in candidate:
            if seat not in ranks:
                raise ValueError(f"candidates: no rank sits on GPU {seat.gpu} of {seat.node}")
            stays[ranks[seat], number] = False
    return stays
