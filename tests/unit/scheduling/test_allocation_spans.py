"""Allocation spans of one tick: nodes that are kept, given up and recalled, and the reasons of ends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from scheduler.domain.allocation_span import SpanEnd
from scheduler.domain.fleet import Loan, LoanState, NodeState
from scheduler.domain.job import Job
from scheduler.domain.job_state import NO_ALLOCATION, JobState
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling.allocation_spans import SpanChanges, compute_span_changes
from tests.builders import a_fleet, a_job, a_snapshot

FLEET = a_fleet(training=2, inference=1)
RECALLED = Loan("i0-1", "i0", "inference", LoanState.RECALLED, 0.0, 50.0, return_by_s=90.0)


def on_three_nodes() -> Job:
    return a_job("j", 2, state=JobState.RUNNING, on={"t0": (0, 1), "t1": (0,), "i0": (5,)}, now_s=10.0)


def after(snapshot: Snapshot, job: Job, now_s: float) -> Snapshot:
    return replace(snapshot, jobs={**snapshot.jobs, job.id: job}, now_s=now_s)


def changed(job: Job, state: JobState, now_s: float = 60.0, **changes: Any) -> Job:
    """Return the job in its next state, with a new generation of its allocation."""
    generation = job.allocation.generation + 1
    return job.transition_to(state, now_s, allocation=replace(job.allocation, generation=generation, **changes))


def ends(before: Snapshot, after: Snapshot) -> dict[str, SpanEnd]:
    changes = compute_span_changes(before, after)
    assert all(each.end_s == after.jobs[each.job_id].account.settled_at_s for each in changes.ended)
    return {each.node: each.end for each in changes.ended}


def test_first_allocation_begins_a_span_on_each_node() -> None:
    snapshot, job = a_snapshot(FLEET), replace(on_three_nodes(), owner="ada")
    changes = compute_span_changes(snapshot, after(snapshot, job, 10.0))
    assert changes.ended == ()
    assert {each.node: (each.gpus, each.is_lent, each.pool) for each in changes.begun} == {
        "t0": ((0, 1), False, "training"),
        "t1": ((0,), False, "training"),
        "i0": ((5,), True, "inference"),
    }
    assert {(each.job_id, each.owner, each.generation, each.begin_s) for each in changes.begun} == {
        ("j", "ada", job.allocation.generation, 10.0)
    }


def test_a_resize_renews_the_spans_of_kept_nodes_and_continues_those_that_are_released() -> None:
    job = on_three_nodes()
    snapshot = a_snapshot(FLEET, [job])
    resized = changed(job, JobState.RESIZING, target={"t0": (0, 1)}, releasing={"t1": (0,), "i0": (5,)})
    changes = compute_span_changes(snapshot, resizing := after(snapshot, resized, 60.0))
    assert [each.node for each in changes.ended] == [each.node for each in changes.begun] == ["t0"]
    assert changes.begun[0].generation == resized.allocation.generation
    free = resized.advance_to(70.0)
    free = replace(free, allocation=replace(free.allocation, releasing={"t1": (0,)}))
    assert ends(resizing, after(resizing, free, 70.0)) == {"i0": SpanEnd.RESIZED}
    recalled = replace(resizing, loans={"i0": RECALLED})
    assert ends(recalled, after(recalled, free, 70.0)) == {"i0": SpanEnd.RECALLED}


def test_giving_up_some_gpus_of_a_node_ends_its_span() -> None:
    job = on_three_nodes()
    snapshot = a_snapshot(FLEET, [job])
    target = {**job.allocation.target, "t0": (1,)}
    fewer = replace(job.advance_to(60.0), allocation=replace(job.allocation, target=target))
    changes = compute_span_changes(snapshot, after(snapshot, fewer, 60.0))
    assert [(each.node, each.gpus) for each in changes.begun] == [("t0", (1,))]
    assert [each.node for each in changes.ended] == ["t0"]


@pytest.mark.parametrize(
    ("state", "end"),
    [
        (JobState.SUCCEEDED, SpanEnd.SUCCEEDED),
        (JobState.FAILED, SpanEnd.FAILED),
        (JobState.CANCELLED, SpanEnd.CANCELLED),
        (JobState.PREEMPTED, SpanEnd.PREEMPTED),
        (JobState.SUSPENDED, SpanEnd.SUSPENDED),
        (JobState.QUEUED, SpanEnd.FAILED),
    ],
)
def test_state_of_the_job_is_the_reason(state: JobState, end: SpanEnd) -> None:
    job = on_three_nodes()
    snapshot = a_snapshot(FLEET, [job])
    ended = after(snapshot, changed(job, state, target={}), 60.0)
    assert set(ends(snapshot, ended).values()) == {end}


def test_node_that_went_down_and_gpus_that_are_free_only_after_a_preemption() -> None:
    job = on_three_nodes()
    snapshot = a_snapshot(FLEET, [job])
    down = replace(snapshot, nodes={**snapshot.nodes, "t1": replace(snapshot.nodes["t1"], state=NodeState.DOWN)})
    left = after(down, changed(job, JobState.RESIZING, target={"t0": (0, 1), "i0": (5,)}), 60.0)
    assert ends(snapshot, left)["t1"] is SpanEnd.NODE_DOWN
    leaving = changed(job, JobState.PREEMPTED, target={}, releasing=job.allocation.target)
    preempted = after(snapshot, leaving, 60.0)
    assert ends(snapshot, preempted) == {}
    queued = leaving.transition_to(JobState.QUEUED, 70.0, allocation=NO_ALLOCATION)
    assert set(ends(preempted, after(preempted, queued, 70.0)).values()) == {SpanEnd.PREEMPTED}


def test_unchanged_jobs_have_no_changes() -> None:
    snapshot = a_snapshot(FLEET, [on_three_nodes()])
    measured = on_three_nodes().with_progress(replace(on_three_nodes().progress, steps=7.0))
    same = after(snapshot, replace(measured, allocation=snapshot.jobs["j"].allocation), 20.0)
    for later in (snapshot, same):
        assert compute_span_changes(snapshot, later) == SpanChanges()
