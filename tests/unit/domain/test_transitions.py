"""Transitions of jobs and loans."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TypeVar

import pytest

from scheduler.domain.fleet import LOAN_TRANSITIONS, LoanState
from scheduler.domain.job_state import ENDED_STATES, JOB_TRANSITIONS, PLACED_STATES, WAITING_STATES, JobState
from tests.builders import a_job, a_loan

State = TypeVar("State", JobState, LoanState)
LOANS_ENDED = {LoanState.RETURNED, LoanState.LOST, LoanState.VETOED}


def reachable(transitions: Iterable[tuple[State, State]], start: State) -> set[State]:
    pairs, found = list(transitions), {start}
    while more := {after for before, after in pairs if before in found} - found:
        found |= more
    return found


def test_ended_states_are_final() -> None:
    assert ENDED_STATES.isdisjoint(before for before, _ in JOB_TRANSITIONS)
    assert LOANS_ENDED.isdisjoint(before for before, _ in LOAN_TRANSITIONS)


def test_every_state_is_reachable() -> None:
    assert reachable(JOB_TRANSITIONS, JobState.SUBMITTED) == set(JobState)
    assert reachable(LOAN_TRANSITIONS, LoanState.PROPOSED) == set(LoanState)


@pytest.mark.parametrize("state", sorted(set(JobState) - ENDED_STATES))
def test_live_job_can_be_cancelled_and_can_succeed(state: JobState) -> None:
    assert (state, JobState.CANCELLED) in JOB_TRANSITIONS
    assert JobState.SUCCEEDED in reachable(JOB_TRANSITIONS, state)


@pytest.mark.parametrize("state", sorted(set(JobState) - ENDED_STATES - {JobState.SUSPENDED}))
def test_live_job_can_be_suspended(state: JobState) -> None:
    assert (state, JobState.SUSPENDED) in JOB_TRANSITIONS


@pytest.mark.parametrize("state", sorted(PLACED_STATES))
def test_placed_job_can_lose_its_gpus_at_any_time(state: JobState) -> None:
    assert {(state, JobState.PREEMPTED), (state, JobState.QUEUED), (state, JobState.RESIZING)} <= set(JOB_TRANSITIONS)


def test_every_transition_has_a_reason() -> None:
    assert all(JOB_TRANSITIONS.values())
    assert all(LOAN_TRANSITIONS.values())


def test_groups_of_states_are_disjoint() -> None:
    assert not ENDED_STATES & PLACED_STATES
    assert not ENDED_STATES & WAITING_STATES
    assert not PLACED_STATES & WAITING_STATES


def test_unknown_transition_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"job j: .* from queued to running"):
        a_job("j").transition_to(JobState.RUNNING, 0.0)
    with pytest.raises(ValueError, match=" from active to offered"):
        a_loan("i0").transition_to(LoanState.OFFERED, 0.0)


def test_transition_accounts_for_the_time_in_the_old_state() -> None:
    queued = a_job("j").transition_to(JobState.STARTING, 50.0)
    assert (queued.account.waited_s, queued.state_since_s) == (50.0, 50.0)
    running = a_job("j", 2, state=JobState.RUNNING, on={"t0": (0, 1)}).transition_to(JobState.PREEMPTED, 10.0)
    assert (running.progress.steps, running.account.gpu_s, running.account.waited_s) == (20.0, 20.0, 0.0)


def test_progress_stops_at_the_end_and_while_the_job_does_not_run() -> None:
    job = a_job("j", 2, state=JobState.RUNNING, on={"t0": (0, 1)}, steps=100)
    assert (job.steps_at(10.0), job.steps_at(1000.0), job.remaining_steps(10.0)) == (20.0, 100.0, 80.0)
    assert replace(job, state=JobState.RESIZING).steps_at(1000.0) == 0.0
    assert a_job("j", steps=0).remaining_steps(5.0) is None


def test_loan_keeps_the_times_of_lending_and_recall() -> None:
    offered = replace(a_loan("i0", LoanState.OFFERED), offered_at_s=1.0)
    lent = offered.transition_to(LoanState.ACTIVE, 2.0)
    kept = lent.transition_to(LoanState.RECALLED, 3.0).transition_to(LoanState.ACTIVE, 4.0)
    assert (kept.lent_at_s, kept.recalled_at_s) == (2.0, None)
    returned = kept.transition_to(LoanState.RECALLED, 5.0).transition_to(LoanState.RETURNED, 6.0)
    assert (returned.lent_at_s, returned.recalled_at_s, returned.state_since_s) == (2.0, 5.0, 6.0)
