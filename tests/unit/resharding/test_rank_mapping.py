"""Orders of ranks: moved bytes counted element by element, and comparison with every other order."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan
from scheduler.resharding.placement import GpuSlot, Placement, TensorSpec, TensorSplit, build_layer_tensors
from scheduler.resharding.rank_mapping import find_best_assignment, map_ranks
from scheduler.resharding.shards import compute_held_bytes, compute_overlap, compute_release_costs, compute_shards
from tests.builders_resharding import Transition, a_plan, a_random_plan, a_transition, slots_on

DRAWN = settings(max_examples=100, deadline=None, derandomize=True)
SEEDS = st.integers(0, 10**6)
LAYERS = 8
TENSORS = tuple(
    TensorSpec(f"{layer} {split}", layer, (7, 5), 12.0 + layer, split, experts)
    for layer in range(LAYERS)
    for split, experts in (
        (TensorSplit.ROWS, 0),
        (TensorSplit.COLUMNS, 0),
        (TensorSplit.NONE, 0),
        (TensorSplit.COLUMNS, 4),
    )
)
Atom = tuple[int, int, int, int]


def _atoms(plan: ParallelPlan) -> list[set[Atom]]:
    """Return, for each rank, every single element that it holds: tensor, expert, row, column."""
    return [
        {
            (shard.tensor, expert, row, column)
            for shard in rank
            for expert in range(*shard.experts)
            for row in range(*shard.rows)
            for column in range(*shard.columns)
        }
        for rank in compute_shards(plan, TENSORS)
    ]


def _bytes(atoms: Iterable[Atom]) -> float:
    return sum(TENSORS[atom[0]].element_bytes for atom in atoms)


def _moved(change: Transition, slots: Sequence[GpuSlot]) -> tuple[float, float]:
    """Return the bytes moved, and those of them that no GPU of the node held, element by element."""
    held = dict(zip(change.old_slots, _atoms(change.old_plan), strict=True))
    moved = network = 0.0
    for slot, needed in zip(slots, _atoms(change.new_plan), strict=True):
        near = set[Atom]().union(*(atoms for other, atoms in held.items() if other.node == slot.node))
        moved += _bytes(needed - held.get(slot, set()))
        network += _bytes(needed - near)
    return moved, network


def _small(seed: int, gpus_max: int) -> Transition:
    return a_transition(random.Random(seed), LAYERS, gpus_max=gpus_max, experts=4)


@DRAWN
@given(SEEDS, st.booleans())
def test_moved_bytes_match_element_counts(seed: int, any_order: bool) -> None:
    change = _small(seed, 16)
    old = Placement(change.old_plan, change.old_slots)
    found = map_ranks(old, change.new_plan, change.new_slots, TENSORS, any_order=any_order)
    assert (found.moved_bytes, found.network_bytes) == _moved(change, found.slots)
    assert found.moved_bytes_in_order == _moved(change, change.new_slots)[0]


@DRAWN
@given(SEEDS, st.booleans())
def test_order_is_between_the_given_one_and_the_floor(seed: int, any_order: bool) -> None:
    change = a_transition(random.Random(seed), LAYERS)
    old = Placement(change.old_plan, change.old_slots)
    found = map_ranks(old, change.new_plan, change.new_slots, build_layer_tensors([1e9] * LAYERS), any_order=any_order)
    assert found.floor_bytes <= found.moved_bytes <= found.moved_bytes_in_order
    assert sorted(found.slots) == sorted(change.new_slots)


@DRAWN
@given(SEEDS)
def test_any_order_of_five_ranks_is_optimal_in_bytes_then_network(seed: int) -> None:
    rng = random.Random(seed)
    old_gpus, new_gpus = rng.randint(1, 6), rng.randint(1, 5)
    pool = [GpuSlot(f"n{at // 3}", at % 3) for at in range(9)]
    change = Transition(
        a_random_plan(rng, old_gpus, LAYERS, experts=4),
        tuple(rng.sample(pool, old_gpus)),
        a_random_plan(rng, new_gpus, LAYERS, experts=4),
        tuple(rng.sample(pool, new_gpus)),
    )
    old = Placement(change.old_plan, change.old_slots)
    found = map_ranks(old, change.new_plan, change.new_slots, TENSORS, any_order=True)
    assert _costs(change)[0] == (found.moved_bytes, found.network_bytes)


@DRAWN
@given(SEEDS)
def test_order_within_one_node_is_optimal(seed: int) -> None:
    rng = random.Random(seed)
    old_gpus, new_gpus = rng.randint(1, 8), rng.randint(1, 5)
    change = Transition(
        a_random_plan(rng, old_gpus, LAYERS),
        tuple(GpuSlot("n", gpu) for gpu in rng.sample(range(8), old_gpus)),
        a_random_plan(rng, new_gpus, LAYERS),
        tuple(GpuSlot("n", gpu) for gpu in rng.sample(range(8), new_gpus)),
    )
    old = Placement(change.old_plan, change.old_slots)
    assert map_ranks(old, change.new_plan, change.new_slots, TENSORS).moved_bytes == _costs(change)[0][0]


def _costs(change: Transition) -> list[tuple[float, float]]:
    """Return the costs of every order, cheapest first, from a table of pairs."""
    held = dict(zip(change.old_slots, _atoms(change.old_plan), strict=True))
    needed = _atoms(change.new_plan)
    near = {
        slot: set[Atom]().union(*(atoms for other, atoms in held.items() if other.node == slot.node))
        for slot in change.new_slots
    }
    moved = {
        (rank, slot): (_bytes(atoms - held.get(slot, set())), _bytes(atoms - near[slot]))
        for rank, atoms in enumerate(needed)
        for slot in change.new_slots
    }
    orders = (list(enumerate(order)) for order in permutations(change.new_slots))
    return sorted((sum(moved[pair][0] for pair in order), sum(moved[pair][1] for pair in order)) for order in orders)


@DRAWN
@given(SEEDS, st.booleans())
def test_unchanged_plan_moves_nothing(seed: int, any_order: bool) -> None:
    rng = random.Random(seed)
    gpus = rng.choice([1, 2, 6, 8, 16, 24])
    plan, slots = a_random_plan(rng, gpus, LAYERS, experts=4), slots_on({0: min(8, gpus), 1: gpus - min(8, gpus)})
    if gpus == 24:
        slots = slots_on({0: 8, 1: 8, 2: 8})
    found = map_ranks(Placement(plan, slots), plan, slots, TENSORS, any_order=any_order)
    assert (found.moved_bytes, found.slots) == (0.0, slots)


@DRAWN
@given(SEEDS)
def test_shuffled_slots_return_to_their_old_order(seed: int) -> None:
    rng = random.Random(seed)
    slots = slots_on({0: 8, 1: 8, 2: 8})
    plan = a_random_plan(rng, 24, LAYERS)
    nodes = [slots[at : at + 8] for at in (0, 8, 16)]
    shuffled = [slot for node in rng.sample(nodes, 3) for slot in rng.sample(node, 8)]
    assert map_ranks(Placement(plan, slots), plan, shuffled, TENSORS).moved_bytes == 0


@DRAWN
@given(SEEDS)
def test_communicating_ranks_stay_on_one_node(seed: int) -> None:
    rng = random.Random(seed)
    change = a_transition(rng, LAYERS, experts=rng.choice([0, 8]))
    old, plan = Placement(change.old_plan, change.old_slots), change.new_plan
    found = map_ranks(old, plan, change.new_slots, build_layer_tensors([1e9] * LAYERS))
    assert _neighbors(plan, found.slots) == _neighbors(plan, change.new_slots)


def _neighbors(plan: ParallelPlan, slots: Sequence[GpuSlot]) -> list[Counter[tuple[int, ...]]]:
    """Count, for each stage position and each kind of group of consecutive ranks, a group's ranks on each of its nodes.

    The whole stage is one such group.
    """
    found, first = list[Counter[tuple[int, ...]]](), 0
    for group, stage in enumerate(plan.stages[: plan.pipeline_devices]):
        own = [slot.node for slot in slots[first : first + stage.gpus]]
        strategies = [
            strategy for other in plan.stages[group :: plan.pipeline_devices] for strategy in other.strategies
        ]
        for strategy in strategies:
            for size in (
                strategy.tp * strategy.ulysses * strategy.ring,
                strategy.tp * strategy.ep,
                strategy.tp * strategy.shard_group,
                stage.gpus,
            ):
                runs = (own[at : at + size] for at in range(0, len(own), size))
                found.append(Counter(tuple(sorted(Counter(run).values())) for run in runs))
        first += stage.gpus
    return found


def test_ranks_of_one_stage_are_exchanged_across_its_nodes() -> None:
    """Each shard of sixteen is half of a shard of eight that both stages held, so one half stays on either node.
    Exchanging only whole nodes could keep at most half of that."""
    halves = a_plan([[LayerStrategy(1, dp=8, zero=3)], [LayerStrategy(1, dp=8, zero=3)]])
    whole, slots = a_plan([[LayerStrategy(2, dp=16, zero=3)]]), slots_on({0: 8, 1: 8})
    found = map_ranks(Placement(halves, slots), whole, slots, build_layer_tensors([16e6, 16e6]))
    assert found.moved_bytes == found.floor_bytes == 16e6
    assert found.moved_bytes_in_order > 16e6


def test_rank_on_a_fresh_gpu_prefers_a_node_with_its_state() -> None:
    """Both new GPUs are fresh; half of the model is on node a, half on node b."""
    old = Placement(a_plan([[LayerStrategy(1)], [LayerStrategy(1)]]), (GpuSlot("a", 0), GpuSlot("b", 0)))
    new = a_plan([[LayerStrategy(1)], [LayerStrategy(1)]])
    found = map_ranks(old, new, [GpuSlot("b", 1), GpuSlot("a", 1)], build_layer_tensors([1e6, 1e6]), any_order=True)
    assert found.slots == (GpuSlot("a", 1), GpuSlot("b", 1))
    assert (found.moved_bytes, found.network_bytes) == (2e6, 0.0)


def test_ranks_of_different_gpu_models_are_not_exchanged() -> None:
    plan = a_plan([[LayerStrategy(1)], [LayerStrategy(1)]])
    first, second = plan.stages
    mixed = ParallelPlan(plan.schedule, 1, 1, 1.0, 1.0, 1, (first, type(second)(1, 1, "other", 1, second.strategies)))
    old = Placement(plan, (GpuSlot("b", 0), GpuSlot("a", 0)))
    for any_order in (False, True):
        found = map_ranks(
            old, mixed, [GpuSlot("a", 0), GpuSlot("b", 0)], build_layer_tensors([1.0, 1.0]), any_order=any_order
        )
        assert found.slots == (GpuSlot("a", 0), GpuSlot("b", 0))


def test_one_distinct_slot_per_rank_is_required() -> None:
    plan, tensors = a_plan([[LayerStrategy(1, dp=2)]]), build_layer_tensors([1.0])
    with pytest.raises(ValueError, match="slots has 1 GPUs; it must have 2"):
        Placement(plan, (GpuSlot("a", 0),))
    old = Placement(plan, (GpuSlot("a", 0), GpuSlot("a", 1)))
    with pytest.raises(ValueError, match="GPU 0 of a twice"):
        map_ranks(old, plan, [GpuSlot("a", 0), GpuSlot("a", 0)], tensors)


def test_plans_with_different_layer_counts_are_rejected() -> None:
    old = Placement(a_plan([[LayerStrategy(2)]]), (GpuSlot("a", 0),))
    with pytest.raises(ValueError, match="the old plan has 2 layers and the new one 3"):
        compute_overlap(old, a_plan([[LayerStrategy(3)]]), build_layer_tensors([1.0, 1.0]))


@DRAWN
@given(st.lists(st.lists(st.integers(0, 3), min_size=8, max_size=8), min_size=4, max_size=4))
def test_assignment_is_lexicographically_optimal(rows: list[list[int]]) -> None:
    table = np.array(rows, dtype=np.float64)
    gains = [table[:, :4], table[:, 4:]]
    found = find_best_assignment(gains)

    def worth(order: Sequence[int]) -> tuple[float, ...]:
        return tuple(float(gain[range(4), list(order)].sum()) for gain in gains)

    assert worth(found) == max(map(worth, permutations(range(4))))


@DRAWN
@given(SEEDS)
def test_release_cost_is_the_state_that_no_other_gpu_holds(seed: int) -> None:
    rng = random.Random(seed)
    gpus = rng.choice([1, 2, 4, 6, 8, 16])
    placement = Placement(a_random_plan(rng, gpus, LAYERS, experts=4), slots_on({0: gpus // 2, 1: gpus - gpus // 2}))
    held = dict(zip(placement.slots, _atoms(placement.plan), strict=True))
    candidates = [rng.sample(placement.slots, rng.randint(0, gpus)) for _ in range(3)]
    costs = compute_release_costs(placement, TENSORS, candidates)
    for candidate, cost in zip(candidates, costs, strict=True):
        inside = set[Atom]().union(*(held[slot] for slot in candidate))
        outside = set[Atom]().union(*(atoms for slot, atoms in held.items() if slot not in candidate))
        assert cost == _bytes(inside - outside)


@DRAWN
@given(SEEDS)
def test_release_is_free_only_if_others_hold_everything(seed: int) -> None:
    rng = random.Random(seed)
    gpus = rng.choice([2, 4, 6, 8, 16])
    placement = Placement(a_random_plan(rng, gpus, LAYERS, experts=4), slots_on({0: gpus}))
    held = dict(zip(placement.slots, _atoms(placement.plan), strict=True))
    released = rng.sample(placement.slots, rng.randint(1, gpus))
    other = [slot for slot in rng.sample(placement.slots, rng.randint(1, gpus)) if slot not in released]
    alone, beside, together = compute_release_costs(placement, TENSORS, [released, other, [*released, *other]])
    elsewhere = set[Atom]().union(*(atoms for slot, atoms in held.items() if slot not in released))
    assert (alone == 0) == all(held[slot] <= elsewhere for slot in released)
    assert together >= alone + beside
    assert compute_held_bytes(placement.plan, TENSORS) == tuple(map(_bytes, held.values()))


def test_releasing_a_copy_is_free_and_the_last_copy_costs_everything() -> None:
    placement = Placement(a_plan([[LayerStrategy(1, dp=2)]]), (GpuSlot("a", 0), GpuSlot("b", 0)))
    candidates = [[GpuSlot("a", 0)], [GpuSlot("a", 0), GpuSlot("b", 0)]]
    assert compute_release_costs(placement, build_layer_tensors([1e6]), candidates) == (0.0, 1e6)
    with pytest.raises(ValueError, match="candidates has GPU 1 of a"):
        compute_release_costs(placement, build_layer_tensors([1e6]), [[GpuSlot("a", 1)]])
