"""Laws of the core that hold in every world: only legal decisions, no breach caused by us, nothing lost."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scheduler.domain.codec import decode, encode
from scheduler.domain.decisions import Decision, JobDecision, decision_subject
from scheduler.domain.fleet import LoanState
from scheduler.domain.job_state import JOB_TRANSITIONS, JobState
from scheduler.domain.observation import Observation
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.tick_report import BreachKind, Violation
from scheduler.scheduling.desired_state import apply_decision, apply_decisions, archive_ended
from scheduler.scheduling.legality import find_breaches, find_violation
from scheduler.scheduling.mutable_snapshot import MutableSnapshot
from scheduler.scheduling.policies.policy_set import list_policy_sets, load_policy_set
from scheduler.scheduling.scheduler import decide
from scheduler.scheduling.snapshot_update import update_snapshot
from tests.properties.worlds import a_world

SEEDS = st.integers(min_value=0, max_value=10**9)
WORLDS = settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
FOR_EACH_SET = settings(WORLDS, max_examples=80)
OURS = {BreachKind.GPU_HELD_TWICE, BreachKind.ON_UNLENT_NODE}


def violations(snapshot: Snapshot, decisions: tuple[Decision, ...]) -> list[Violation]:
    draft, found = MutableSnapshot(snapshot), []
    for decision in decisions:
        violation = find_violation(draft, decision)
        if violation is not None:
            found.append(violation)
        else:
            apply_decision(draft, decision)
    return found


@pytest.mark.parametrize("policy", list_policy_sets())
@FOR_EACH_SET
@given(seed=SEEDS)
def test_decide_takes_only_legal_decisions(policy: str, seed: int) -> None:
    world = a_world(seed)
    absorbed = update_snapshot(world.snapshot, world.observation, ()).snapshot
    assert violations(absorbed, decide(absorbed, load_policy_set(policy)).decisions) == []


@pytest.mark.parametrize("policy", list_policy_sets())
@FOR_EACH_SET
@given(seed=SEEDS)
def test_decide_is_deterministic_and_leaves_its_input_alone(policy: str, seed: int) -> None:
    snapshot = a_world(seed).snapshot
    before = json.dumps(encode(snapshot))
    assert decide(snapshot, load_policy_set(policy)) == decide(snapshot, load_policy_set(policy))
    assert json.dumps(encode(snapshot)) == before


@WORLDS
@given(seed=SEEDS)
def test_no_gpu_is_held_twice_and_every_change_of_state_stands_in_the_table(seed: int) -> None:
    world = a_world(seed)
    absorbed = update_snapshot(world.snapshot, world.observation, ()).snapshot
    after = apply_decisions(absorbed, decide(absorbed, load_policy_set("ebbtide")).decisions)
    held = sum(job.allocation.held_gpus for job in after.jobs.values())
    assert held == sum(len(by_index) for by_index in after.index.holders.values())
    for job_id, job in after.jobs.items():
        was = absorbed.jobs[job_id].state
        assert was is job.state or (was, job.state) in JOB_TRANSITIONS


@WORLDS
@given(seed=SEEDS)
def test_nothing_new_lands_where_training_must_not_go(seed: int) -> None:
    world = a_world(seed)
    absorbed = update_snapshot(world.snapshot, world.observation, ()).snapshot
    after = apply_decisions(absorbed, decide(absorbed, load_policy_set("ebbtide")).decisions)
    for job_id, job in after.jobs.items():
        for name, indices in job.allocation.target.items():
            had = absorbed.jobs[job_id].allocation.target.get(name, ())
            assert set(indices) <= set(had) or after.serves_training(after.nodes[name])


@WORLDS
@given(seed=SEEDS)
def test_every_recalled_node_is_being_left(seed: int) -> None:
    """At once; or a running job waits for room elsewhere, and the next look comes while it can still save in time."""
    world, policies = a_world(seed), load_policy_set("ebbtide")
    absorbed = update_snapshot(world.snapshot, world.observation, ()).snapshot
    result = decide(absorbed, policies)
    after = apply_decisions(absorbed, result.decisions)
    recalled = {loan.node: loan for loan in after.loans.values() if loan.state is LoanState.RECALLED}
    for job in after.jobs.values():
        for name in recalled.keys() & job.allocation.target.keys():
            return_by_s, grace_s = recalled[name].return_by_s, policies.settings.leave_grace_s_for(job)
            assert job.state is JobState.RUNNING
            assert return_by_s is not None
            assert after.now_s < result.next_wake_s <= return_by_s - grace_s


@WORLDS
@given(seed=SEEDS)
def test_a_second_decide_leaves_the_jobs_of_the_first_alone(seed: int) -> None:
    """What was decided needs no deciding again: no decision undoes one of the tick before."""
    world = a_world(seed)
    absorbed = update_snapshot(world.snapshot, world.observation, ()).snapshot
    first = decide(absorbed, load_policy_set("ebbtide"))
    after = replace(apply_decisions(absorbed, first.decisions), generation=8, full_pass_at_s=absorbed.now_s)
    again = decide(after, load_policy_set("ebbtide"))
    decided = {decision_subject(decision) for decision in first.decisions}
    assert not [d for d in again.decisions if isinstance(d, JobDecision) and d.job_id in decided]


@WORLDS
@given(seed=SEEDS)
def test_absorbing_the_same_observation_again_changes_nothing(seed: int) -> None:
    world = a_world(seed)
    once = update_snapshot(world.snapshot, world.observation, ()).snapshot
    twice = update_snapshot(once, world.observation, ()).snapshot
    thrice = update_snapshot(twice, world.observation, ()).snapshot
    assert thrice == twice


@WORLDS
@given(seed=SEEDS)
def test_absorb_moves_jobs_along_legal_edges_and_frees_only_what_was_seen_free(seed: int) -> None:
    world = a_world(seed)
    after = update_snapshot(world.snapshot, world.observation, ()).snapshot
    for job_id, job in after.jobs.items():
        before = world.snapshot.jobs[job_id]
        freed = before.allocation.held_gpus - job.allocation.held_gpus
        if freed:
            assert world.observation.converged_generation >= before.allocation.asked_at_generation
        for run in world.observation.runs:
            if run.job_id == job_id:
                for name, indices in run.gpus.items():
                    assert set(indices) <= set(job.allocation.held.get(name, ()))


@WORLDS
@given(seed=SEEDS)
def test_an_observation_older_than_a_release_frees_nothing(seed: int) -> None:
    world = a_world(seed)
    stale = Observation(world.observation.at_s, -1)
    after = update_snapshot(world.snapshot, stale, ()).snapshot
    for job_id, job in world.snapshot.jobs.items():
        assert after.jobs[job_id].allocation.held_gpus == job.allocation.held_gpus


@WORLDS
@given(seed=SEEDS)
def test_apply_of_nothing_changes_nothing_and_archive_takes_only_what_has_ended(seed: int) -> None:
    snapshot = a_world(seed).snapshot
    assert apply_decisions(snapshot, ()) == snapshot
    archived = archive_ended(snapshot)
    assert all(job.is_ended and not job.allocation.held_gpus for job in archived.ended_jobs)
    assert len(archived.snapshot.jobs) + len(archived.ended_jobs) == len(snapshot.jobs)


@WORLDS
@given(seed=SEEDS)
def test_a_snapshot_survives_json(seed: int) -> None:
    snapshot = a_world(seed).snapshot
    assert decode(Snapshot, json.loads(json.dumps(encode(snapshot)))) == snapshot


@WORLDS
@given(seed=SEEDS)
def test_the_observed_world_of_a_legal_state_has_no_breach_of_ours(seed: int) -> None:
    world = a_world(seed)
    assert OURS.isdisjoint(breach.kind for breach in find_breaches(world.snapshot, world.observation))


def test_the_worlds_cover_every_state_and_are_contended_often_enough() -> None:
    worlds = [a_world(seed) for seed in range(400)]
    jobs = Counter(job.state for world in worlds for job in world.snapshot.jobs.values())
    loans = Counter(loan.state for world in worlds for loan in world.snapshot.loans.values())
    contended = sum(world.is_contended for world in worlds) / len(worlds)
    print(f"\n{dict(jobs)}\n{dict(loans)}\ncontended {contended:.0%}")
    assert set(jobs) == set(JobState)
    assert set(loans) == {LoanState.OFFERED, LoanState.ACTIVE, LoanState.RECALLED}
    assert contended >= 0.3
