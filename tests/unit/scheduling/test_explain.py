"""Why a job stands where it stands, with numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from scheduler.domain.decisions import Reason, ReasonCode
from scheduler.domain.gpu_sets import GpuShape
from scheduler.domain.job import Intent
from scheduler.domain.job_state import JobState
from scheduler.domain.scaling_curve import build_data_parallel_plan
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling.explanation import Explanation, explain
from scheduler.scheduling.policies.policy_set import load_policy_set
from scheduler.scheduling.scheduler import decide
from tests.builders import GPU, a_curve, a_fleet, a_job, a_node, a_snapshot

FLEET = a_fleet(training=1, inference=0)
RUNNERS = [
    a_job("soon", 2, state=JobState.RUNNING, on={"t0": (0, 1)}, steps=200),
    a_job("later", 4, state=JobState.RUNNING, on={"t0": (2, 3, 4, 5)}, steps=2000),
]


def told(snapshot: Snapshot, job_id: str) -> Explanation:
    return explain(snapshot, decide(snapshot, load_policy_set("ebbtide")).waiting, job_id)


def test_a_waiting_job_is_told_what_is_missing_who_has_it_and_when_it_comes_free() -> None:
    """Two are free. Two more come at 100 s, four at 500 s."""
    found = told(a_snapshot(FLEET, [*RUNNERS, a_job("big", 8)]), "big")
    assert (found.needed_gpus, found.free_gpus, found.held_gpus) == (8, 2, 0)
    assert dict(found.holders) == {"later": 4, "soon": 2}
    assert found.reason is not None
    assert found.reason.code is ReasonCode.INSUFFICIENT_GPUS
    assert found.expected_start_s == 500.0
    assert found.unblocks == "6 more free GPUs, or a smaller gpus.min"
    assert told(a_snapshot(FLEET, [*RUNNERS, a_job("small", 4)]), "small").expected_start_s == 100.0


def test_nobody_promises_a_start_that_depends_on_a_job_of_unknown_length() -> None:
    endless = a_job("endless", 8, state=JobState.RUNNING, on={"t0": (0, 1, 2, 3, 4, 5, 6, 7)}, steps=0)
    assert told(a_snapshot(FLEET, [endless, a_job("big", 8)]), "big").expected_start_s is None


def test_a_job_is_told_what_it_starts_on_not_the_least_that_any_plan_works_on() -> None:
    """On 2 GPUs it does a quarter of what it does on 4, a GPU and second. 2 are free; 2 more come at 100 s."""
    spec: dict[str, Any] = {"model": "llama-2-7b", "global_batch": 8}
    curve = a_curve({GpuShape.packed(GPU, 2, 8): 8.0, GpuShape.packed(GPU, 4, 8): 1.0})
    jobs = [*RUNNERS, a_job("big", 2, 4, steps=10, **spec), a_job("next", 3, steps=100_000)]
    found = told(a_snapshot(FLEET, jobs, curves={jobs[2].spec.curve_key: curve}), "big")
    assert found.reason is not None
    assert (found.needed_gpus, found.reason.numbers["needed_gpus"], found.free_gpus) == (4, 4.0, 2)
    assert (found.expected_start_s, found.unblocks) == (100.0, "2 more free GPUs")


def test_a_job_that_would_delay_the_head_starts_once_there_is_room_for_both() -> None:
    """Two are free, and two more come at 100 s, for the head. Four come at 500 s."""
    found = told(a_snapshot(FLEET, [*RUNNERS, a_job("head", 4, steps=10), a_job("long", 2, steps=10_000)]), "long")
    assert found.reason is not None
    assert (found.reason.code, found.expected_start_s) == (ReasonCode.BEHIND_HEAD_OF_QUEUE, 500.0)


def test_a_job_that_fits_only_after_the_head_has_ended_is_not_promised_a_start() -> None:
    found = told(a_snapshot(FLEET, [*RUNNERS, a_job("big", 8, steps=10), a_job("long", 2, steps=10_000)]), "long")
    assert found.reason is not None
    assert (found.reason.code, found.expected_start_s) == (ReasonCode.BEHIND_HEAD_OF_QUEUE, None)
    assert found.unblocks == "the start of the job at the head of the queue"


def test_those_before_a_job_in_line_take_their_gpus_first() -> None:
    """One is free: 3 and 3 are wanted, 2 come at 100 s and 4 at 500 s."""
    jobs = [*RUNNERS, a_job("extra", 1, state=JobState.RUNNING, on={"t0": (6,)}, steps=0)]
    jobs += [a_job("first", 3), a_job("second", 3)]
    waiting = {
        name: Reason(ReasonCode.INSUFFICIENT_GPUS, "so", {"needed_gpus": 3.0, "free_gpus": 1.0, "position": at})
        for at, name in ((1.0, "first"), (2.0, "second"))
    }
    found = [explain(a_snapshot(FLEET, jobs), waiting, name) for name in ("first", "second")]
    assert [one.expected_start_s for one in found] == [100.0, 500.0]
    assert found[0].unblocks == "2 more free GPUs, or a smaller gpus.min"
    assert found[1].unblocks == "2 more free GPUs beside those that the jobs before it take, or a smaller gpus.min"


def test_only_gpus_of_a_kind_that_the_job_may_use_count_as_held_and_as_coming_free() -> None:
    pools, nodes = FLEET
    fleet = pools, {**nodes, "h0": a_node("h0", gpus=2, gpu="h100-80g")}
    fast = a_job("fast", 2, state=JobState.RUNNING, on={"h0": (0, 1)}, steps=9000)
    found = told(a_snapshot(fleet, [*RUNNERS, fast, a_job("picky", 2, gpu="h100-80g")]), "picky")
    assert (dict(found.holders), found.expected_start_s) == ({"fast": 2}, 4500.0)


def test_gpus_that_are_being_given_up_come_free_when_their_workers_have_to_be_gone() -> None:
    leaving = a_job("leaving", 8, state=JobState.PREEMPTED, releasing={"t0": tuple(range(8))})
    leaving = replace(leaving, allocation=replace(leaving.allocation, leave_by_s=60.0))
    waiting = {"big": Reason(ReasonCode.WAITING_FOR_PREEMPTED_WORKLOADS, "so", {"needed_gpus": 8.0, "position": 1.0})}
    found = explain(a_snapshot(FLEET, [leaving, a_job("big", 8)]), waiting, "big")
    assert (found.expected_start_s, dict(found.holders)) == (60.0, {"leaving": 8})


def test_a_running_job_tells_where_and_how() -> None:
    found = told(a_snapshot(FLEET, RUNNERS), "soon")
    assert found.summary == f"running on 2 GPUs, t0[0-1] as {build_data_parallel_plan(GPU, 2).summarize()}"
    assert (found.reason, found.expected_start_s, found.unblocks) == (None, None, "")


@pytest.mark.parametrize(
    ("times_s", "ending"),
    [
        ({4: 4.0, 6: 5.0, 8: 2.0}, "; 6 GPUs would be slower than 4"),
        ({4: 4.0, 6: 4.0}, "; 6 GPUs would be no faster than 4"),
        ({4: 4.0, 8: 2.0}, "1 micro-batch"),
    ],
)
def test_a_running_job_tells_why_more_gpus_would_not_help(times_s: dict[int, float], ending: str) -> None:
    four = {"t0": (0, 1, 2, 3)}
    job = a_job("j", 2, 8, state=JobState.RUNNING, on=four, model="llama-2-7b", global_batch=8)
    curve = a_curve({GpuShape.packed(GPU, count, 8): step_s for count, step_s in times_s.items()})
    assert told(a_snapshot(FLEET, [job], curves={job.spec.curve_key: curve}), "j").summary.endswith(ending)


def test_a_suspended_job_waits_for_its_owner() -> None:
    job = replace(a_job("j", state=JobState.SUSPENDED), intent=Intent.SUSPEND)
    assert told(a_snapshot(FLEET, [job]), "j").unblocks == "resume it"


def test_a_job_in_planning_waits_for_the_solver_or_for_a_node_of_its_model() -> None:
    planning = a_job("j", state=JobState.PLANNING, model="llama-2-7b", global_batch=8)
    assert told(a_snapshot(FLEET, [planning]), "j").unblocks == "the solver's answer for its shape"
    picky = a_job("j", state=JobState.PLANNING, model="llama-2-7b", global_batch=8, gpu="h100-80g")
    reason = told(a_snapshot(FLEET, [picky]), "j").reason
    assert reason is not None
    assert (reason.code, reason.detail) == (ReasonCode.NO_MATCHING_FLAVOR, "no node has h100-80g")


@pytest.mark.parametrize(
    ("code", "unblocks", "expected_start_s"),
    [
        (ReasonCode.WAITING_FOR_QUOTA, "the end of other jobs of queue lab, or a higher limit for it", None),
        (ReasonCode.EXCEEDS_MAX_QUOTA, "a limit of 4 GPUs for queue lab, or a smaller gpus.min", None),
        (
            ReasonCode.WAITING_FOR_USER_LIMIT,
            "the end of other jobs of ada in queue lab, or a higher user limit for it",
            None,
        ),
        (ReasonCode.EXCEEDS_USER_LIMIT, "a user limit of 4 GPUs for queue lab, or a smaller gpus.min", None),
        (
            ReasonCode.HELD_BY_MINIMUM_RUNTIME,
            "the end of the minimum run time of those who borrow GPUs of queue lab",
            70.0,
        ),
    ],
)
def test_a_job_that_waits_for_its_quota_is_told_what_would_change_that(
    code: ReasonCode, unblocks: str, expected_start_s: float | None
) -> None:
    numbers = {"held_until_s": 70.0} if code is ReasonCode.HELD_BY_MINIMUM_RUNTIME else {}
    snapshot = a_snapshot(FLEET, [*RUNNERS, replace(a_job("big", 4, queue="lab"), owner="ada")])
    found = explain(snapshot, {"big": Reason(code, "so", numbers)}, "big")
    assert (found.unblocks, found.expected_start_s) == (unblocks, expected_start_s)


def test_an_unknown_job_is_an_error() -> None:
    with pytest.raises(KeyError):
        explain(a_snapshot(FLEET), {}, "nobody")
