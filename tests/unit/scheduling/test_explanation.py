"""Explanations: why a job runs or waits, with numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from scheduler.domain.decisions import Reason, ReasonCode
from scheduler.domain.gpu_sets import GpuShape
from scheduler.domain.job import Intent
from scheduler.domain.job_account import RunFailure
from scheduler.domain.job_state import JobState
from scheduler.domain.program import Program
from scheduler.domain.scaling_curve import build_data_parallel_plan
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling.explanation import Explanation, explain, explain_ended
from scheduler.scheduling.policy_sets import load_policy_set
from scheduler.scheduling.scheduler import decide
from tests.builders import GPU, a_curve, a_fleet, a_job, a_node, a_snapshot

FLEET = a_fleet(training=1, inference=0)
RUNNERS = [
    a_job("soon", 2, state=JobState.RUNNING, on={"t0": (0, 1)}, steps=200),
    a_job("later", 4, state=JobState.RUNNING, on={"t0": (2, 3, 4, 5)}, steps=2000),
]


def explained(snapshot: Snapshot, job_id: str) -> Explanation:
    return explain(snapshot, decide(snapshot, load_policy_set("ebbtide")).waiting, job_id)


def test_explanation_has_missing_gpus_holders_and_start() -> None:
    """2 GPUs are free, 2 more come free at 100 s, 4 at 500 s."""
    found = explained(a_snapshot(FLEET, [*RUNNERS, a_job("big", 8)]), "big")
    assert (found.needed_gpus, found.free_gpus, found.held_gpus) == (8, 2, 0)
    assert dict(found.holders) == {"later": 4, "soon": 2}
    assert found.reason is not None
    assert found.reason.code is ReasonCode.INSUFFICIENT_GPUS
    assert found.expected_start_s == 500.0
    assert found.unblocks == "6 more free GPUs, or a smaller `gpus.min`"
    assert explained(a_snapshot(FLEET, [*RUNNERS, a_job("small", 4)]), "small").expected_start_s == 100.0


def test_start_is_unknown_behind_a_job_of_unknown_length() -> None:
    endless = a_job("endless", 8, state=JobState.RUNNING, on={"t0": (0, 1, 2, 3, 4, 5, 6, 7)}, steps=0)
    assert explained(a_snapshot(FLEET, [endless, a_job("big", 8)]), "big").expected_start_s is None


def test_needed_gpus_are_the_starting_count() -> None:
    """Per GPU-second, the job does a quarter as much on 2 GPUs as on 4. 2 are free, 2 more come free at 100 s."""
    spec: dict[str, Any] = {"model": "llama-2-7b", "global_batch": 8}
    curve = a_curve({GpuShape.packed(GPU, 2, 8): 8.0, GpuShape.packed(GPU, 4, 8): 1.0})
    jobs = [*RUNNERS, a_job("big", 2, 4, steps=10, **spec), a_job("next", 3, steps=100_000)]
    found = explained(a_snapshot(FLEET, jobs, curves={jobs[2].spec.curve_key: curve}), "big")
    assert found.reason is not None
    assert (found.needed_gpus, found.reason.numbers["needed_gpus"], found.free_gpus) == (4, 4.0, 2)
    assert (found.expected_start_s, found.unblocks) == (100.0, "2 more free GPUs")


def test_job_behind_the_head_starts_once_both_fit() -> None:
    """2 GPUs are free, 2 more come free at 100 s for the head, and 4 at 500 s."""
    found = explained(a_snapshot(FLEET, [*RUNNERS, a_job("head", 4, steps=10), a_job("long", 2, steps=10_000)]), "long")
    assert found.reason is not None
    assert (found.reason.code, found.expected_start_s) == (ReasonCode.BEHIND_HEAD_OF_QUEUE, 500.0)


def test_start_after_the_end_of_the_head_is_unknown() -> None:
    found = explained(a_snapshot(FLEET, [*RUNNERS, a_job("big", 8, steps=10), a_job("long", 2, steps=10_000)]), "long")
    assert found.reason is not None
    assert (found.reason.code, found.expected_start_s) == (ReasonCode.BEHIND_HEAD_OF_QUEUE, None)
    assert found.unblocks == "the start of the job at the head of the queue"


def test_earlier_jobs_get_their_gpus_first() -> None:
    """1 GPU is free, two jobs need 3 each, 2 come free at 100 s and 4 at 500 s."""
    jobs = [*RUNNERS, a_job("extra", 1, state=JobState.RUNNING, on={"t0": (6,)}, steps=0)]
    jobs += [a_job("first", 3), a_job("second", 3)]
    waiting = {
        name: Reason(ReasonCode.INSUFFICIENT_GPUS, "so", {"needed_gpus": 3.0, "free_gpus": 1.0, "position": at})
        for at, name in ((1.0, "first"), (2.0, "second"))
    }
    found = [explain(a_snapshot(FLEET, jobs), waiting, name) for name in ("first", "second")]
    assert [explanation.expected_start_s for explanation in found] == [100.0, 500.0]
    assert [explanation.unblocks.startswith("2 more free GPUs") for explanation in found] == [True, True]
    assert "jobs before it" in found[1].unblocks


def test_only_usable_gpus_count_as_held_or_coming_free() -> None:
    pools, nodes = FLEET
    fleet = pools, {**nodes, "h0": a_node("h0", gpus=2, gpu="h100-80g")}
    fast = a_job("fast", 2, state=JobState.RUNNING, on={"h0": (0, 1)}, steps=9000)
    found = explained(a_snapshot(fleet, [*RUNNERS, fast, a_job("picky", 2, gpu="h100-80g")]), "picky")
    assert (dict(found.holders), found.expected_start_s) == ({"fast": 2}, 4500.0)


def test_released_gpus_come_free_at_the_leave_deadline() -> None:
    leaving = a_job("leaving", 8, state=JobState.PREEMPTED, releasing={"t0": tuple(range(8))})
    leaving = replace(leaving, allocation=replace(leaving.allocation, leave_by_s=60.0))
    waiting = {"big": Reason(ReasonCode.WAITING_FOR_PREEMPTED_WORKLOADS, "so", {"needed_gpus": 8.0, "position": 1.0})}
    found = explain(a_snapshot(FLEET, [leaving, a_job("big", 8)]), waiting, "big")
    assert (found.expected_start_s, dict(found.holders)) == (60.0, {"leaving": 8})


def test_starting_job_tells_where_its_setup_command_runs_and_for_how_long() -> None:
    job = a_job("j", 2, state=JobState.STARTING, on={"t0": (0, 1)})
    program = Program(archive=f"sha256:{0:064}", setup=("make",))
    job = replace(job, spec=replace(job.spec, program=program), message="node t0 runs its setup command")
    summary = explained(replace(a_snapshot(FLEET, [job]), now_s=job.state_since_s + 1234.0), "j").summary
    assert "1234 s" in summary
    assert "node t0" in summary


def test_running_job_shows_gpus_and_plan() -> None:
    found = explained(a_snapshot(FLEET, RUNNERS), "soon")
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
def test_running_job_shows_why_more_gpus_do_not_help(times_s: dict[int, float], ending: str) -> None:
    four = {"t0": (0, 1, 2, 3)}
    job = a_job("j", 2, 8, state=JobState.RUNNING, on=four, model="llama-2-7b", global_batch=8)
    curve = a_curve({GpuShape.packed(GPU, count, 8): step_s for count, step_s in times_s.items()})
    assert explained(a_snapshot(FLEET, [job], curves={job.spec.curve_key: curve}), "j").summary.endswith(ending)


def test_suspended_job_waits_for_its_owner() -> None:
    job = replace(a_job("j", state=JobState.SUSPENDED), intent=Intent.SUSPEND)
    assert explained(a_snapshot(FLEET, [job]), "j").unblocks == "a resume by its owner"


def test_planning_job_waits_for_the_solver_or_its_gpu_model() -> None:
    planning = a_job("j", state=JobState.PLANNING, model="llama-2-7b", global_batch=8)
    assert "solver" in explained(a_snapshot(FLEET, [planning]), "j").unblocks
    picky = a_job("j", state=JobState.PLANNING, model="llama-2-7b", global_batch=8, gpu="h100-80g")
    reason = explained(a_snapshot(FLEET, [picky]), "j").reason
    assert reason is not None
    assert reason.code is ReasonCode.NO_MATCHING_FLAVOR


@pytest.mark.parametrize(
    ("code", "named", "expected_start_s"),
    [
        (ReasonCode.WAITING_FOR_QUOTA, ["queue lab", "limit"], None),
        (ReasonCode.EXCEEDS_MAX_QUOTA, ["4 GPUs", "queue lab", "`gpus.min`"], None),
        (
            ReasonCode.WAITING_FOR_USER_LIMIT,
            ["ada", "queue lab", "user limit"],
            None,
        ),
        (ReasonCode.EXCEEDS_USER_LIMIT, ["user limit", "4 GPUs", "queue lab"], None),
        (
            ReasonCode.HELD_BY_MINIMUM_RUNTIME,
            ["minimum run time", "queue lab"],
            70.0,
        ),
    ],
)
def test_quota_reasons_name_what_unblocks_the_job(
    code: ReasonCode, named: list[str], expected_start_s: float | None
) -> None:
    numbers = {"held_until_s": 70.0} if code is ReasonCode.HELD_BY_MINIMUM_RUNTIME else {}
    snapshot = a_snapshot(FLEET, [*RUNNERS, replace(a_job("big", 4, queue="lab"), owner="ada")])
    found = explain(snapshot, {"big": Reason(code, "so", numbers)}, "big")
    assert all(part in found.unblocks for part in named)
    assert found.expected_start_s == expected_start_s


def test_unknown_job_raises() -> None:
    with pytest.raises(KeyError):
        explain(a_snapshot(FLEET), {}, "nobody")


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ({"model": "gpt2", "global_batch": 8}, "no plan"),
        ({"model": "gpt2", "global_batch": 8, "mixes_gpu_models": False}, "gpus.mix is never"),
        ({"model": "gpt2", "global_batch": 8, "gpu": GPU}, f"requires {GPU}"),
        ({}, "speed of a mix is unknown"),
    ],
)
def test_unused_nodes_of_another_model_have_a_reason(spec: dict[str, Any], named: str) -> None:
    pools, nodes = FLEET
    unlike = {**nodes, "u0": a_node("u0", gpu="t4")}
    job = a_job("train", 8, 16, state=JobState.RUNNING, on={"t0": (0, 1, 2, 3, 4, 5, 6, 7)}, **spec)
    summary = explain(a_snapshot((pools, unlike), [job]), {}, "train").summary
    assert "1 free node of t4" in summary
    assert named in summary


def test_unreported_progress_and_a_fixed_size_are_explained() -> None:
    """The job restarted from step 0 once, and has never reported. Its size is fixed until it does."""
    job = a_job("j", 2, 4, state=JobState.RUNNING, on={"t0": (0, 1)}, on_resize=None)
    lost = replace(job.account, first_started_at_s=0.0, lost_gpu_s=3600.0)
    summary = explained(a_snapshot(FLEET, [replace(job, account=lost)]), "j").summary
    assert "estimates" in summary
    assert "restarted from step 0, and 1.00 GPU-hours" in summary
    assert "not resized" in summary
    reported = replace(job.progress, is_reported=True, steps=9.0, checkpoint_steps=5.0)
    summary = explained(a_snapshot(FLEET, [replace(job, account=lost, progress=reported)]), "j").summary
    assert not any(part in summary for part in ("estimates", "step 0", "not resized"))


def test_last_failure_is_part_of_the_explanation() -> None:
    failure = RunFailure(5.0, "rank 0 exited with code 1")
    job = replace(a_job("j", 2), failure=failure)
    assert explained(a_snapshot(FLEET, [job]), "j").failure == failure
    assert explain_ended(replace(job, state=JobState.FAILED)).failure == failure
