"""Flexible GPUs: who gives them up, who gets them."""

from __future__ import annotations

from scheduler.core.decide import decide
from scheduler.domain.decision import ResizeJob
from scheduler.domain.gpus import count
from scheduler.domain.job_state import JobState
from scheduler.domain.snapshot import Snapshot, Switches
from scheduler.policies.policy_set import policy_set
from tests.builders import a_fleet, a_job, a_node, a_snapshot

EIGHT = (0, 1, 2, 3, 4, 5, 6, 7)
FOUR = (0, 1, 2, 3)


def resized(snapshot: Snapshot) -> dict[str, int]:
    decisions = decide(snapshot, policy_set("ebbtide")).decisions
    return {d.job_id: count(d.gpus) for d in decisions if isinstance(d, ResizeJob)}


def test_a_job_below_its_raised_minimum_waits_until_all_of_it_fits() -> None:
    fleet = a_fleet(training=1, inference=0)
    other = a_job("other", 2, state=JobState.RUNNING, on={"t0": (4, 5)})
    raised = a_job("raised", 8, 8, state=JobState.RUNNING, on={"t0": FOUR})
    assert resized(a_snapshot(fleet, [raised, other])) == {}
    assert resized(a_snapshot(fleet, [raised])) == {"raised": 8}


def test_a_job_above_its_lowered_maximum_shrinks_to_it() -> None:
    fleet = a_fleet(training=1, inference=0)
    assert resized(a_snapshot(fleet, [a_job("j", 1, 2, state=JobState.RUNNING, on={"t0": EIGHT})])) == {"j": 2}


def test_only_a_full_pass_grows_jobs() -> None:
    fleet = a_fleet(training=1, inference=0)
    job = a_job("j", 4, 8, state=JobState.RUNNING, on={"t0": FOUR}, steps=10**6)
    assert resized(a_snapshot(fleet, [job], now_s=1000.0, full_pass_at_s=900.0)) == {}
    assert resized(a_snapshot(fleet, [job], now_s=1000.0, full_pass_at_s=700.0)) == {"j": 8}


def test_nothing_grows_or_makes_room_while_resizes_are_frozen() -> None:
    fleet = a_fleet(training=1, inference=0)
    job = a_job("j", 4, 8, state=JobState.RUNNING, on={"t0": FOUR}, steps=10**6)
    assert resized(a_snapshot(fleet, [job], switches=Switches(resizes_frozen=True))) == {}
    wide = a_job("wide", 1, 8, state=JobState.RUNNING, on={"t0": EIGHT})
    assert resized(a_snapshot(fleet, [wide, a_job("late", 4)], switches=Switches(resizes_frozen=True))) == {}


def test_room_is_made_by_jobs_on_the_gpus_that_are_waited_for() -> None:
    pools, nodes = a_fleet(training=1, inference=0)
    nodes = {**nodes, "h0": a_node("h0", gpu="h100-80g")}
    jobs = [
        a_job("a", 1, 8, state=JobState.RUNNING, on={"t0": EIGHT}, steps=10),
        a_job("h", 1, 8, state=JobState.RUNNING, on={"h0": EIGHT}, steps=10**9),
        a_job("late", 4, gpu="h100-80g"),
    ]
    assert resized(a_snapshot((pools, nodes), jobs)) == {"h": 4}
