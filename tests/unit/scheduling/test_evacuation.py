"""Evacuation of nodes that must be vacated."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.domain.decisions import PreemptJob, ReasonCode, ResizeJob
from scheduler.domain.fleet import LoanState
from scheduler.domain.gpu_sets import Gpus
from scheduler.domain.job import Job
from scheduler.domain.job_account import OnResize
from scheduler.domain.job_state import JobState
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.tick_report import TickResult
from scheduler.scheduling.desired_state import apply_decisions
from scheduler.scheduling.policy_sets import load_policy_set
from scheduler.scheduling.scheduler import decide
from tests.builders import a_fleet, a_job, a_loan, a_snapshot

FOUR, EIGHT = (0, 1, 2, 3), tuple(range(8))
RETURN_BY_S, GRACE_S = 300.0, 60.0


def recalled(*elsewhere: Job, now_s: float = 0.0) -> Snapshot:
    """Return a rigid job of 4 GPUs on i0, which must be returned within 300 s, and jobs `elsewhere` on t0."""
    rigid = a_job("rigid", 4, state=JobState.RUNNING, on={"i0": FOUR}, steps=10**7)
    loan = a_loan("i0", LoanState.RECALLED, return_by_s=RETURN_BY_S)
    return a_snapshot(a_fleet(training=1, inference=1), [rigid, *elsewhere], [loan], now_s=now_s, full_pass_at_s=now_s)


def wide() -> Job:
    return a_job("wide", 2, 8, state=JobState.RUNNING, on={"t0": EIGHT}, steps=10**7)


def decided(snapshot: Snapshot, policy: str = "ebbtide") -> TickResult:
    return decide(snapshot, load_policy_set(policy))


def preempted(result: TickResult) -> set[str]:
    return {decision.job_id for decision in result.decisions if isinstance(decision, PreemptJob)}


def resized(result: TickResult) -> dict[str, Gpus]:
    return {decision.job_id: decision.gpus for decision in result.decisions if isinstance(decision, ResizeJob)}


def test_job_stays_while_elastic_jobs_give_up_gpus_for_it() -> None:
    result = decided(recalled(wide()))
    assert preempted(result) == set()
    assert {job_id: sum(map(len, gpus.values())) for job_id, gpus in resized(result).items()} == {"wide": 4}
    (shrink,) = result.decisions
    assert shrink.reason.code is ReasonCode.MAKES_ROOM_FOR_WAITING_JOB


def test_job_moves_once_gpus_are_free() -> None:
    before = recalled(wide())
    after = apply_decisions(before, decided(before).decisions)
    shrunk = after.jobs["wide"]
    left = replace(shrunk, allocation=replace(shrunk.allocation, releasing={}))
    result = decided(replace(after, now_s=20.0, jobs={**after.jobs, "wide": left}))
    assert resized(result) == {"rigid": {"t0": tuple(i for i in EIGHT if i not in shrunk.allocation.target["t0"])}}


@pytest.mark.parametrize("on_resize", [OnResize.CHECKPOINT, OnResize.NEVER])
@pytest.mark.parametrize("policy", ["fifo", "ebbtide"])
def test_job_moves_within_its_lowered_maximum(policy: str, on_resize: OnResize) -> None:
    """More would be illegal, and the job would stay on the node in every tick until its deadline."""
    held = a_job("held", 1, 4, state=JobState.RUNNING, on={"i0": FOUR}, steps=10**7)
    held = replace(held, spec=replace(held.spec, max_gpus=2, on_resize=on_resize))
    loan = a_loan("i0", LoanState.RECALLED, return_by_s=RETURN_BY_S)
    result = decided(a_snapshot(a_fleet(training=1, inference=1), [held], [loan], full_pass_at_s=0.0), policy)
    assert resized(result) == {"held": {"t0": (0, 1)}}


def test_job_is_preempted_while_it_can_still_save() -> None:
    """The next tick comes before the job would be too late to save."""
    assert decided(recalled(wide())).next_wake_s <= RETURN_BY_S - GRACE_S
    assert preempted(decided(recalled(wide(), now_s=RETURN_BY_S - GRACE_S))) == {"rigid"}


def test_job_is_preempted_at_once_if_no_gpus_can_be_freed() -> None:
    busy = a_job("busy", 8, state=JobState.RUNNING, on={"t0": EIGHT}, steps=10**7)
    assert preempted(decided(recalled(busy))) == {"rigid"}


def test_published_policy_sets_preempt_at_once() -> None:
    assert preempted(decided(recalled(wide()), "lyra")) == {"rigid"}


def test_job_with_more_work_is_preempted_for_several_stranded_jobs() -> None:
    """One long job is preempted in place of four short ones, which then move to its GPUs."""
    short = [a_job(f"s{at}", state=JobState.RUNNING, on={"i0": (at,)}, steps=1_000) for at in FOUR]
    busy = a_job("busy", 8, state=JobState.RUNNING, on={"t0": EIGHT}, steps=10**7)
    loan = a_loan("i0", LoanState.RECALLED, return_by_s=1_300.0)
    fleet = a_fleet(training=1, inference=1)
    before = a_snapshot(fleet, [*short, busy], [loan], now_s=1_000.0, full_pass_at_s=1_000.0)
    result = decided(before)
    (preempted_job,) = result.decisions
    assert (preempted(result), preempted_job.reason.code) == ({"busy"}, ReasonCode.OUTRANKED)
    after = apply_decisions(before, result.decisions)
    gone = after.jobs["busy"]
    left = replace(gone, allocation=replace(gone.allocation, releasing={}))
    moves = decided(replace(after, now_s=1_020.0, jobs={**after.jobs, "busy": left}))
    assert {job_id for job_id, gpus in resized(moves).items() if set(gpus) == {"t0"}} == {"s0", "s1", "s2", "s3"}
    assert preempted(moves) == set()
