"""The GPUs that a shrinking job keeps, compared with every other choice."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.domain.parallel_plan import LayerStrategy
from scheduler.resharding.placement import GpuSlot, Placement, build_layer_tensors
from scheduler.resharding.rank_mapping import select_slots_to_keep
from scheduler.resharding.shards import StateOverlap, compute_overlap
from tests.builders_resharding import a_plan, a_random_plan, slots_on

DRAWN = settings(max_examples=100, deadline=None, derandomize=True)
SEEDS = st.integers(0, 10**6)
LAYERS = 8
TENSORS = build_layer_tensors([1e9 + 1e8 * layer for layer in range(LAYERS)])


def kept_bytes(overlap: StateOverlap, old: Placement, slots: Sequence[GpuSlot]) -> float:
    ranks = {slot: rank for rank, slot in enumerate(old.slots)}
    return sum(float(overlap.by_rank[rank, ranks[slot]]) for rank, slot in enumerate(slots) if slot in ranks)


def enumerate_arrangements(
    given: Sequence[GpuSlot], sites: Sequence[Sequence[GpuSlot]]
) -> Iterator[tuple[GpuSlot, ...]]:
    """Yield every way in which the ranks of each node of `given` can move to one site, and there to any GPUs."""
    widths = [sum(slot.node == node for slot in given) for node in dict.fromkeys(slot.node for slot in given)]
    for chosen in permutations(sites, len(widths)):
        for parts in product(*(permutations(site, width) for site, width in zip(chosen, widths, strict=True))):
            yield tuple(slot for part in parts for slot in part)


@DRAWN
@given(SEEDS)
def test_single_node_selection_matches_enumeration(seed: int) -> None:
    rng = random.Random(seed)
    gpus = rng.randint(2, 6)
    old = Placement(a_random_plan(rng, gpus, LAYERS), tuple(GpuSlot("n", gpu) for gpu in range(gpus)))
    plan = a_random_plan(rng, rng.randint(1, gpus - 1), LAYERS)
    default_slots = old.slots[: plan.world_size]
    overlap = compute_overlap(old, plan, TENSORS)
    selected = select_slots_to_keep(overlap, old, plan, default_slots, [[old.slots]])
    best = max(kept_bytes(overlap, old, slots) for slots in enumerate_arrangements(default_slots, [old.slots]))
    assert kept_bytes(overlap, old, selected) == best


@DRAWN
@given(SEEDS)
def test_multi_node_selection_matches_enumeration_of_whole_nodes(seed: int) -> None:
    rng = random.Random(seed)
    nodes = rng.randint(2, 4)
    slots = [GpuSlot(f"n{at // 2}", at % 2) for at in range(2 * nodes)]
    old = Placement(a_random_plan(rng, 2 * nodes, LAYERS), tuple(rng.sample(slots, len(slots))))
    sites = [tuple(slots[at : at + 2]) for at in range(0, len(slots), 2)]
    width = rng.choice([1, 2]) if nodes > 1 else 1
    default_slots = [slot for site in sites[: rng.randint(1, nodes)] for slot in site[:width]]
    overlap = compute_overlap(old, plan := a_random_plan(rng, len(default_slots), LAYERS), TENSORS)
    selected = select_slots_to_keep(overlap, old, plan, default_slots, [sites])
    assert kept_bytes(overlap, old, selected) == max(
        kept_bytes(overlap, old, other) for other in enumerate_arrangements(default_slots, sites)
    )


@DRAWN
@given(SEEDS)
def test_selection_keeps_at_least_rank_order_and_stays_within_equivalent_nodes(seed: int) -> None:
    rng = random.Random(seed)
    old = Placement(a_random_plan(rng, 32, LAYERS, experts=4), slots_on(dict.fromkeys(range(4), 8)))
    gpus = rng.choice([1, 2, 4, 6, 8, 16, 24])
    plan, usual = a_random_plan(rng, gpus, LAYERS, experts=4), old.slots[:gpus]
    by_node = [old.slots[at : at + 8] for at in range(0, 32, 8)]
    together = rng.choice([[[site] for site in by_node], [by_node[:2], by_node[2:]], [by_node]])
    both = compute_overlap(old, plan, TENSORS)
    found = select_slots_to_keep(both, old, plan, usual, together)
    assert len(set(found)) == gpus
    assert kept_bytes(both, old, found) >= kept_bytes(both, old, usual)
    for sites in together:
        here = {slot for site in sites for slot in site}
        assert sum(slot in here for slot in found) == sum(slot in here for slot in usual)


def test_one_replica_of_each_stage_stays() -> None:
    old = Placement(a_plan([[LayerStrategy(1, dp=2)], [LayerStrategy(1, dp=2)]]), slots_on({0: 4}))
    plan, tensors = a_plan([[LayerStrategy(1)], [LayerStrategy(1)]]), build_layer_tensors([1e6, 1e6])
    found = select_slots_to_keep(compute_overlap(old, plan, tensors), old, plan, old.slots[:2], [[old.slots]])
    assert found == (GpuSlot("n00", 0), GpuSlot("n00", 2))


def test_given_slots_stay_if_all_gpus_hold_the_same_state() -> None:
    old = Placement(a_plan([[LayerStrategy(2, dp=16)]]), slots_on({0: 8, 1: 8}))
    plan, tensors = a_plan([[LayerStrategy(2, dp=4)]]), build_layer_tensors([1e6, 1e6])
    both, sites = compute_overlap(old, plan, tensors), [old.slots[:8], old.slots[8:]]
    for usual in (old.slots[:4], old.slots[11:15]):
        assert select_slots_to_keep(both, old, plan, usual, [sites]) == usual


def test_one_slot_per_rank_is_required() -> None:
    old = Placement(a_plan([[LayerStrategy(2, dp=2)]]), slots_on({0: 2}))
    both = compute_overlap(old, old.plan, build_layer_tensors([1e6, 1e6]))
    with pytest.raises(ValueError, match="slots has 1 GPUs; it must have 2"):
        select_slots_to_keep(both, old, old.plan, old.slots[:1], [[old.slots]])
