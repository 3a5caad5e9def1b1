"""What the snapshot says, in the cluster's own words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from scheduler.domain.decisions import Reason, ReasonCode
from scheduler.domain.fleet import LoanState
from scheduler.domain.job import Intent, Job, Progress
from scheduler.domain.job_state import JobState
from scheduler.domain.snapshot import Snapshot
from scheduler.kubernetes.api_objects import ELASTIC_JOB, LOAN, POOL, ResourceKind
from scheduler.kubernetes.resource_sync import find_unreported_jobs, find_unreported_loans
from scheduler.kubernetes.resource_writes import Create, Delete, Patch, compute_merge_patch
from scheduler.store.protocol import FencedError
from tests.builders import a_fleet, a_job, a_loan, a_snapshot
from tests.unit.kubernetes.operating import NAMESPACE, NOW_S, Operating

FLEET = a_fleet(training=2, inference=1)
BOTH = {"t0": (0, 1), "i0": (0, 1, 2, 3)}


def with_jobs(*jobs: Job, **more: Any) -> Operating:
    return Operating(snapshot=a_snapshot(FLEET, jobs, now_s=NOW_S, **more))


def a_running_job(job_id: str = "llama-abc123", **more: Any) -> Job:
    """On a node of training's and a lent one, 900 of 3600 steps done, one each second."""
    job = a_job(job_id, 2, 8, state=JobState.RUNNING, on=BOTH, now_s=NOW_S, **more)
    assert job.allocation.plan is not None
    plan = replace(job.allocation.plan, iteration_time_s=1.0)
    progress = Progress(at_s=NOW_S, steps=900.0, loss=2.5, samples_per_s=640.0)
    return replace(job, allocation=replace(job.allocation, plan=plan), progress=progress)


def status_of(rig: Operating, name: str = "llama-abc123", namespace: str = NAMESPACE) -> dict[str, Any]:
    status: dict[str, Any] = rig.server.get(ELASTIC_JOB, name, namespace)["status"]
    return status


def claimed(status: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {each["type"]: (each["status"], each["reason"]) for each in status["conditions"]}


def test_a_job_from_http_gets_a_resource_of_its_id_that_asks_for_the_same() -> None:
    rig = with_jobs(a_running_job(), a_job("other-1", namespace="team-a"))
    rig.publish()
    made = rig.server.get(ELASTIC_JOB, "llama-abc123", NAMESPACE)
    assert made["metadata"]["labels"] == {
        "ebbtide.dev/job": "llama-abc123",
        "app.kubernetes.io/managed-by": "ebbtide",
    }
    assert made["metadata"]["annotations"] == {"ebbtide.dev/epoch": "3", "ebbtide.dev/origin": "api"}
    assert made["spec"]["gpus"] == {"min": 2, "max": 8}
    rig.server.get(ELASTIC_JOB, "other-1", "team-a")
    assert rig.take().commands == ()
    assert rig.steps() == ()


def test_the_status_tells_where_the_job_stands() -> None:
    rig = with_jobs(a_running_job(), loans=[a_loan("i0")])
    rig.publish()
    status = status_of(rig)
    columns = {name: status[name] for name in ("jobId", "phase", "gpus", "selector")}
    assert columns == {
        "jobId": "llama-abc123",
        "phase": "Running",
        "gpus": "6/8",
        "selector": "ebbtide.dev/job=llama-abc123",
    }
    assert status["allocation"] == {
        "gpus": 6,
        "generation": 1,
        "nodes": [{"name": "i0", "gpus": 4, "lent": True}, {"name": "t0", "gpus": 2, "lent": False}],
    }
    assert status["progress"] == {
        "percentage": 25,
        "step": 900,
        "steps": 3600,
        "loss": 2.5,
        "samplesPerSecond": 640.0,
        "estimatedRemainingSeconds": 2700,
    }
    assert status["plan"]["stages"][0]["gpus"] == 6
    assert claimed(status) == {
        "Accepted": ("True", "Accepted"),
        "Scheduled": ("True", "Placed"),
        "Suspended": ("False", "NotAsked"),
        "CheckpointsShared": ("False", "InPodsOnly"),
    }


def test_a_waiting_job_says_why_it_waits() -> None:
    rig = with_jobs(a_job("llama-abc123", 4))
    reason = Reason(ReasonCode.INSUFFICIENT_GPUS, "needs 4 GPUs, 2 are free")
    rig.publish(waiting={"llama-abc123": reason})
    status = status_of(rig)
    assert (status["phase"], status["reason"], status["message"]) == ("Queued", "InsufficientGpus", reason.detail)
    assert claimed(status)["Scheduled"] == ("False", "InsufficientGpus")


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_figure_that_is_no_number_is_left_out(loss: float) -> None:
    job = a_running_job()
    rig = with_jobs(replace(job, progress=replace(job.progress, loss=loss)))
    rig.publish()
    assert "loss" not in status_of(rig)["progress"]


def test_progress_is_written_once_a_minute_and_a_change_of_phase_at_once() -> None:
    rig = with_jobs(a_running_job())
    rig.publish()
    rig.wait(59.0)
    assert rig.steps() == ()
    rig.wait(1.0)
    rig.publish()
    assert status_of(rig)["progress"]["step"] == 960
    rig.wait(1.0)
    job = rig.snapshot.jobs["llama-abc123"]
    rig.snapshot = replace(rig.snapshot, jobs={job.id: job.transition_to(JobState.RESIZING, rig.snapshot.now_s)})
    rig.publish()
    assert (status_of(rig)["phase"], status_of(rig)["progress"]["step"]) == ("Resizing", 961)


def test_a_change_over_http_is_written_into_the_resource_and_not_taken_for_its_owners_wish() -> None:
    rig = with_jobs(a_running_job())
    rig.publish()
    job = rig.snapshot.jobs["llama-abc123"]
    scaled = replace(job, spec=replace(job.spec, max_gpus=16), intent=Intent.SUSPEND)
    rig.snapshot = replace(rig.snapshot, jobs={job.id: scaled})
    ((change, status),) = rig.steps()
    assert isinstance(change, Patch)
    assert change.resource_version
    assert change.change["spec"] == {"gpus": {"min": 2, "max": 16}, "suspend": True}
    rig.publish()
    assert isinstance(status, Patch)
    assert status_of(rig)["observedGeneration"] == 2
    assert rig.take().commands == ()
    assert rig.steps() == ()


def test_a_job_that_has_ended_says_how_and_its_resource_goes_after_a_day_if_it_came_over_http() -> None:
    rig = with_jobs(a_running_job())
    rig.publish()
    job = rig.snapshot.jobs["llama-abc123"]
    ended = replace(job, state=JobState.FAILED, message="died too often", state_since_s=NOW_S)
    rig.snapshot = replace(rig.snapshot, jobs={})
    assert find_unreported_jobs(rig.server.resources(), rig.snapshot) == ("llama-abc123",)
    rig.publish(ended_jobs={ended.id: ended})
    status = status_of(rig)
    assert (status["phase"], status["message"], claimed(status)["Failed"]) == (
        "Failed",
        "died too often",
        ("True", "Failed"),
    )
    assert find_unreported_jobs(rig.server.resources(), rig.snapshot) == ()
    rig.wait(86_399.0)
    assert rig.steps() == ()
    rig.wait(1.0)
    ((step,),) = rig.steps()
    assert isinstance(step, Delete)
    rig.publish()
    assert status_of(rig)["phase"] == "Failed"  # its finalizer holds it
    rig.publish()
    assert rig.server.resources().elastic_jobs == ()


def test_a_job_from_http_is_cancelled_by_deleting_its_resource_and_gets_no_other() -> None:
    rig = with_jobs(a_running_job())
    rig.publish()
    rig.server.ask_delete(ELASTIC_JOB, "llama-abc123", NAMESPACE)
    assert rig.round() == ["CancelJob"]
    assert rig.snapshot.jobs["llama-abc123"].intent is Intent.CANCEL
    assert status_of(rig)["reason"] == "Cancelling"
    rig.snapshot = replace(rig.snapshot, jobs={})
    rig.publish()
    assert rig.server.resources().elastic_jobs == ()
    assert rig.steps() == ()


def test_each_live_loan_has_a_resource_that_tells_its_story_and_stays_an_hour_after_its_end() -> None:
    loan = a_loan("i0")
    rig = with_jobs(a_running_job(), loans=[loan])
    rig.publish()
    told = rig.server.get(LOAN, loan.id)
    assert told["spec"] == {"node": "i0", "pool": "inference"}
    assert (told["status"]["state"], told["status"]["usedGpus"], told["status"]["jobs"]) == (
        "active",
        4,
        "llama-abc123",
    )
    recalled = loan.transition_to(LoanState.RECALLED, NOW_S, return_by_s=NOW_S + 300.0)
    rig.snapshot = replace(rig.snapshot, loans={"i0": recalled})
    rig.publish()
    assert rig.server.get(LOAN, loan.id)["status"]["returnBy"] == "2026-11-22T06:15:00Z"
    home = recalled.transition_to(LoanState.RETURNED, NOW_S + 60.0)
    rig.snapshot = replace(rig.snapshot, loans={}, jobs={})
    rig.server.objects.pop(("ElasticJob", NAMESPACE, "llama-abc123"))
    assert find_unreported_loans(rig.server.resources(), rig.snapshot) == (loan.id,)
    rig.publish(ended_loans={loan.id: home})
    status = rig.server.get(LOAN, loan.id)["status"]
    assert (status["state"], status["usedGpus"], "returnBy" in status) == ("returned", 0, False)
    assert find_unreported_loans(rig.server.resources(), rig.snapshot) == ()
    rig.wait(3659.0)
    assert rig.steps() == ()
    rig.wait(1.0)
    rig.publish()
    assert rig.server.resources().loans == ()


def test_a_loan_that_nobody_knows_any_more_goes_at_once() -> None:
    rig = with_jobs(loans=[a_loan("i0")])
    rig.publish()
    rig.snapshot = replace(rig.snapshot, loans={})
    rig.publish()
    assert rig.server.resources().loans == ()


def in_a_later_epoch(kind: ResourceKind) -> Operating:
    rig = with_jobs(a_running_job(), loans=[a_loan("i0")])
    rig.server.add(POOL, "gpus", {"kind": "training", "nodeSelector": {"a": "b"}})
    rig.publish()
    for key, item in rig.server.objects.items():
        if key[0] == kind.name:
            item["metadata"]["annotations"]["ebbtide.dev/epoch"] = "4"
            del item["status"]
    return rig


@pytest.mark.parametrize("kind", [LOAN, POOL])
def test_nothing_is_written_over_a_later_leader(kind: ResourceKind) -> None:
    with pytest.raises(FencedError, match="epoch 4, this leader's is 3"):
        in_a_later_epoch(kind).steps()


def test_an_epoch_on_a_resource_whose_user_may_write_it_stops_nobody() -> None:
    rig = in_a_later_epoch(ELASTIC_JOB)
    assert len(rig.steps()) == 1
    rig.server.get(ELASTIC_JOB, "llama-abc123", NAMESPACE)["metadata"]["annotations"]["ebbtide.dev/epoch"] = "9" * 5000
    assert len(rig.steps()) == 1


def test_an_empty_world_needs_nothing() -> None:
    assert Operating(snapshot=Snapshot(now_s=NOW_S)).steps() == ()


def test_a_new_resource_and_its_status_are_one_objects_steps() -> None:
    ((made, status),) = with_jobs(a_running_job()).steps()
    assert isinstance(made, Create)
    assert isinstance(status, Patch)
    assert status.status


def test_a_merge_patch_holds_what_differs_alone() -> None:
    before = {"a": 1, "b": {"c": 1, "d": [1]}, "gone": 2}
    assert compute_merge_patch(before, {"a": 1, "b": {"c": 2, "d": [1]}}) == {"b": {"c": 2}, "gone": None}
    assert compute_merge_patch(before, before) == {}
    assert compute_merge_patch("nonsense", {"a": 1}) == {"a": 1}
