"""Laws of growth over GPU models in generated states."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scheduler.domain.decisions import Decision, RecallNode, ResizeJob
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling.desired_state import apply_decision
from scheduler.scheduling.mutable_snapshot import MutableSnapshot
from scheduler.scheduling.policies.model_mix import REQUESTS_MAX, deal_nodes
from scheduler.scheduling.policies.settings import PolicySettings
from scheduler.scheduling.policy_sets import load_policy_set
from scheduler.scheduling.scheduler import decide
from scheduler.scheduling.snapshot_update import update_snapshot
from tests.properties.test_scheduling_invariants import violations
from tests.properties.unlike_worlds import UNLIKE, an_unlike_world

SEEDS = st.integers(min_value=0, max_value=10**9)
WORLDS = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


def build_snapshot(seed: int) -> Snapshot:
    """Return the snapshot of a world; in half of them after an observation, which mostly ends or resets runs."""
    world = an_unlike_world(seed)
    if seed % 2:
        return world.snapshot
    return update_snapshot(world.snapshot, world.observation, ()).snapshot


def is_mixed(decision: Decision) -> bool:
    return isinstance(decision, ResizeJob) and decision.plan.is_mixed


@pytest.mark.parametrize("policy", ["ebbtide", "ebbtide-loaning", "lyra", "afs"])
@WORLDS
@given(seed=SEEDS)
def test_decisions_are_legal(policy: str, seed: int) -> None:
    snapshot = build_snapshot(seed)
    assert violations(snapshot, decide(snapshot, load_policy_set(policy)).decisions) == []


def test_worlds_contain_growth_over_models() -> None:
    policies = load_policy_set("ebbtide")
    mixed = [each for seed in range(150) for each in decide(build_snapshot(seed), policies).decisions if is_mixed(each)]
    assert len(mixed) >= 5


@WORLDS
@given(seed=SEEDS)
def test_no_plan_names_gpus_of_a_recalled_node(seed: int) -> None:
    snapshot = build_snapshot(seed)
    decisions = decide(snapshot, load_policy_set("ebbtide")).decisions
    state = MutableSnapshot(snapshot)
    for decision in decisions:
        apply_decision(state, decision)
    recalled = {decision.node for decision in decisions if isinstance(decision, RecallNode)}
    resized = {decision.job_id for decision in decisions if isinstance(decision, ResizeJob)}
    for job in state.jobs.values():
        plan, target = job.allocation.plan, job.allocation.target
        if job.id not in resized or plan is None:
            continue
        assert recalled.isdisjoint(target)
        planned, held = Counter[str](), Counter[str]()
        for stage in plan.stages[: plan.pipeline_devices]:
            planned[stage.gpu] += stage.gpus
        for name, indices in target.items():
            held[snapshot.nodes[name].gpu] += len(indices)
        assert planned == held


@WORLDS
@given(seed=SEEDS)
def test_a_deal_fits_the_free_nodes_and_requests_few_shapes(seed: int) -> None:
    snapshot = build_snapshot(seed)
    size = snapshot.typical_node_sizes.get(UNLIKE)
    if size is None:
        return
    free = [room for room in snapshot.index.free_by_node.values() if room.gpu == UNLIKE and len(room.indices) == size]
    deal = deal_nodes(snapshot, UNLIKE, free, (), PolicySettings())
    held = Counter[str]()
    for job_id in deal.nodes:
        target = snapshot.jobs[job_id].allocation.target
        held[job_id] = sum(snapshot.nodes[name].gpu == UNLIKE for name in target)
    assert sum(deal.nodes[job_id] - held[job_id] for job_id in deal.nodes) <= len(free)
    assert len(deal.wanted) <= REQUESTS_MAX * len(snapshot.index.running)
    assert all(wanted.shape.is_mixed for wanted in deal.wanted)
