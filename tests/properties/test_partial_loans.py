"""Loans of parts of nodes in generated states: GPUs of inference stay with inference, and counts add up."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given

from scheduler.domain.decisions import LendNode, ProposeLoan
from scheduler.domain.fleet import Node
from scheduler.domain.gpu_sets import Gpus
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.snapshot_index import SnapshotIndex
from scheduler.scheduling.capacity_use import classify_capacity
from scheduler.scheduling.desired_state import apply_decisions
from scheduler.scheduling.policies.lending import lend_forecast_idle
from scheduler.scheduling.policy_sets import list_policy_sets, load_policy_set
from scheduler.scheduling.scheduler import decide
from scheduler.scheduling.snapshot_update import update_snapshot
from tests.properties.test_scheduling_invariants import FOR_EACH_POLICY_SET, SEEDS, WORLDS, violations
from tests.properties.worlds import World, a_world, observe


def a_partial_world(seed: int) -> World:
    """Return the world of a seed in which most inference nodes lend parts, with the GPUs that jobs hold there."""
    random, world = Random(f"partial/{seed}"), a_world(seed)
    nodes, loans = dict(world.snapshot.nodes), dict(world.snapshot.loans)
    for name, node in world.snapshot.nodes.items():
        if node.pool == "training" or not (indices := draw_part(random, world.snapshot, node)):
            continue
        nodes[name] = replace(node, lendable_gpus=indices)
        if name in loans:
            loans[name] = replace(loans[name], gpus=len(indices), indices=indices)
    partial = replace(world.snapshot, nodes=nodes, loans=loans, cached_index=None)
    seen = observe(random, partial)
    used = {name: random.randint(0, node.gpus) if node.pool == "inference" else 0 for name, node in nodes.items()}
    facts = {name: replace(each, inference_gpus=used[name]) for name, each in seen.nodes.items()}
    return World(partial, replace(seen, nodes=facts))


def draw_part(random: Random, snapshot: Snapshot, node: Node) -> tuple[int, ...]:
    """Return some GPUs of the node, at least those that jobs hold, but not all. None if that is not possible."""
    held = set(snapshot.index.holders.get(node.name, ()))
    others = sorted(set(range(node.gpus)) - held)
    least = 0 if held else 1
    if len(others) <= least or random.random() < 0.2:
        return ()
    return tuple(sorted(held.union(random.sample(others, random.randint(least, len(others) - 1)))))


def list_targets(snapshot: Snapshot) -> list[Gpus]:
    return [job.allocation.target for job in snapshot.jobs.values()]


@pytest.mark.parametrize("policy", list_policy_sets())
@FOR_EACH_POLICY_SET
@given(seed=SEEDS)
def test_jobs_get_only_gpus_of_the_loan(policy: str, seed: int) -> None:
    world = a_partial_world(seed)
    updated = update_snapshot(world.snapshot, world.observation, ()).snapshot
    decisions = decide(updated, load_policy_set(policy)).decisions
    assert violations(updated, decisions) == []
    after = apply_decisions(updated, decisions)
    for target in list_targets(after):
        for name, indices in target.items():
            if after.is_partly_lent(after.nodes[name]):
                assert set(indices) <= set(after.loans[name].indices)


@WORLDS
@given(seed=SEEDS)
def test_index_is_carried_through_ticks_with_partial_loans(seed: int) -> None:
    world = a_partial_world(seed)
    updated = update_snapshot(world.snapshot, world.observation, ()).snapshot
    after = apply_decisions(updated, decide(updated, load_policy_set("ebbtide")).decisions)
    carried, built = after.index, SnapshotIndex.build(replace(after, cached_index=None))
    for name in ("free_by_node", "outdated_loans", "overused_loans", "must_vacate", "serving"):
        assert getattr(carried, name) == getattr(built, name)
    for name in ("lent_gpus", "unrecalled_loan_gpus", "live_loan_gpus", "inference_capacity", "training_gpus"):
        assert +Counter(getattr(carried, name)) == +Counter(getattr(built, name))


@WORLDS
@given(seed=SEEDS)
def test_each_gpu_is_lent_or_left_to_inference_and_counted_once(seed: int) -> None:
    world = a_partial_world(seed)
    updated = update_snapshot(world.snapshot, world.observation, ()).snapshot
    use = classify_capacity(updated)
    for pool, found in use.items():
        total = sum(node.gpus for node in updated.nodes.values() if node.pool == pool)
        assert found.inference + found.used + found.lent_used + found.lent_idle + found.free + found.down == total
    for name, loan in updated.loans.items():
        node = updated.nodes[name]
        if not updated.is_partly_lent(node) or not updated.serves_training(node):
            continue
        assert updated.count_inference_gpus(node) + loan.gpus == node.gpus
        free, held = updated.index.free_by_node.get(name), len(updated.index.holders.get(name, ()))
        taken = max(0, node.inference_gpus - loan.count_kept_gpus(node))
        assert (len(free.indices) if free else 0) == max(0, loan.gpus - held - taken)


@WORLDS
@given(seed=SEEDS)
def test_new_loans_fit_into_what_the_pool_can_spare(seed: int) -> None:
    world = a_partial_world(seed)
    updated = update_snapshot(world.snapshot, world.observation, ()).snapshot
    policies = load_policy_set("ebbtide")
    decisions = decide(updated, policies).decisions
    made = [decision for decision in decisions if isinstance(decision, LendNode | ProposeLoan)]
    for decision in made:
        node = updated.nodes[decision.node]
        assert not node.lendable_gpus or node.inference_gpus <= node.gpus - len(node.lendable_gpus)
    if made:
        target = lend_forecast_idle(updated, updated.pools["inference"], policies.settings)
        after = apply_decisions(updated, decisions).index
        assert after.live_loan_gpus["inference"] <= target.lasting_gpus
        assert after.live_loan_counts["inference"] <= target.lasting_nodes
