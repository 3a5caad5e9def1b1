"""A waiting job with far less to do takes the place of a running one, seldom and never for nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from scheduler.core.apply import apply
from scheduler.core.decide import decide
from scheduler.domain.decision import PreemptJob, StartJob
from scheduler.domain.job import Job
from scheduler.domain.job_state import JobState
from scheduler.domain.reason import ReasonCode
from scheduler.domain.snapshot import Snapshot, Switches
from scheduler.domain.tick_report import TickResult
from scheduler.policies.policy_set import policy_set
from scheduler.policies.settings import PolicySettings
from tests.builders import a_fleet, a_job, a_snapshot

EIGHT = tuple(range(8))
NOW_S = 10_000.0
SHORT_STEPS = 8_000
"""1,000 s on 8 GPUs."""
RESTART_STEPS = 4 * 30 * 8
"""What four times a restart of 30 s on 8 GPUs is worth."""


def long(steps: int = 5 * SHORT_STEPS, **more: Any) -> Job:
    """So many steps are left after it has run from 0 on."""
    return a_job("long", 8, state=JobState.RUNNING, on={"t0": EIGHT}, steps=int(NOW_S) * 8 + steps, **more)


def short(steps: int = SHORT_STEPS, **more: Any) -> Job:
    return a_job("short", 8, now_s=NOW_S, steps=steps, **more)


def seen(*jobs: Job, **more: Any) -> Snapshot:
    return a_snapshot(a_fleet(training=1, inference=0), jobs, now_s=NOW_S, **more)


def decided(snapshot: Snapshot, name: str = "ebbtide", **settings: Any) -> TickResult:
    return decide(snapshot, policy_set(name, PolicySettings(**settings)))


def preempted(result: TickResult) -> dict[str, str]:
    return {each.job_id: each.reason.detail for each in result.decisions if isinstance(each, PreemptJob)}


def test_it_gets_the_gpus_of_one_with_several_times_as_much_to_do() -> None:
    before = seen(long(), short())
    result = decided(before)
    assert preempted(result) == {"long": "short with far less to do gets its GPUs"}
    assert [decision.reason.code for decision in result.decisions] == [ReasonCode.OUTRANKED]
    after = apply(before, result.decisions)
    again = decided(replace(after, now_s=NOW_S + 1.0))
    assert not again.decisions, "it is on its way out already"
    assert again.waiting["short"].code is ReasonCode.WAITING_FOR_RELEASE
    gone = after.jobs["long"]
    left = replace(gone, state=JobState.QUEUED, allocation=replace(gone.allocation, releasing={}))
    (started,) = decided(replace(after, now_s=NOW_S + 30.0, jobs={**after.jobs, "long": left})).decisions
    assert isinstance(started, StartJob)
    assert started.job_id == "short"


def test_the_restart_is_in_the_price() -> None:
    least = 4 * SHORT_STEPS + RESTART_STEPS
    assert preempted(decided(seen(long(least), short())))
    assert not preempted(decided(seen(long(least - 8), short())))
    assert not preempted(decided(seen(long(least), short()), reconfiguration_s=60.0))


def test_who_was_stopped_before_needs_to_have_more_to_do() -> None:
    def stopped(steps: int) -> Job:
        job = long(steps)
        return replace(job, account=replace(job.account, preemptions=1))

    assert not preempted(decided(seen(stopped(2 * 4 * SHORT_STEPS), short())))
    assert preempted(decided(seen(stopped(2 * (4 * SHORT_STEPS + RESTART_STEPS)), short())))


@pytest.mark.parametrize(
    ("running", "waiting"),
    [
        (long(deadline_s=50_000.0), short()),
        (long(fungible=False), short()),
        (long(priority=1), short()),
        (long(queue="research"), short()),
        (long(), short(steps=0)),
        (replace(long(), submitted_at_s=0.0, account=replace(long().account, waited_s=13 * 3_600.0)), short()),
        (replace(long(), account=replace(long().account, first_started_at_s=NOW_S - 60.0)), short()),
    ],
    ids=["deadline", "not to be moved", "priority", "queue", "unknown length", "waited long", "just begun"],
)
def test_nobody_gives_way_who_has_a_reason_to_stay(running: Job, waiting: Job) -> None:
    assert preempted(decided(seen(long(), short()))), "but for that, it would"
    assert not preempted(decided(seen(running, waiting)))


def test_nobody_is_stopped_while_an_operator_has_frozen_resizes() -> None:
    assert not preempted(decided(seen(long(), short(), switches=Switches(resizes_frozen=True))))


def test_nobody_is_stopped_for_what_elastic_jobs_can_give() -> None:
    elastic = a_job("elastic", 4, 8, state=JobState.RUNNING, on={"t1": EIGHT}, steps=10**6)
    fleet = a_fleet(training=2, inference=0)
    result = decided(a_snapshot(fleet, [long(), elastic, a_job("narrow", 2, now_s=NOW_S, steps=100)], now_s=NOW_S))
    assert not preempted(result)
    assert result.waiting["narrow"].code is ReasonCode.WAITING_FOR_RELEASE


def test_published_sets_and_fifo_do_not_overtake() -> None:
    for name in ("fifo", "sjf", "opportunistic", "lyra"):
        assert not preempted(decided(seen(long(), short()), name)), name
