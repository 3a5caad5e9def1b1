"""Layouts: how the tensor between two layers lies on a stage's GPUs, and what it costs to change that.

A layout is a tensor degree with or without a sharded sequence. Whether samples or tokens are split over the replicas
does not matter to it: a replica holds an equal part of the micro-batch's rows either way.
"""

from __future__ import annotations

from itertools import combinations
from math import gcd

import numpy as np

from scheduler.solver.costs.collectives import Groups, all_gather_s, all_to_all_s
from scheduler.solver.costs.layer_table import LayerTable
from scheduler.solver.costs.setting import Setting
from scheduler.solver.costs.spreads import Spreads
from scheduler.solver.instance import Floats, Ints

Layout = tuple[int, bool]
"""Tensor degree, and whether the sequence is sharded over it."""


def layouts_of(spread: Spreads) -> tuple[tuple[Layout, ...], Ints]:
    """The distinct layouts, and the number of each spread's among them; both in ascending order of degree."""
    keys, numbers = np.unique(spread.tp * 2 + spread.sharded, return_inverse=True)
    return tuple((int(key) // 2, bool(key % 2)) for key in keys), numbers.astype(np.int64)


def border_s(table: LayerTable, spread: Spreads, setting: Setting) -> Floats:
    """[T, B]: at a stage's border the tensor ranks gather what the hand-over brought in equal shares, forward at the
    first layer and backward at the last. A sharded sequence leaves it as it came. A last layer without a backward pass
    is charged for it all the same, as a change of layout is for both directions: an upper bound."""
    rows_bytes = table.boundary_bytes * (spread.samples / spread.context)
    gather_s = all_gather_s(rows_bytes, Groups.of(spread.tp, np.ones_like(spread.tp), setting))
    return np.where(spread.sharded, 0.0, gather_s)


def reshard_s(table: LayerTable, layouts: tuple[Layout, ...], batches: Ints, setting: Setting) -> Floats:
    """[C, T, K, K]: after a layer, from one layout to the next layer's, for micro-batches of `batches` [C] samples.

    Forward and backward together, in the smallest group that holds both degrees. To a higher degree samples are
    gathered, and the way back takes a slice: one all-gather in all. Where both layouts split the rows over all GPUs,
    an all-to-all in each direction may be faster.
    """
    size_bytes = batches[:, None] * table.boundary_bytes.ravel()
    count = len(layouts)
    result = np.zeros((*size_bytes.shape, count, count))
    for (left, one), (right, two) in combinations(enumerate(layouts), 2):
        change_s = _change_s(size_bytes, one, two, setting)
        result[:, :, left, right] = result[:, :, right, left] = change_s
    return result


def _change_s(size_bytes: Floats, one: Layout, two: Layout, setting: Setting) -> Floats:
    (low, _), (high, _) = pair = sorted([one, two])
    if low == high:
        return _gather_s(size_bytes, high, high, setting)
    ranks = high // gcd(low, high)
    whole_s = _gather_s(size_bytes, ranks, high, setting)
    split = [sharded or degree == 1 for degree, sharded in pair]
    if all(split):
        exchange_s = 2 * all_to_all_s(size_bytes / setting.gpus, _group(ranks, setting))
        return np.minimum(whole_s, exchange_s)
    for degree, sharded in pair:
        whole_s = whole_s + (_gather_s(size_bytes, degree, degree, setting) if sharded else 0.0)
    return whole_s


def _gather_s(size_bytes: Floats, ranks: int, degree: int, setting: Setting) -> Floats:
    """`ranks` neighbours gather what one rank holds under an unsharded tensor degree."""
    return all_gather_s(size_bytes * degree / setting.gpus, _group(ranks, setting))


def _group(ranks: int, setting: Setting) -> Groups:
    return Groups.of(np.array([ranks]), np.array([1]), setting)
