"""Orders of pending jobs."""

from __future__ import annotations

from dataclasses import replace

from scheduler.domain.job import Intent, Progress
from scheduler.domain.job_account import JobAccount
from scheduler.domain.job_state import JobState
from scheduler.scheduling.policies.job_order import first_come, is_overdue, shortest_job_first, shortest_remaining
from scheduler.scheduling.policies.settings import PolicySettings
from tests.builders import a_fleet, a_job, a_snapshot

FLEET = a_fleet(training=1, inference=0)
SETTINGS = PolicySettings(ageing_s=100.0, patience_ageings=10.0)


def test_first_come_is_first_served_within_a_priority() -> None:
    jobs = [a_job("late", now_s=2.0), a_job("early", now_s=1.0), a_job("urgent", now_s=3.0, priority=5)]
    assert first_come(a_snapshot(FLEET, jobs), SETTINGS) == ("urgent", "early", "late")


def test_the_shortest_remaining_job_comes_first_within_a_priority() -> None:
    jobs = [a_job("long", steps=100), a_job("short", steps=10), a_job("urgent", steps=1000, priority=1)]
    assert shortest_remaining(a_snapshot(FLEET, jobs), SETTINGS) == ("urgent", "short", "long")


def test_ageing_shortens_a_pending_job() -> None:
    jobs = [a_job("new", steps=100, now_s=200.0), a_job("old", steps=250)]
    assert shortest_remaining(a_snapshot(FLEET, jobs, now_s=200.0), SETTINGS) == ("old", "new")


def test_overdue_jobs_come_first_in_order_of_submission() -> None:
    jobs = [a_job("new", steps=1, now_s=1500.0), a_job("second", steps=10, now_s=10.0), a_job("first", steps=10**9)]
    assert shortest_remaining(a_snapshot(FLEET, jobs, now_s=1500.0), SETTINGS) == ("first", "second", "new")


def test_waiting_before_a_preemption_counts_but_running_does_not() -> None:
    job = replace(a_job("j"), account=JobAccount(waited_s=999.0, settled_at_s=5000.0))
    assert not is_overdue(job, 5000.0, SETTINGS)
    assert is_overdue(job, 5002.0, SETTINGS)


def test_job_of_unknown_length_is_ordered_by_attained_service() -> None:
    served = replace(a_job("served", steps=0), account=JobAccount(gpu_s=50.0))
    jobs = [served, a_job("fresh", steps=0), a_job("known", steps=20)]
    assert shortest_remaining(a_snapshot(FLEET, jobs), SETTINGS) == ("fresh", "known", "served")


def test_shortest_first_uses_total_run_time_and_puts_unknown_lengths_last() -> None:
    done = replace(a_job("done", steps=300), progress=Progress(at_s=0.0, steps=290.0))
    jobs = [a_job("unknown", steps=0), done, a_job("wide", 4, steps=400), a_job("urgent", steps=999, priority=1)]
    jobs.append(a_job("estimated", steps=0, duration_estimate_s=200.0))
    order = shortest_job_first(a_snapshot(FLEET, jobs), SETTINGS)
    assert order == ("urgent", "wide", "estimated", "done", "unknown")


def test_only_queued_jobs_with_run_intent_are_ordered() -> None:
    stopping = replace(a_job("stopping"), intent=Intent.CANCEL)
    jobs = [stopping, a_job("planning", state=JobState.PLANNING), a_job("queued")]
    for order in (first_come, shortest_remaining, shortest_job_first):
        assert order(a_snapshot(FLEET, jobs), SETTINGS) == ("queued",)
