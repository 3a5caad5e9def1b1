"""Which GPUs of a job are cheapest to give back: those that hold least that nobody else of the job holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import cache

import numpy as np

from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.resharding.overlap import Flags, held_somewhere
from scheduler.resharding.placement import LayerPlace, Placement, Seat, check_layers, layer_places
from scheduler.resharding.shards import cut
from scheduler.resharding.tensors import Extent, TensorFacts


def cost_of_giving_back(
    placement: Placement, tensors: Sequence[TensorFacts], candidates: Sequence[Collection[Seat]]
) -> tuple[float, ...]:
    """For each set of GPUs, for example those of one node, the bytes of model and optimizer state that only GPUs of the
    set hold: what has to leave them, under whatever plan the job then continues.

    Raises:
        ValueError: a candidate has a GPU on which no rank sits, the plan contradicts itself, or the tensors belong to
            other layers than it has.
    """
    places = layer_places(placement.plan)
    check_layers(places, tensors)
    stays = _staying(placement, candidates)
    cost, cut_once = np.zeros(len(candidates)), cache(cut)
    for (place, extent), element_bytes in _alike(places, tensors).items():
        cutting = cut_once(place.spread, extent)
        lost = ~held_somewhere(cutting, stays[place.ranks])
        cost += element_bytes * (cutting.elements @ lost)
    return tuple(np.rint(cost).tolist())


def held_bytes(plan: ParallelPlan, tensors: Sequence[TensorFacts]) -> tuple[float, ...]:
    """Of each rank, the bytes of model and optimizer state on its GPU.

    Raises:
        ValueError: the plan contradicts itself, or the tensors belong to other layers than it has.
    """
    places, held = layer_places(plan), np.zeros(plan.world_size)
    check_layers(places, tensors)
    for (place, extent), element_bytes in _alike(places, tensors).items():
        cutting = cut(place.spread, extent)
        held[place.ranks] += element_bytes * cutting.elements[cutting.holds]
    return tuple(np.rint(held).tolist())


def _alike(places: Sequence[LayerPlace], tensors: Sequence[TensorFacts]) -> Mapping[tuple[LayerPlace, Extent], float]:
    """Equal tensors of layers that lie alike, with the sum of their `element_bytes`."""
    alike: defaultdict[tuple[LayerPlace, Extent], float] = defaultdict(float)
    for tensor in tensors:
        alike[places[tensor.layer], tensor.extent] += tensor.element_bytes
    return alike


def _staying(placement: Placement, candidates: Sequence[Collection[Seat]]) -> Flags:
    """[ranks, candidates]: whether the rank's GPU is not in the set."""
    ranks = {seat: rank for rank, seat in enumerate(placement.seats)}
    stays = np.ones((len(ranks), len(candidates)), dtype=np.bool_)
    for number, candidate in enumerate(candidates):
        for seat in candidate:
            if seat not in ranks:
                raise ValueError(f"candidates: no rank sits on GPU {seat.gpu} of {seat.node}")
            stays[ranks[seat], number] = False
    return stays
