"""Which rectangle of each tensor each rank of a plan holds at the end of a step, as the worker cuts them.

Ranks of a pipeline group count tensor parallelism fastest, then Ulysses, then ring, then data parallelism. Tensor
parallelism cuts first; FSDP2 then cuts axis 0 of what is left into chunks (torch.chunk: all but the last are equal), so
that a tensor cut twice on its rows has its rows in the order tensor rank, shard rank. Expert parallelism gives
consecutive replicas consecutive experts; FSDP cuts the rows of the experts that a rank has, over the replicas of the
shard group that have the same ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.resharding.placement import Spread, check_layers, layer_places
from scheduler.resharding.tensors import Extent, Split, TensorFacts

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
class Cut:
    """A tensor over the GPUs of a stage. Its distinct boxes are a partition of it; GPUs with the same one have copies.

    `boxes` [distinct, 3, 2] are intervals of experts, rows and columns, `holds` [GPUs] the box of each GPU.
    """

    boxes: Ints
    holds: Ints

    @property
    def elements(self) -> Ints:
        """[distinct]"""
        return np.asarray((self.boxes[:, :, 1] - self.boxes[:, :, 0]).prod(axis=1))


def shards(plan: ParallelPlan, tensors: Sequence[TensorFacts]) -> tuple[tuple[Shard, ...], ...]:
    """The shards of each rank, in the order of `tensors`; empty ones are left out.

    Raises:
        ValueError: the plan contradicts itself, or the tensors belong to other layers than it has.
    """
    places, cut_once = layer_places(plan), cache(lambda spread, extent: rank_boxes(spread, extent).tolist())
    check_layers(places, tensors)
    held: list[list[Shard]] = [[] for _ in range(plan.world_size)]
    for number, tensor in enumerate(tensors):
        place = places[tensor.layer]
        for rank, box in enumerate(cut_once(place.spread, tensor.extent), place.first_rank):
            experts, rows, columns = map(tuple, box)
            if rows[0] < rows[1] and columns[0] < columns[1] and experts[0] < experts[1]:
                held[rank].append(Shard(number, experts, rows, columns))
    return tuple(map(tuple, held))


def cut(spread: Spread, extent: Extent) -> Cut:
    """How the GPUs of a stage share a tensor."""
    boxes = rank_boxes(spread, extent)
    distinct, holds = np.unique(boxes.reshape(spread.gpus, 6), axis=0, return_inverse=True)
    return Cut(distinct.reshape(-1, 3, 2), holds.reshape(-1))


def rank_boxes(spread: Spread, extent: Extent) -> Ints:
    """[GPUs, 3, 2]: intervals of experts, rows and columns that each GPU of a stage holds."""
    replica, tensor_rank = np.divmod(np.arange(spread.gpus), spread.tp)
    ep = spread.ep if extent.experts else 1
    whole = np.zeros(spread.gpus, dtype=np.int64)
    rows, columns = (whole, whole + extent.rows), (whole, whole + extent.columns)
    if extent.split is Split.ROWS:
        rows = _part(rows, spread.tp, tensor_rank)
    elif extent.split is Split.COLUMNS:
        columns = _part(columns, spread.tp, tensor_rank)
    sharers = max(1, spread.shard_group // ep)
    rows = _part(rows, sharers, replica // ep % sharers)
    experts = _part((whole, whole + max(1, extent.experts)), ep, replica % ep)
    return np.stack([np.stack(axis, axis=1) for axis in (experts, rows, columns)], axis=1)


def _part(interval: tuple[Ints, Ints], parts: int, number: Ints) -> tuple[Ints, Ints]:
    """Part `number` of an interval cut as torch.chunk cuts: by the length rounded up, so that late parts may be
    short or empty."""
    first, end = interval
    size = -(-(end - first) // parts)
    return np.minimum(first + size * number, end), np.minimum(first + size * (number + 1), end)
