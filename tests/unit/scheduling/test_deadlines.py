"""Deadlines of leaving workers, recalled nodes and run time limits."""

from __future__ import annotations

from dataclasses import replace

from scheduler.domain.decisions import PreemptJob, ResizeJob, StartJob, StopJob, SuspendRun
from scheduler.domain.fleet import DemandReading, LoanState
from scheduler.domain.job import Intent, Job
from scheduler.domain.job_state import JobState
from scheduler.domain.lending_policy import LendingPolicy
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling.desired_state import apply_decisions
from scheduler.scheduling.policies.settings import PolicySettings
from scheduler.scheduling.policy_sets import load_policy_set
from scheduler.scheduling.scheduler import decide
from tests.builders import a_fleet, a_job, a_loan, a_snapshot

EIGHT = (0, 1, 2, 3, 4, 5, 6, 7)


def leaving(job: Job, leave_by_s: float) -> Job:
    return replace(job, allocation=replace(job.allocation, leave_by_s=leave_by_s))


def deadlines(snapshot: Snapshot, settings: PolicySettings | None = None) -> list[float]:
    kinds = ResizeJob | PreemptJob | SuspendRun | StopJob
    decisions = decide(snapshot, load_policy_set("ebbtide", settings)).decisions
    return [decision.leave_by_s for decision in decisions if isinstance(decision, kinds)]


def test_second_recall_does_not_extend_the_deadline() -> None:
    fleet = a_fleet(training=1, inference=2)
    job = a_job("j", 8, 24, state=JobState.RESIZING, on={"t0": EIGHT, "i1": EIGHT}, releasing={"i0": EIGHT})
    loans = [
        a_loan("i0", LoanState.RECALLED, return_by_s=300.0),
        a_loan("i1", LoanState.RECALLED, return_by_s=550.0),
    ]
    assert deadlines(a_snapshot(fleet, [leaving(job, 300.0)], loans, now_s=250.0)) == [300.0]


def test_suspension_does_not_extend_a_return_deadline() -> None:
    fleet = a_fleet(training=1, inference=1)
    job = a_job("j", 8, state=JobState.PREEMPTED, releasing={"i0": EIGHT})
    job = replace(leaving(job, 310.0), intent=Intent.SUSPEND)
    loan = a_loan("i0", LoanState.RECALLED, return_by_s=310.0)
    assert deadlines(a_snapshot(fleet, [job], [loan], now_s=300.0)) == [310.0]


def test_grace_on_a_lent_node_ends_before_a_recall_is_due() -> None:
    fleet = a_fleet(training=1, inference=1, lending=LendingPolicy(return_deadline_s=20.0))
    job = replace(a_job("j", 8, state=JobState.RUNNING, on={"i0": EIGHT}), intent=Intent.SUSPEND)
    snapshot = a_snapshot(fleet, [job], [a_loan("i0")], demand={"inference": DemandReading(0.0, 0.0, 0.0)})
    assert deadlines(snapshot, PolicySettings(leave_grace_s=60.0)) == [20.0]


def test_grace_covers_a_step_and_a_save() -> None:
    """Without a return deadline, a job loses no work, however long its steps and saves take."""
    fleet = a_fleet(training=1, inference=0)
    job = replace(a_job("j", 8, state=JobState.RUNNING, on={"t0": EIGHT}), intent=Intent.SUSPEND)
    step_s = job.step_time_s()
    snapshot = a_snapshot(fleet, [job])
    assert deadlines(snapshot, PolicySettings(leave_grace_s=60.0)) == [60.0]
    assert deadlines(snapshot, PolicySettings(leave_grace_s=60.0, reconfiguration_s=260.0)) == [260.0 + step_s]


def test_restart_leaves_old_workers_their_deadline() -> None:
    fleet = a_fleet(training=2, inference=0)
    job = leaving(a_job("j", 8, releasing={"t0": EIGHT}), 60.0)
    snapshot = a_snapshot(fleet, [job], now_s=10.0)
    decisions = decide(snapshot, load_policy_set("ebbtide")).decisions
    assert [type(decision) for decision in decisions] == [StartJob]
    assert apply_decisions(snapshot, decisions).jobs["j"].allocation.leave_by_s == 60.0


def test_job_stops_at_its_run_time_limit() -> None:
    fleet = a_fleet(training=1, inference=0)
    job = a_job("j", 8, state=JobState.RUNNING, on={"t0": EIGHT}, run_time_s_max=100.0)
    job = replace(job, account=replace(job.account, first_started_at_s=0.0))
    snapshot = a_snapshot(fleet, [job], now_s=50.0, full_pass_at_s=40.0)
    assert decide(snapshot, load_policy_set("ebbtide")).next_wake_s == 100.0
    late = decide(replace(snapshot, now_s=100.0), load_policy_set("ebbtide"))
    assert [type(decision) for decision in late.decisions] == [StopJob]
