"""Why a job stands where it stands, with numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.core.decide import decide
from scheduler.core.explain import Explanation, explain
from scheduler.domain.gpu_shape import GpuShape
from scheduler.domain.job import Intent
from scheduler.domain.job_state import JobState
from scheduler.domain.reason import Reason, ReasonCode
from scheduler.domain.scaling_curve import data_parallel_plan
from scheduler.domain.snapshot import Snapshot
from scheduler.policies.policy_set import policy_set
from tests.builders import GPU, a_curve, a_fleet, a_job, a_snapshot

FLEET = a_fleet(training=1, inference=0)
RUNNERS = [
    a_job("soon", 2, state=JobState.RUNNING, on={"t0": (0, 1)}, steps=200),
    a_job("later", 4, state=JobState.RUNNING, on={"t0": (2, 3, 4, 5)}, steps=2000),
]


def told(snapshot: Snapshot, job_id: str) -> Explanation:
    return explain(snapshot, decide(snapshot, policy_set("ebbtide")).waiting, job_id)


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


def test_a_running_job_tells_where_and_how() -> None:
    found = told(a_snapshot(FLEET, RUNNERS), "soon")
    assert found.summary == f"running on 2 GPUs, t0[0-1] as {data_parallel_plan(GPU, 2).summary()}"
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
    snapshot = a_snapshot(FLEET, [*RUNNERS, a_job("big", 4, queue="lab")])
    found = explain(snapshot, {"big": Reason(code, "so", numbers)}, "big")
    assert (found.unblocks, found.expected_start_s) == (unblocks, expected_start_s)


def test_an_unknown_job_is_an_error() -> None:
    with pytest.raises(KeyError):
        explain(a_snapshot(FLEET), {}, "nobody")
