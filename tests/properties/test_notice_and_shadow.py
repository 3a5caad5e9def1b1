"""Shadow mode and notice in generated states: no loan in shadow mode, none before its notice ends, legal decisions."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scheduler.domain.decisions import Decision, LendNode, ProposeLoan
from scheduler.domain.fleet import Loan, LoanState
from scheduler.domain.lending_policy import LendingMode
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling.desired_state import apply_decision
from scheduler.scheduling.legality import find_violation
from scheduler.scheduling.mutable_snapshot import MutableSnapshot
from scheduler.scheduling.policy_sets import load_policy_set
from scheduler.scheduling.scheduler import decide
from scheduler.scheduling.snapshot_update import update_snapshot
from tests.properties.worlds import NOW_S, World, a_world

SEEDS = st.integers(min_value=0, max_value=10**9)
WORLDS = settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


def with_lending(world: World, *, mode: LendingMode = LendingMode.LEND, notice_s: float = 0.0) -> Snapshot:
    """Return the world after its observation, with another lending policy."""
    snapshot = update_snapshot(world.snapshot, world.observation, ()).snapshot
    pool = snapshot.pools["inference"]
    lending = replace(pool.lending, mode=mode, notice_s=notice_s)
    return replace(snapshot, pools={**snapshot.pools, "inference": replace(pool, lending=lending)})


def apply_legal(snapshot: Snapshot, decisions: tuple[Decision, ...]) -> Snapshot:
    """Apply all decisions, each of which must be legal."""
    state = MutableSnapshot(snapshot)
    for decision in decisions:
        assert find_violation(state, decision) is None
        apply_decision(state, decision)
    return state.view()


@WORLDS
@given(seed=SEEDS)
def test_pool_in_shadow_mode_never_gets_a_loan(seed: int) -> None:
    snapshot = with_lending(a_world(seed), mode=LendingMode.SHADOW)
    for step in range(3):
        result = decide(snapshot, load_policy_set("ebbtide"))
        assert not [each for each in result.decisions if isinstance(each, LendNode | ProposeLoan)]
        after = apply_legal(snapshot, result.decisions)
        assert after.loans.keys() <= snapshot.loans.keys()
        shadow = result.shadows["inference"]
        assert set(shadow.nodes) <= {name for name, node in after.nodes.items() if node.pool == "inference"}
        assert 0.0 <= shadow.gpus <= sum(after.nodes[name].gpus for name in shadow.nodes)
        now_s = snapshot.now_s + 150.0 * (step + 1)
        snapshot = replace(after, shadows=result.shadows, now_s=now_s, generation=after.generation + 1)


@WORLDS
@given(seed=SEEDS)
def test_no_node_is_offered_before_its_notice_ends_or_during_a_veto(seed: int) -> None:
    snapshot, random = with_lending(a_world(seed), notice_s=60.0), Random(seed)
    nodes, loans = dict(snapshot.nodes), dict(snapshot.loans)
    for name, node in snapshot.nodes.items():
        if node.pool == "inference" and name not in snapshot.index.holders and random.random() < 0.6:
            loans.pop(name, None)
            if random.random() < 0.5:
                ends_s = NOW_S + random.choice((-5.0, 0.0, 5.0))
                proposed_s = ends_s - 60.0
                loans[name] = Loan(f"{name}-2", name, node.pool, LoanState.PROPOSED, ends_s, proposed_s, None)
            else:
                nodes[name] = replace(node, vetoed_until_s=NOW_S + random.choice((-5.0, 5.0)))
    before = replace(snapshot, nodes=nodes, loans=loans)
    decisions = decide(before, load_policy_set("ebbtide")).decisions
    apply_legal(before, decisions)
    for decision in decisions:
        if isinstance(decision, LendNode):
            loan = before.loans[decision.node]
            assert loan.state is LoanState.PROPOSED
            assert loan.offered_at_s <= before.now_s
        if isinstance(decision, LendNode | ProposeLoan):
            assert before.nodes[decision.node].vetoed_until_s <= before.now_s
