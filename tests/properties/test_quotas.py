"""Invariants of quotas in generated worlds: limits hold, guarantees are met, and preemption comes to an end."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import inf
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings

from scheduler.domain.decisions import PreemptJob
from scheduler.domain.fleet import DemandReading
from scheduler.domain.job import Job
from scheduler.domain.job_queue import JobQueue
from scheduler.domain.job_state import NO_ALLOCATION, JobState
from scheduler.domain.lending_policy import LendingPolicy
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling.desired_state import apply_decisions
from scheduler.scheduling.policies.quota import QuotaState
from scheduler.scheduling.policies.settings import PolicySettings
from scheduler.scheduling.policy_sets import PolicySet, list_policy_sets, load_policy_set
from scheduler.scheduling.scheduler import decide
from tests.builders import a_fleet, a_job, a_loan, a_snapshot
from tests.properties.test_scheduling_invariants import SEEDS, violations
from tests.properties.worlds import a_world

NOW_S = 10_000.0
USERS = ("ada", "bob", "")
NAMES = ("own", "lab", "rest", "guest")
WORLDS = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
AT_ONCE = PolicySettings(run_time_min_s=0.0)


def queues_of(random: Random, capacity: int, *, of_users: bool = False) -> dict[str, JobQueue]:
    """Return up to three queues whose guarantees together fit into the capacity."""
    declared, left = {}, capacity
    for name in NAMES[: random.randint(1, 3)]:
        guaranteed = random.randint(0, left)
        limit = random.choice((None, None, guaranteed, guaranteed + random.randint(0, 6)))
        weight = random.choice((1.0, 2.0))
        declared[name] = JobQueue(name, guaranteed, limit, weight, random.randint(1, 6) if of_users else None)
        left -= guaranteed
    return declared


def any_world(seed: int, *, of_users: bool = False) -> Snapshot:
    """Return a world in any state with queues and owners, and with `of_users` limits for users."""
    random, snapshot = Random(seed), a_world(seed).snapshot
    jobs = {
        job_id: replace(job, spec=replace(job.spec, queue=random.choice(NAMES)), owner=random.choice(USERS))
        for job_id, job in snapshot.jobs.items()
    }
    capacity = sum(node.gpus for node in snapshot.nodes.values())
    return replace(snapshot, jobs=jobs, queues=queues_of(random, capacity, of_users=of_users))


def calm_world(seed: int, *, of_users: bool = False) -> Snapshot:
    """Return a world in which every job can run on any GPU, so that only the number of GPUs matters."""
    random, nodes = Random(seed), Random(seed + 1).randint(1, 5)
    fleet = a_fleet(training=nodes, inference=0, gpus_per_node=4)
    free = [(f"t{at // 4}", at % 4) for at in range(4 * nodes)]
    jobs = []
    for at in range(random.randint(1, 12)):
        least = random.choice((1, 1, 2, 3, 4))
        most = least * random.choice((1, 1, 2, 4))
        count = random.randint(least, most)
        on: dict[str, tuple[int, ...]] = {}
        if random.random() < 0.6 and count <= len(free):
            for node, index in (free.pop() for _ in range(count)):
                on[node] = (*on.get(node, ()), index)
        jobs.append(queued_or_running(random, f"j{at:02d}", least, most, on))
    if of_users:
        jobs = [replace(job, owner=random.choice(USERS)) for job in jobs]
    return a_snapshot(fleet, jobs, queues=queues_of(random, 4 * nodes, of_users=of_users), now_s=NOW_S)


def tight_world(seed: int) -> Snapshot:
    """Return a world with idle lent nodes, of which some jobs cannot use any, and limits that jobs almost reach.

    The owners of some jobs have lowered the maximum below what the jobs hold.
    """
    random = Random(seed)
    lending = LendingPolicy(headroom=0.0)
    pools, nodes = a_fleet(
        training=random.randint(1, 3), inference=random.randint(1, 2), gpus_per_node=4, lending=lending
    )
    free = [(name, index) for name in sorted(nodes) for index in range(4)]
    if random.random() < 0.5:
        random.shuffle(free)  # otherwise the owned nodes are full before a lent one is used
    jobs = [_tight_job(random, f"j{at:02d}", free) for at in range(random.randint(2, 10))]
    held = Counter[str]()
    for job in jobs:
        held["own" if job.spec.queue == "own" else "default"] += job.allocation.target_gpus
    guaranteed, limit = random.choice((0, 4, 8)), held["own"] + random.randint(0, 3)
    own = JobQueue("own", guaranteed, random.choice((None, max(guaranteed, limit))))
    default = JobQueue("default", 0, max(1, held["default"] + random.randint(0, 3)))
    return a_snapshot(
        (pools, nodes),
        jobs,
        [a_loan(name) for name, node in nodes.items() if node.pool == "inference"],
        queues={"own": own, "default": default},
        demand={"inference": DemandReading(NOW_S, 0.0, 0.0)},
        now_s=NOW_S,
        full_pass_at_s=random.choice((NOW_S, -inf)),
    )


def _tight_job(random: Random, job_id: str, free: list[tuple[str, int]]) -> Job:
    least, on = random.choice((1, 2, 2, 4)), dict[str, tuple[int, ...]]()
    most = least * random.choice((1, 2, 4))
    count = random.randint(least, most)
    if random.random() < 0.5 and count <= len(free):
        for node, index in (free.pop() for _ in range(count)):
            on[node] = (*on.get(node, ()), index)
    job = queued_or_running(random, job_id, least, most, on)
    is_barred = not any(node.startswith("i") for node in on) and random.random() < 0.5
    spec = replace(job.spec, queue=random.choice(("own", "default", "x")), fungible=not is_barred)
    if on and random.random() < 0.2:
        spec = replace(spec, max_gpus=least)
    return replace(job, spec=spec, owner=random.choice(USERS))


def queued_or_running(random: Random, job_id: str, least: int, most: int, on: dict[str, tuple[int, ...]]) -> Job:
    state = JobState.RUNNING if on else JobState.QUEUED
    queue, steps = random.choice(NAMES), random.choice((0, 10**9))
    return a_job(job_id, least, most, state=state, on=on, queue=queue, steps=steps)


def used(snapshot: Snapshot, name: str) -> int:
    return QuotaState(snapshot).used(name)


def used_by(snapshot: Snapshot, name: str, user: str) -> int:
    jobs = (job for job in snapshot.jobs.values() if (job.spec.queue, job.owner) == (name, user))
    return sum(job.allocation.target_gpus for job in jobs)


@pytest.mark.parametrize("policy", ["ebbtide", "fifo", "opportunistic"])
@WORLDS
@given(seed=SEEDS)
def test_no_queue_exceeds_its_limit(policy: str, seed: int) -> None:
    snapshot = any_world(seed, of_users=seed % 2 == 0)
    decisions = decide(snapshot, load_policy_set(policy)).decisions
    assert violations(snapshot, decisions) == []
    after = apply_decisions(snapshot, decisions)
    for name, queue in snapshot.queues.items():
        if queue.limit_gpus is not None:
            assert used(after, name) <= max(queue.limit_gpus, used(snapshot, name))


@pytest.mark.parametrize("policy", list_policy_sets())
@WORLDS
@given(seed=SEEDS)
def test_no_tick_exceeds_a_limit_of_a_queue_or_user(policy: str, seed: int) -> None:
    snapshot, policies = calm_world(seed, of_users=True), load_policy_set(policy, AT_ONCE)
    for _ in range(5):
        decisions = decide(snapshot, policies).decisions
        assert violations(snapshot, decisions) == []
        after = apply_decisions(snapshot, decisions)
        for name, queue in snapshot.queues.items():
            assert queue.limit_gpus is None or used(after, name) <= max(queue.limit_gpus, used(snapshot, name))
            for user in USERS:
                assert queue.user_limit_gpus is not None
                assert used_by(after, name, user) <= max(queue.user_limit_gpus, used_by(snapshot, name, user))
        snapshot, _ = advance(snapshot, policies)


@pytest.mark.parametrize("policy", ["ebbtide", "fifo", "opportunistic", "afs"])
@settings(WORLDS, max_examples=150)
@given(seed=SEEDS)
def test_decisions_near_limits_are_legal(policy: str, seed: int) -> None:
    snapshot = tight_world(seed)
    assert violations(snapshot, decide(snapshot, load_policy_set(policy, AT_ONCE)).decisions) == []


@WORLDS
@given(seed=SEEDS)
def test_user_at_the_limit_does_not_block_the_guarantee(seed: int) -> None:
    snapshot, policies = calm_world(seed, of_users=True), load_policy_set("ebbtide", AT_ONCE)
    for _ in range(12):
        snapshot, preempted = advance(snapshot, policies)
    assert not preempted
    quota, waiting = QuotaState(snapshot), [job for job in snapshot.jobs.values() if job.state is JobState.QUEUED]
    quota.order_jobs([job.id for job in waiting])
    assert [job.id for job in waiting if quota.is_guaranteed(job)] == []


@WORLDS
@given(seed=SEEDS)
def test_guaranteed_gpus_are_not_taken_from_a_queue_without_pending_jobs(seed: int) -> None:
    snapshot = calm_world(seed)
    decisions = decide(snapshot, load_policy_set("ebbtide", AT_ONCE)).decisions
    after = apply_decisions(snapshot, decisions)
    preempted = {snapshot.jobs[d.job_id].spec.queue for d in decisions if isinstance(d, PreemptJob)}
    waiting = {job.spec.queue for job in snapshot.jobs.values() if job.state is JobState.QUEUED}
    for name, queue in snapshot.queues.items():
        if name not in waiting | preempted:  # a job that is partly within the guarantee may be preempted as a whole
            assert used(after, name) >= min(queue.guaranteed_gpus, used(snapshot, name))


@WORLDS
@given(seed=SEEDS)
def test_guarantees_are_met_in_a_few_ticks_and_preemption_ends(seed: int) -> None:
    snapshot, policies = calm_world(seed), load_policy_set("ebbtide", AT_ONCE)
    for _ in range(8):
        snapshot, preempted = advance(snapshot, policies)
    assert not preempted
    quota, waiting = QuotaState(snapshot), [job for job in snapshot.jobs.values() if job.state is JobState.QUEUED]
    quota.order_jobs([job.id for job in waiting])
    assert [job.id for job in waiting if quota.is_guaranteed(job)] == []


@WORLDS
@given(seed=SEEDS)
def test_priorities_of_other_queues_delay_no_guarantee(seed: int) -> None:
    random, snapshot = Random(seed), calm_world(seed)
    jobs = {
        job_id: replace(job, spec=replace(job.spec, priority=random.choice((0, 5))))
        for job_id, job in snapshot.jobs.items()
    }
    snapshot, policies = replace(snapshot, jobs=jobs), load_policy_set("ebbtide", AT_ONCE)
    for _ in range(8):
        snapshot, preempted = advance(snapshot, policies)
    assert not preempted
    quota, waiting = QuotaState(snapshot), [job for job in snapshot.jobs.values() if job.state is JobState.QUEUED]
    quota.order_jobs([job.id for job in waiting])
    assert [job.id for job in waiting if quota.is_guaranteed(job)] == []


@WORLDS
@given(seed=SEEDS)
def test_names_of_undeclared_queues_gain_nothing(seed: int) -> None:
    snapshot = calm_world(seed, of_users=True)
    random, declared = Random(seed), snapshot.queues
    default = JobQueue("default", 0, random.choice((None, 3, 6)), 1.0, random.choice((None, 2, 4)))
    snapshot = replace(snapshot, queues={**declared, "default": default})

    def decide_with(names: tuple[str, ...]) -> dict[str, int]:
        jobs = {
            job_id: replace(job, spec=replace(job.spec, queue=names[at % len(names)]))
            if job.spec.queue not in declared
            else job
            for at, (job_id, job) in enumerate(snapshot.jobs.items())
        }
        named = replace(snapshot, jobs=jobs)
        after = apply_decisions(named, decide(named, load_policy_set("ebbtide", AT_ONCE)).decisions)
        return {job.id: job.allocation.target_gpus for job in after.jobs.values()}

    held = decide_with(("one",))
    assert held == decide_with(("one", "two", "three", "four"))
    before = sum(job.allocation.target_gpus for job in snapshot.jobs.values() if job.spec.queue not in declared)
    now = sum(gpus for job_id, gpus in held.items() if snapshot.jobs[job_id].spec.queue not in declared)
    assert default.limit_gpus is None or now <= max(before, default.limit_gpus)


def advance(snapshot: Snapshot, policies: PolicySet) -> tuple[Snapshot, list[str]]:
    """Decide once, and return the state after all changes took effect, with the preempted jobs."""
    decisions = decide(snapshot, policies).decisions
    after = apply_decisions(snapshot, decisions)
    now_s = snapshot.now_s + 1000.0
    jobs = {job.id: after_change(job, now_s) for job in after.jobs.values()}
    later = replace(after, jobs=jobs, now_s=now_s, generation=snapshot.generation + 1)
    return later, [decision.job_id for decision in decisions if isinstance(decision, PreemptJob)]


def after_change(job: Job, now_s: float) -> Job:
    state = {
        JobState.PREEMPTED: JobState.QUEUED,
        JobState.STARTING: JobState.RUNNING,
        JobState.RESIZING: JobState.RUNNING,
    }
    if job.state in state:
        job = job.transition_to(state[job.state], now_s)
    if job.state is JobState.QUEUED:
        return replace(job, allocation=replace(NO_ALLOCATION, generation=job.allocation.generation))
    return replace(job, allocation=replace(job.allocation, releasing={}))
