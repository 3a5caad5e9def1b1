"""A resize whose new workers cannot start does not end the older ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from scheduler.domain.decisions import ResizeJob
from scheduler.domain.fleet import Node
from scheduler.domain.job import Job
from scheduler.domain.job_state import JobState
from scheduler.domain.observation import NodeFacts, Observation, Run, RunPhase
from scheduler.domain.placement_record import PodRefusal
from scheduler.domain.pod_requirements import NodeCapacity
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling.desired_state import apply_decisions
from scheduler.scheduling.policy_sets import load_policy_set
from scheduler.scheduling.scheduler import decide
from scheduler.scheduling.snapshot_update import update_snapshot
from tests.builders import a_fleet, a_job, a_node, a_snapshot

CAPACITY = NodeCapacity(allocatable=(("cpu", 64_000), ("memory", 2**39), ("pods", 110)))
ALL = tuple(range(8))


def growing(target: tuple[str, ...] = ("t0", "t1"), **changes: Any) -> Snapshot:
    """Return the state in which a job that runs on t0 is being resized to the target."""
    nodes: dict[str, Node] = {name: a_node(name, capacity=CAPACITY) for name in ("t0", *target)}
    job = a_job("grows", 8, 24, state=JobState.RUNNING, on={"t0": ALL}, steps=10**6, **changes)
    wide = a_job("grows", 8, 24, state=JobState.RUNNING, on=dict.fromkeys(target, ALL)).allocation
    snapshot = a_snapshot((a_fleet(training=0, inference=0)[0], nodes), [job], full_pass_at_s=float("-inf"))
    reason = decide(snapshot, load_policy_set("ebbtide")).decisions[0].reason
    assert wide.plan is not None
    return apply_decisions(snapshot, [ResizeJob("grows", wide.target, wide.plan, 30.0, reason)])


def observed(snapshot: Snapshot, *runs: Run, after_s: float = 5.0) -> Snapshot:
    now_s = snapshot.now_s + after_s
    facts = {name: NodeFacts(capacity=CAPACITY) for name in snapshot.nodes}
    return update_snapshot(replace(snapshot, now_s=now_s), Observation(now_s, 0, runs, facts), ()).snapshot


def failed(snapshot: Snapshot, *, node: str = "", phase: RunPhase = RunPhase.LOST) -> Run:
    refusal = PodRefusal(node, "OutOfcpu", "too little cpu") if node else None
    return Run("grows", snapshot.jobs["grows"].allocation.generation, phase, reason="no start", refusal=refusal)


def older(phase: RunPhase = RunPhase.LEAVING) -> Run:
    return Run("grows", 1, phase, {"t0": ALL} if phase is RunPhase.LEAVING else {}, steps=100.0)


def grown_nodes(snapshot: Snapshot) -> set[str]:
    decisions = decide(snapshot, load_policy_set("ebbtide")).decisions
    return {name for each in decisions if isinstance(each, ResizeJob) for name in each.gpus}


def assert_goes_on(job: Job, nodes: set[str]) -> None:
    assert (job.state, job.allocation.generation) == (JobState.RESIZING, 3)
    assert set(job.allocation.target) == nodes
    assert job.allocation.plan is not None
    assert job.allocation.plan.world_size == 8 * len(nodes)
    assert (job.account.failures, job.account.lost_gpu_s) == (0, 0.0)


def test_refused_growth_keeps_the_gpus_of_the_running_workers() -> None:
    snapshot = growing()
    after = observed(snapshot, older(), failed(snapshot, node="t1"))
    job = after.jobs["grows"]
    assert_goes_on(job, {"t0"})
    assert job.allocation.leave_by_s == 35.0, "its workers have as much time to save as the resize gave them"
    running = observed(after, Run("grows", 3, RunPhase.RUNNING, {"t0": ALL}, steps=100.0)).jobs["grows"]
    assert running.state is JobState.RUNNING
    assert running.placement.find_avoided(after.now_s) == ("t1",)
    again = replace(after, jobs={"grows": running}, full_pass_at_s=float("-inf"))
    assert "t1" not in grown_nodes(again)


def test_growth_keeps_the_nodes_that_refused_nothing() -> None:
    snapshot = growing(("t0", "t1", "t2"))
    assert_goes_on(observed(snapshot, older(), failed(snapshot, node="t1")).jobs["grows"], {"t0", "t2"})


def test_refused_growth_keeps_its_node_even_after_the_older_workers_left() -> None:
    snapshot = growing()
    left = Run("grows", 1, RunPhase.LEFT, steps=100.0, checkpoint_steps=100.0)
    job = observed(snapshot, left, failed(snapshot, node="t1")).jobs["grows"]
    assert_goes_on(job, {"t0"})
    assert job.progress.steps == 100.0


@pytest.mark.parametrize("phase", [RunPhase.LOST, RunPhase.FAILED])
def test_growth_that_fails_without_a_refusal_returns_to_the_older_gpus(phase: RunPhase) -> None:
    snapshot = growing()
    job = observed(snapshot, older(), failed(snapshot, phase=phase)).jobs["grows"]
    assert_goes_on(job, {"t0"})
    assert job.placement.find_avoided(5.0) == (("t1",) if phase is RunPhase.FAILED else ())


def test_refused_move_off_a_draining_node_lets_the_older_workers_save() -> None:
    snapshot = growing(("t1",))
    nodes = {**snapshot.nodes, "t0": replace(snapshot.nodes["t0"], draining=True, cordoned=True)}
    after = observed(replace(snapshot, nodes=nodes), older(), failed(snapshot, node="t1"))
    job = after.jobs["grows"]
    assert job.state is JobState.PLANNING
    assert not job.allocation.target
    assert (job.allocation.leave_by_s, job.account.lost_gpu_s) == (30.0, 0.0)


def test_refused_start_is_given_up() -> None:
    snapshot = growing()
    starting = replace(snapshot.jobs["grows"], state=JobState.STARTING)
    after = observed(replace(snapshot, jobs={"grows": starting}), failed(snapshot, node="t1"))
    assert not after.jobs["grows"].allocation.target
