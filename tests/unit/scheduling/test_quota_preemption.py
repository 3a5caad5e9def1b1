"""Quotas in decisions: limits, guarantees, and reclaimed GPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.domain.decisions import PreemptJob, ReasonCode, ResizeJob, StartJob
from scheduler.domain.fleet import DemandReading
from scheduler.domain.gpu_sets import count
from scheduler.domain.job import Job
from scheduler.domain.job_account import JobAccount
from scheduler.domain.job_queue import JobQueue
from scheduler.domain.lending_policy import LendingPolicy
from scheduler.domain.tick_report import TickResult
from scheduler.scheduling.desired_state import apply_decisions
from scheduler.scheduling.policies.settings import PolicySettings
from scheduler.scheduling.policy_sets import load_policy_set
from scheduler.scheduling.scheduler import decide
from tests.builders import a_fleet, a_job, a_loan, a_snapshot
from tests.properties.test_scheduling_invariants import violations
from tests.unit.scheduling.policies.test_quota import runs, waits

FLEET = a_fleet(training=2, inference=0)
AT_ONCE = load_policy_set("ebbtide", PolicySettings(run_time_min_s=0.0))


def decided(*jobs: Job, now_s: float = 1000.0, **queues: JobQueue) -> TickResult:
    """Decide in a tick that is not a full pass, so that no GPUs are moved for gain."""
    snapshot = a_snapshot(FLEET, jobs, queues=queues, now_s=now_s, full_pass_at_s=now_s)
    return decide(snapshot, load_policy_set("ebbtide"))


def started(result: TickResult) -> dict[str, int]:
    return {d.job_id: count(d.gpus) for d in result.decisions if isinstance(d, StartJob)}


def test_queue_limit_holds_back_its_own_jobs_only() -> None:
    lab = JobQueue("lab", 0, 6)
    result = decided(
        waits("huge", "lab", 8), runs("r", "lab", "t0", 4), waits("next", "lab", 4), waits("x", "y", 8), lab=lab
    )
    assert started(result) == {"x": 8}
    assert {job_id: reason.code for job_id, reason in result.waiting.items()} == {
        "huge": ReasonCode.EXCEEDS_MAX_QUOTA,
        "next": ReasonCode.WAITING_FOR_QUOTA,
    }


def test_nobody_shrinks_for_a_limit_if_too_few_gpus_would_be_free() -> None:
    wide, other, large = runs("wide", "lab", "t0", 8, least=2), runs("other", "x", "t1", 8), waits("large", "lab", 8)
    result = decided(wide, other, large, lab=JobQueue("lab", 0, 12))
    assert result.decisions == ()
    assert result.waiting["large"].code is ReasonCode.WAITING_FOR_QUOTA
    (resize,) = decided(wide, other, waits("fits", "lab", 6), lab=JobQueue("lab", 0, 12)).decisions
    assert isinstance(resize, ResizeJob)
    assert count(resize.gpus) == 6


@pytest.mark.parametrize("guaranteed", [6, 8])
def test_gpus_within_a_guarantee_are_given_up_for_the_limit_of_the_same_queue(guaranteed: int) -> None:
    wide, other = runs("wide", "lab", "t0", 8, least=2), runs("other", "x", "t1", 8)
    (resize,) = decided(wide, other, waits("next", "lab", 6), lab=JobQueue("lab", guaranteed, 12)).decisions
    assert isinstance(resize, ResizeJob)
    assert count(resize.gpus) == 6


def test_job_of_an_undeclared_queue_shrinks_nobody_within_the_guarantee_of_default() -> None:
    wide, other = runs("wide", "default", "t0", 8, least=2), runs("other", "x", "t1", 8)
    result = decided(wide, other, waits("next", "invented", 4), default=JobQueue("default", 8, 18))
    assert result.decisions == ()
    assert result.waiting["next"].code is ReasonCode.WAITING_FOR_QUOTA


def test_job_above_its_lowered_maximum_keeps_no_more_than_that() -> None:
    lowered = replace(runs("a", "lab", "t0", 8), spec=a_job("a", 4, 5, queue="lab").spec)
    other, own = runs("x", "guest", "t1", 1), waits("own", "lab", 8)
    (resize,) = decided(lowered, other, own, lab=JobQueue("lab", 14)).decisions
    assert isinstance(resize, ResizeJob)
    assert count(resize.gpus) == 5


def test_start_counts_gpus_that_are_given_up_only_in_the_next_tick() -> None:
    """Seed 967: GPUs of `default` are reclaimed on `t0`, where its next job is not, and are held until they are."""
    borrower, claimant = runs("borrower", "lab", "t0", 8), waits("claimant", "team", 8, fungible=False)
    queues = {"team": JobQueue("team", 8), "default": JobQueue("default", 0, 10)}
    jobs = [borrower, claimant, waits("small", "default", 2), waits("next", "default", 4, 6)]
    fleet = a_fleet(training=1, inference=1, lending=LendingPolicy(headroom=0.0))
    idle = {"inference": DemandReading(0.0, 0.0, 0.0)}
    snapshot = a_snapshot(fleet, jobs, [a_loan("i0")], queues=queues, demand=idle)
    first = decide(snapshot, AT_ONCE)
    assert violations(snapshot, first.decisions) == []
    assert started(first) == {"small": 2}
    assert [d.job_id for d in first.decisions if isinstance(d, PreemptJob)] == ["borrower"]
    assert first.waiting["next"].code is ReasonCode.WAITING_FOR_QUOTA
    second = decide(apply_decisions(snapshot, first.decisions), AT_ONCE)
    assert started(second) == {"next": 6}


def test_start_counts_the_surplus_of_a_lowered_maximum_only_in_the_next_tick() -> None:
    """The running job gives up 3 GPUs for 1, because its owner lowered its maximum below what it holds."""
    lowered = replace(runs("lowered", "lab", "t0", 4), spec=a_job("lowered", 1, 1, queue="lab").spec)
    snapshot = a_snapshot(
        FLEET, [lowered, waits("a", "lab", 1), waits("b", "lab", 1, 2)], queues={"lab": JobQueue("lab", 0, 4)}
    )
    result = decide(snapshot, AT_ONCE)
    assert violations(snapshot, result.decisions) == []
    assert started(result) == {}
    assert started(decide(apply_decisions(snapshot, result.decisions), AT_ONCE)) == {"a": 1, "b": 2}


def test_starting_widths_stay_within_the_queue_limit() -> None:
    result = decided(waits("a", "lab", 2, 8), waits("b", "lab", 2, 8), lab=JobQueue("lab", 0, 10))
    assert sum(started(result).values()) == 10


def test_raised_minimum_above_the_limit_is_not_applied() -> None:
    raised = replace(runs("a", "lab", "t0", 4), spec=a_job("a", 6, queue="lab").spec)
    assert decided(raised, lab=JobQueue("lab", 0, 5)).decisions == ()
    (resize,) = decided(raised, lab=JobQueue("lab", 0, 6)).decisions
    assert isinstance(resize, ResizeJob)
    assert count(resize.gpus) == 6


def test_free_gpus_are_reserved_for_a_guarantee() -> None:
    young = [
        replace(runs(job_id, "guest", node, 6), account=JobAccount(first_started_at_s=started_s))
        for job_id, node, started_s in (("a", "t0", 500.0), ("b", "t1", 900.0))
    ]
    result = decided(*young, waits("own", "lab", 8), waits("other", "guest", 1), lab=JobQueue("lab", 8))
    assert started(result) == {}
    held = result.waiting["own"]
    assert held.code is ReasonCode.HELD_BY_MINIMUM_RUNTIME
    assert held.numbers["needed_gpus"] == 8.0
    assert (held.numbers["held_until_s"], result.next_wake_s) == (1100.0, 1100.0)
    assert result.waiting["other"].code is ReasonCode.INSUFFICIENT_GPUS
