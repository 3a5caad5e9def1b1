"""Invariants of the scheduler in generated states: legal decisions, pure functions, no breaches of its own."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import TypeVar
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from scheduler.domain.codec import decode, encode
from scheduler.domain.commands import Command, FreezeResizes
from scheduler.domain.decisions import Decision, JobDecision, RecallNode, ResizeJob, StartJob, decision_subject
from scheduler.domain.fleet import IncidentKind, LoanState, NodeIncident
from scheduler.domain.job_state import JOB_TRANSITIONS, JobState
from scheduler.domain.observation import Observation
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.tick_report import BreachKind, Violation
from scheduler.scheduling import observation as observation_module
from scheduler.scheduling.desired_state import apply_decision, apply_decisions, archive_ended
from scheduler.scheduling.legality import find_breaches, find_violation
from scheduler.scheduling.mutable_snapshot import MutableSnapshot
from scheduler.scheduling.policy_sets import list_policy_sets, load_policy_set
from scheduler.scheduling.scheduler import decide
from scheduler.scheduling.snapshot_update import update_snapshot
from tests.properties.worlds import a_world

V = TypeVar("V")
SEEDS = st.integers(min_value=0, max_value=10**9)
WORLDS = settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
FOR_EACH_POLICY_SET = settings(WORLDS, max_examples=50)
OWN_BREACHES = {BreachKind.GPU_HELD_TWICE, BreachKind.ON_UNLENT_NODE}


def violations(snapshot: Snapshot, decisions: tuple[Decision, ...]) -> list[Violation]:
    state, found = MutableSnapshot(snapshot), []
    for decision in decisions:
        violation = find_violation(state, decision)
        if violation is not None:
            found.append(violation)
        else:
            apply_decision(state, decision)
    return found


@pytest.mark.parametrize("policy", list_policy_sets())
@FOR_EACH_POLICY_SET
@given(seed=SEEDS)
def test_decisions_are_legal(policy: str, seed: int) -> None:
    world = a_world(seed)
    updated = update_snapshot(world.snapshot, world.observation, ()).snapshot
    assert violations(updated, decide(updated, load_policy_set(policy)).decisions) == []


@pytest.mark.parametrize("policy", list_policy_sets())
@FOR_EACH_POLICY_SET
@given(seed=SEEDS)
def test_fixed_jobs_keep_their_gpus_and_stay_off_lent_nodes(policy: str, seed: int) -> None:
    world = a_world(seed)
    updated = update_snapshot(world.snapshot, world.observation, ()).snapshot
    decisions = decide(updated, load_policy_set(policy)).decisions
    recalled = {decision.node for decision in decisions if isinstance(decision, RecallNode)}
    for decision in decisions:
        if not isinstance(decision, StartJob | ResizeJob) or updated.jobs[decision.job_id].is_resizable:
            continue
        held = updated.jobs[decision.job_id].allocation.target
        if isinstance(decision, ResizeJob):
            assert not (updated.index.must_vacate | recalled).isdisjoint(held)
        new = {name for name, indices in decision.gpus.items() if not set(indices) <= set(held.get(name, ()))}
        assert not any(updated.is_lent(updated.nodes[name]) for name in new)


@pytest.mark.parametrize("policy", list_policy_sets())
@FOR_EACH_POLICY_SET
@given(seed=SEEDS)
def test_decide_is_deterministic_and_keeps_its_input(policy: str, seed: int) -> None:
    snapshot = a_world(seed).snapshot
    before = json.dumps(encode(snapshot))
    assert decide(snapshot, load_policy_set(policy)) == decide(snapshot, load_policy_set(policy))
    assert json.dumps(encode(snapshot)) == before


@WORLDS
@given(seed=SEEDS)
def test_gpus_are_held_once_and_state_changes_are_legal(seed: int) -> None:
    world = a_world(seed)
    updated = update_snapshot(world.snapshot, world.observation, ()).snapshot
    after = apply_decisions(updated, decide(updated, load_policy_set("ebbtide")).decisions)
    held = sum(job.allocation.held_gpus for job in after.jobs.values())
    assert held == sum(len(by_index) for by_index in after.index.holders.values())
    for job_id, job in after.jobs.items():
        was = updated.jobs[job_id].state
        assert was is job.state or (was, job.state) in JOB_TRANSITIONS


@WORLDS
@given(seed=SEEDS)
def test_new_workers_start_on_training_nodes_only(seed: int) -> None:
    world = a_world(seed)
    updated = update_snapshot(world.snapshot, world.observation, ()).snapshot
    after = apply_decisions(updated, decide(updated, load_policy_set("ebbtide")).decisions)
    for job_id, job in after.jobs.items():
        for name, indices in job.allocation.target.items():
            had = updated.jobs[job_id].allocation.target.get(name, ())
            assert set(indices) <= set(had) or after.serves_training(after.nodes[name])


@pytest.mark.parametrize("policy", list_policy_sets())
@FOR_EACH_POLICY_SET
@given(seed=SEEDS)
def test_quarantined_nodes_get_no_new_workers_and_are_left(policy: str, seed: int) -> None:
    """Jobs leave at once, or wait for GPUs that others are giving up."""
    world = a_world(seed)
    incidents = tuple(NodeIncident(IncidentKind.STRAGGLER, job, job, world.snapshot.now_s, 1) for job in "xyz")
    nodes = {**world.snapshot.nodes, "t0": replace(world.snapshot.nodes["t0"], incidents=incidents)}
    updated = update_snapshot(replace(world.snapshot, nodes=nodes), world.observation, ()).snapshot
    assume("t1" in nodes)  # the only node of a pool is never quarantined
    assert updated.nodes["t0"].quarantine
    result = decide(updated, load_policy_set(policy))
    assert violations(updated, result.decisions) == []
    after = apply_decisions(updated, result.decisions)
    for job_id, job in after.jobs.items():
        had = updated.jobs[job_id].allocation.target.get("t0", ())
        assert set(job.allocation.target.get("t0", ())) <= set(had)
        if had and job.state is JobState.RUNNING and "t0" in job.allocation.target:
            assert "t0" in after.index.must_vacate


@WORLDS
@given(seed=SEEDS)
def test_recalled_nodes_are_vacated_in_time(seed: int) -> None:
    """Jobs leave at once, or wait for GPUs elsewhere while the next tick comes early enough to save."""
    world, policies = a_world(seed), load_policy_set("ebbtide")
    updated = update_snapshot(world.snapshot, world.observation, ()).snapshot
    result = decide(updated, policies)
    after = apply_decisions(updated, result.decisions)
    recalled = {loan.node: loan for loan in after.loans.values() if loan.state is LoanState.RECALLED}
    for job in after.jobs.values():
        for name in recalled.keys() & job.allocation.target.keys():
            return_by_s, grace_s = recalled[name].return_by_s, policies.settings.leave_grace_s_for(job)
            assert job.state is JobState.RUNNING
            assert return_by_s is not None
            assert after.now_s < result.next_wake_s <= return_by_s - grace_s


@WORLDS
@given(seed=SEEDS)
def test_second_decide_does_not_change_the_same_jobs(seed: int) -> None:
    """Except for a further recall: the target of a pool shrinks once one of its cordoned nodes is recalled."""
    world = a_world(seed)
    updated = update_snapshot(world.snapshot, world.observation, ()).snapshot
    first = decide(updated, load_policy_set("ebbtide"))
    after = replace(apply_decisions(updated, first.decisions), generation=8, full_pass_at_s=updated.now_s)
    again = decide(after, load_policy_set("ebbtide"))
    decided = {decision_subject(decision) for decision in first.decisions}
    if not any(isinstance(decision, RecallNode) for decision in again.decisions):
        assert not [d for d in again.decisions if isinstance(d, JobDecision) and d.job_id in decided]


def copied(value: V, kind: type[V]) -> V:
    """Return an equal value that shares no object with the original."""
    return decode(kind, json.loads(json.dumps(encode(value))))


@FOR_EACH_POLICY_SET
@given(seed=SEEDS)
def test_update_depends_on_values_alone_and_keeps_its_input(seed: int) -> None:
    world = a_world(seed)
    snapshot, observation = copied(world.snapshot, Snapshot), copied(world.observation, Observation)
    commands = (Command("c", world.snapshot.now_s, FreezeResizes(frozen=True)),)
    index = vars(snapshot.index.copy())
    update = update_snapshot(snapshot, observation, commands)
    again = update_snapshot(copied(world.snapshot, Snapshot), copied(world.observation, Observation), commands)
    assert (update.snapshot, update.events) == (again.snapshot, again.events)
    later = update_snapshot(update.snapshot, observation, ())
    assert later.snapshot == update_snapshot(copied(update.snapshot, Snapshot), world.observation, ()).snapshot
    assert (snapshot, observation) == (world.snapshot, world.observation)
    assert vars(snapshot.index) == index


@WORLDS
@given(seed=SEEDS)
def test_skipping_unchanged_runs_does_not_change_the_result(seed: int) -> None:
    world = a_world(seed)
    first = update_snapshot(world.snapshot, world.observation, ()).snapshot
    runs = tuple(replace(run, steps=None) for run in world.observation.runs)
    observation = replace(world.observation, runs=runs)
    update = update_snapshot(first, observation, ())
    with patch.object(observation_module, "_matches_run", return_value=False):
        assert update_snapshot(first, observation, ()) == update


@WORLDS
@given(seed=SEEDS)
def test_repeated_observation_changes_nothing(seed: int) -> None:
    world = a_world(seed)
    once = update_snapshot(world.snapshot, world.observation, ()).snapshot
    twice = update_snapshot(once, world.observation, ()).snapshot
    thrice = update_snapshot(twice, world.observation, ()).snapshot
    assert thrice == twice


@WORLDS
@given(seed=SEEDS)
def test_update_frees_only_gpus_observed_to_be_free(seed: int) -> None:
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
def test_stale_observation_frees_no_gpus(seed: int) -> None:
    world = a_world(seed)
    stale = Observation(world.observation.at_s, -1)
    after = update_snapshot(world.snapshot, stale, ()).snapshot
    for job_id, job in world.snapshot.jobs.items():
        assert after.jobs[job_id].allocation.held_gpus == job.allocation.held_gpus


@WORLDS
@given(seed=SEEDS)
def test_archive_removes_ended_jobs_only(seed: int) -> None:
    snapshot = a_world(seed).snapshot
    assert apply_decisions(snapshot, ()) == snapshot
    archived = archive_ended(snapshot)
    assert all(job.is_ended and not job.allocation.held_gpus for job in archived.ended_jobs)
    assert len(archived.snapshot.jobs) + len(archived.ended_jobs) == len(snapshot.jobs)


@WORLDS
@given(seed=SEEDS)
def test_snapshot_survives_json(seed: int) -> None:
    snapshot = a_world(seed).snapshot
    assert decode(Snapshot, json.loads(json.dumps(encode(snapshot)))) == snapshot


@WORLDS
@given(seed=SEEDS)
def test_legal_state_has_no_breach_of_its_own(seed: int) -> None:
    world = a_world(seed)
    assert OWN_BREACHES.isdisjoint(breach.kind for breach in find_breaches(world.snapshot, world.observation))


def test_worlds_cover_every_state_and_contention() -> None:
    worlds = [a_world(seed) for seed in range(400)]
    jobs = Counter(job.state for world in worlds for job in world.snapshot.jobs.values())
    loans = Counter(loan.state for world in worlds for loan in world.snapshot.loans.values())
    contended = sum(world.is_contended for world in worlds) / len(worlds)
    print(f"\n{dict(jobs)}\n{dict(loans)}\ncontended {contended:.0%}")
    assert set(jobs) == set(JobState)
    assert set(loans) == {LoanState.OFFERED, LoanState.ACTIVE, LoanState.RECALLED}
    assert contended >= 0.3
