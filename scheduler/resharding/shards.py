"""Shards of the tensors that each rank of a plan holds, and the overlap of the shards of two plans.

Shards are those at the end of a step, as the worker splits tensors. Ranks of a pipeline group count tensor parallelism
fastest, then Ulysses, ring and data parallelism. Tensor parallelism splits first. FSDP2 then splits axis 0 of the rest
into chunks (torch.chunk: all but the last are equal), so a tensor whose rows are split twice has its rows in the order
tensor rank, shard rank. Expert parallelism gives consecutive replicas consecutive experts; FSDP splits the rows of a
rank's experts over the replicas of the shard group with the same experts.
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


Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Shard:
    """A part of `tensors[tensor]`. Intervals are (first, end), the end excluded; a dense tensor is expert 0."""

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
    """The distribution of a tensor over the GPUs of a stage.

    Its distinct boxes partition it; GPUs with the same box hold copies.

    `boxes` [distinct, 3, 2] are intervals of experts, rows and columns; `box_of_gpu` [GPUs] is the box of each GPU.
    """

    boxes: Ints
    box_of_gpu: Ints

    @property
    def elements(self) -> Ints:
        """[distinct]: elements of each box."""
        return np.asarray((self.boxes[:, :, 1] - self.boxes[:, :, 0]).prod(axis=1))


def compute_shards(plan: ParallelPlan, tensors: Sequence[TensorSpec]) -> tuple[tuple[Shard, ...], ...]:
    """Return the shards of each rank, in the order of `tensors`, without empty ones.

    Raises:
        ValueError: the plan is inconsistent, or the tensors belong to other layers than it has.
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
    """Return how the GPUs of a stage share a tensor."""
    boxes = compute_rank_boxes(sharding, extent)
    distinct, holds = np.unique(boxes.reshape(sharding.gpus, 6), axis=0, return_inverse=True)
    return TensorCut(distinct.reshape(-1, 3, 2), holds.reshape(-1))


def compute_rank_boxes(sharding: LayerSharding, extent: TensorExtent) -> Ints:
    """Return [GPUs, 3, 2]: the intervals of experts, rows and columns that each GPU of a stage holds."""
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
    """Return part `number` of an interval that is split like torch.chunk.

    Parts have the length rounded up, so late parts may be shorter or empty.
    """
    first, end = interval
    size = -(-(end - first) // parts)
    return np.minimum(first + size * number, end), np.minimum(first + size * (number + 1), end)


@dataclass(frozen=True, slots=True)
class StateOverlap:
    """Bytes of model and optimizer state that each new rank needs and that old ranks and nodes hold.

    Bytes are whole numbers, so that sums and comparisons are exact. `needed` [new ranks]; `by_rank` [new ranks, old
    ranks] is what that old rank holds of it; `by_node` [new ranks, nodes] is what any rank on that node holds, copies
    counted once.
    """

    needed: Floats
    by_rank: Floats
    by_node: Floats
    nodes: tuple[str, ...]


def compute_overlap(old: Placement, new_plan: ParallelPlan, tensors: Sequence[TensorSpec]) -> StateOverlap:
    """Intersect the shards of both plans. Layers that change in the same way are intersected once.

    Raises:
        ValueError: a plan is inconsistent, or the tensors belong to other layers than a plan has.
    """
    nodes = tuple(dict.fromkeys(slot.node for slot in old.slots))
    on_node = np.array([[slot.node == node for node in nodes] for slot in old.slots])
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
    """Return [distinct boxes, sets]: whether a GPU of the set holds the box, for `members` [GPUs, sets]."""
    present = np.zeros((len(cut.boxes), members.shape[1]), dtype=np.bool_)
    np.logical_or.at(present, cut.box_of_gpu, members)
    return present


def _group_layer_changes(
    old: ParallelPlan, new: ParallelPlan, tensors: Sequence[TensorSpec]
) -> dict[tuple[LayerPlacement, LayerPlacement, TensorExtent], float]:
    """Return the total `element_bytes` of equal tensors of layers with the same placement before and the same after."""
    was, now = compute_layer_placements(old), compute_layer_placements(new)
    if len(was) != len(now):
        raise ValueError(
            f"the old plan has {len(was)} layers and the new one {len(now)}; both must be for the same model"
        )
    check_tensor_layers(was, tensors)
    changes: defaultdict[tuple[LayerPlacement, LayerPlacement, TensorExtent], float] = defaultdict(float)
    for tensor in tensors:
        changes[was[tensor.layer], now[tensor.layer], tensor.extent] += tensor.element_bytes
    return changes


def _count_common_elements(old: TensorCut, new: TensorCut) -> Floats:
    """Return [new boxes, old boxes]: elements that both contain."""
    first = np.maximum(new.boxes[:, None, :, 0], old.boxes[None, :, :, 0])
    end = np.minimum(new.boxes[:, None, :, 1], old.boxes[None, :, :, 1])
    elements: Floats = np.maximum(end - first, 0).astype(np.float64).prod(axis=2)
    return elements


def compute_release_costs(
    placement: Placement, tensors: Sequence[TensorSpec], candidates: Sequence[Collection[GpuSlot]]
) -> tuple[float, ...]:
    """Return, for each set of GPUs (such as those of one node), the bytes of state that only GPUs of this set hold.

    These bytes must leave the set before it is released, whatever plan the job continues with.

    Raises:
        ValueError: a candidate has a GPU without a rank, the plan is inconsistent, or the tensors belong to other
            layers than it has.
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
    """Return the bytes of model and optimizer state on the GPU of each rank.

    Raises:
        ValueError: the plan is inconsistent, or the tensors belong to other layers than it has.
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
    """Return the total `element_bytes` of equal tensors of layers with the same placement."""
    alike: defaultdict[tuple[LayerPlacement, TensorExtent], float] = defaultdict(float)
    for tensor in tensors:
        alike[places[tensor.layer], tensor.extent] += tensor.element_bytes
    return alike


def _mark_remaining_ranks(placement: Placement, candidates: Sequence[Collection[GpuSlot]]) -> Flags:
    """Return [ranks, candidates]: whether the rank's GPU is not in the set."""
    ranks = {slot: rank for rank, slot in enumerate(placement.slots)}
    stays = np.ones((len(ranks), len(candidates)), dtype=np.bool_)
    for number, candidate in enumerate(candidates):
        for slot in candidate:
            if slot not in ranks:
                raise ValueError(f"candidates has GPU {slot.gpu} of {slot.node}; it must be a GPU of the job")
            stays[ranks[slot], number] = False
    return stays
