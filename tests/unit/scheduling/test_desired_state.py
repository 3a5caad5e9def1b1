"""Applied decisions: the desired state."""

from __future__ import annotations

import pytest

from scheduler.domain.decisions import (
    CancelRecall,
    LendNode,
    PreemptJob,
    Reason,
    ReasonCode,
    RecallNode,
    RejectJob,
    ResizeJob,
    ReturnNode,
    StartJob,
    StopJob,
    SuspendRun,
)
from scheduler.domain.fleet import LoanState
from scheduler.domain.job_state import JobState
from scheduler.domain.scaling_curve import build_data_parallel_plan
from scheduler.scheduling.desired_state import apply_decisions, archive_ended
from tests.builders import GPU, a_fleet, a_job, a_loan, a_snapshot

WHY = Reason(ReasonCode.FIRST_IN_ORDER, "because")
FLEET = a_fleet(training=2, inference=2)
FOUR = {"t0": (0, 1, 2, 3)}


def test_start_sets_gpus_plan_and_a_new_generation() -> None:
    snapshot = a_snapshot(FLEET, [a_job("j", 4)], now_s=10.0, generation=5)
    plan = build_data_parallel_plan(GPU, 4)
    job = apply_decisions(snapshot, [StartJob("j", FOUR, plan, WHY)]).jobs["j"]
    allocation = job.allocation
    assert (job.state, job.account.first_started_at_s) == (JobState.STARTING, 10.0)
    assert (allocation.generation, allocation.target, allocation.plan) == (1, FOUR, plan)
    assert allocation.asked_at_generation == 6


def test_resize_releases_exactly_the_gpus_given_up() -> None:
    snapshot = a_snapshot(FLEET, [a_job("j", 2, 4, state=JobState.RUNNING, on=FOUR)])
    target = {"t0": (0, 1), "t1": (0,)}
    job = apply_decisions(snapshot, [ResizeJob("j", target, build_data_parallel_plan(GPU, 3), 60.0, WHY)]).jobs["j"]
    assert (job.allocation.target, job.allocation.releasing) == (target, {"t0": (2, 3)})
    assert (job.allocation.generation, job.allocation.leave_by_s, job.account.resizes) == (2, 60.0, 1)
    assert job.allocation.held_gpus == 5


def test_rank_placement_holds_until_the_next_resize() -> None:
    snapshot = a_snapshot(FLEET, [a_job("j", 2, 4, state=JobState.RUNNING, on=FOUR)])
    seats = (("t0", 1), ("t0", 0))
    resize = ResizeJob("j", {"t0": (0, 1)}, build_data_parallel_plan(GPU, 2), 60.0, WHY, seats)
    resized = apply_decisions(snapshot, [resize])
    assert resized.jobs["j"].allocation.seats == seats
    assert resized.rank_placement(resized.jobs["j"].allocation) == seats
    assert apply_decisions(resized, [PreemptJob("j", 60.0, WHY)]).jobs["j"].allocation.seats == ()


@pytest.mark.parametrize(
    ("decision", "state"),
    [
        (PreemptJob("j", 60.0, WHY), JobState.PREEMPTED),
        (SuspendRun("j", 60.0, WHY), JobState.SUSPENDED),
        (StopJob("j", 60.0, WHY), JobState.CANCELLED),
    ],
)
def test_preempted_and_stopped_jobs_release_all_gpus(
    decision: PreemptJob | SuspendRun | StopJob, state: JobState
) -> None:
    snapshot = a_snapshot(FLEET, [a_job("j", 4, state=JobState.RUNNING, on=FOUR)])
    job = apply_decisions(snapshot, [decision]).jobs["j"]
    assert (job.state, job.allocation.target, job.allocation.releasing) == (state, {}, FOUR)
    assert job.allocation.leave_by_s == 60.0
    assert job.account.preemptions == (1 if state is JobState.PREEMPTED else 0)


def test_rejected_job_fails_with_the_reason() -> None:
    job = apply_decisions(a_snapshot(FLEET, [a_job("j")]), [RejectJob("j", WHY)]).jobs["j"]
    assert (job.state, job.message) == (JobState.FAILED, "because")


def test_loan_is_offered_recalled_and_returned() -> None:
    snapshot = a_snapshot(FLEET, loans=[a_loan("i1")], now_s=5.0)
    lent = apply_decisions(snapshot, [LendNode("i0", WHY), RecallNode("i1", 300.0, WHY)])
    assert (lent.loans["i0"].state, lent.loans["i0"].pool) == (LoanState.OFFERED, "inference")
    assert (lent.loans["i1"].state, lent.loans["i1"].return_by_s) == (LoanState.RECALLED, 300.0)
    kept = apply_decisions(lent, [CancelRecall("i1", WHY)]).loans["i1"]
    assert (kept.state, kept.return_by_s) == (LoanState.ACTIVE, None)
    home = apply_decisions(lent, [ReturnNode("i1", WHY)])
    assert home.loans["i1"].state is LoanState.RETURNED
    assert archive_ended(home).ended_loans == (home.loans["i1"],)


def test_inapplicable_decision_raises() -> None:
    with pytest.raises(ValueError, match=" from queued to preempted"):
        apply_decisions(a_snapshot(FLEET, [a_job("j")]), [PreemptJob("j", 0.0, WHY)])


def test_unchanged_jobs_stay_the_same_objects() -> None:
    snapshot = a_snapshot(FLEET, [a_job("j"), a_job("k")])
    assert apply_decisions(snapshot, [RejectJob("j", WHY)]).jobs["k"] is snapshot.jobs["k"]


def test_ended_job_is_archived_after_its_last_gpu_is_free() -> None:
    ended = a_job("ended", state=JobState.SUCCEEDED)
    leaving = a_job("leaving", state=JobState.CANCELLED, releasing={"t0": (0,)})
    archived = archive_ended(a_snapshot(FLEET, [ended, leaving, a_job("live")]))
    assert archived.ended_jobs == (ended,)
    assert set(archived.snapshot.jobs) == {"leaving", "live"}
    untouched = a_snapshot(FLEET, [leaving])
    assert archive_ended(untouched).snapshot is untouched
