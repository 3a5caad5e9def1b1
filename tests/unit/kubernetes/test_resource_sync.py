"""Writes that make custom resources match the snapshot."""

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
from tests.unit.kubernetes.operator_rig import NAMESPACE, NOW_S, OperatorRig

FLEET = a_fleet(training=2, inference=1)
BOTH = {"t0": (0, 1), "i0": (0, 1, 2, 3)}


def with_jobs(*jobs: Job, **more: Any) -> OperatorRig:
    return OperatorRig(snapshot=a_snapshot(FLEET, jobs, now_s=NOW_S, **more))


def build_running_job(job_id: str = "llama-abc123", **more: Any) -> Job:
    """Return a job on an owned and a lent node, with 900 of 3600 steps completed at one step per second."""
    job = a_job(job_id, 2, 8, state=JobState.RUNNING, on=BOTH, now_s=NOW_S, **more)
    assert job.allocation.plan is not None
    plan = replace(job.allocation.plan, iteration_time_s=1.0)
    progress = Progress(at_s=NOW_S, steps=900.0, loss=2.5, samples_per_s=640.0)
    return replace(job, allocation=replace(job.allocation, plan=plan), progress=progress)


def status_of(rig: OperatorRig, name: str = "llama-abc123", namespace: str = NAMESPACE) -> dict[str, Any]:
    status: dict[str, Any] = rig.server.get(ELASTIC_JOB, name, namespace)["status"]
    return status


def conditions_by_type(status: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {each["type"]: (each["status"], each["reason"]) for each in status["conditions"]}


def test_http_job_gets_an_equal_resource() -> None:
    rig = with_jobs(build_running_job(), a_job("other-1", namespace="team-a"))
    rig.write()
    created = rig.server.get(ELASTIC_JOB, "llama-abc123", NAMESPACE)
    assert created["metadata"]["labels"] == {
        "ebbtide.dev/job": "llama-abc123",
        "app.kubernetes.io/managed-by": "ebbtide",
    }
    assert created["metadata"]["annotations"] == {"ebbtide.dev/epoch": "3", "ebbtide.dev/origin": "api"}
    assert created["spec"]["gpus"] == {"min": 2, "max": 8}
    rig.server.get(ELASTIC_JOB, "other-1", "team-a")
    assert rig.compute_commands().commands == ()
    assert rig.compute_writes() == ()


def test_status_of_a_running_job() -> None:
    rig = with_jobs(build_running_job(), loans=[a_loan("i0")])
    rig.write()
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
    assert conditions_by_type(status) == {
        "Accepted": ("True", "Accepted"),
        "Scheduled": ("True", "Placed"),
        "Suspended": ("False", "NotAsked"),
        "CheckpointsShared": ("False", "InPodsOnly"),
    }


def test_status_of_a_pending_job_has_its_reason() -> None:
    rig = with_jobs(a_job("llama-abc123", 4))
    reason = Reason(ReasonCode.INSUFFICIENT_GPUS, "needs 4 GPUs, 2 are free")
    rig.write(waiting_reasons={"llama-abc123": reason})
    status = status_of(rig)
    assert (status["phase"], status["reason"], status["message"]) == ("Queued", "InsufficientGpus", reason.detail)
    assert conditions_by_type(status)["Scheduled"] == ("False", "InsufficientGpus")


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_non_finite_values_are_omitted(loss: float) -> None:
    job = build_running_job()
    rig = with_jobs(replace(job, progress=replace(job.progress, loss=loss)))
    rig.write()
    assert "loss" not in status_of(rig)["progress"]


def test_progress_is_written_every_minute_and_phase_changes_at_once() -> None:
    rig = with_jobs(build_running_job())
    rig.write()
    rig.advance(59.0)
    assert rig.compute_writes() == ()
    rig.advance(1.0)
    rig.write()
    assert status_of(rig)["progress"]["step"] == 960
    rig.advance(1.0)
    job = rig.snapshot.jobs["llama-abc123"]
    rig.snapshot = replace(rig.snapshot, jobs={job.id: job.transition_to(JobState.RESIZING, rig.snapshot.now_s)})
    rig.write()
    assert (status_of(rig)["phase"], status_of(rig)["progress"]["step"]) == ("Resizing", 961)


def test_http_change_updates_the_spec_without_an_echo() -> None:
    rig = with_jobs(build_running_job())
    rig.write()
    job = rig.snapshot.jobs["llama-abc123"]
    scaled = replace(job, spec=replace(job.spec, max_gpus=16), intent=Intent.SUSPEND)
    rig.snapshot = replace(rig.snapshot, jobs={job.id: scaled})
    ((change, status),) = rig.compute_writes()
    assert isinstance(change, Patch)
    assert change.resource_version
    assert change.change["spec"] == {"gpus": {"min": 2, "max": 16}, "suspend": True}
    rig.write()
    assert isinstance(status, Patch)
    assert status_of(rig)["observedGeneration"] == 2
    assert rig.compute_commands().commands == ()
    assert rig.compute_writes() == ()


def test_resource_of_an_ended_http_job_is_deleted_after_a_day() -> None:
    rig = with_jobs(build_running_job())
    rig.write()
    job = rig.snapshot.jobs["llama-abc123"]
    ended = replace(job, state=JobState.FAILED, message="died too often", state_since_s=NOW_S)
    rig.snapshot = replace(rig.snapshot, jobs={})
    assert find_unreported_jobs(rig.server.resources(), rig.snapshot) == ("llama-abc123",)
    rig.write(ended_jobs={ended.id: ended})
    status = status_of(rig)
    assert (status["phase"], status["message"], conditions_by_type(status)["Failed"]) == (
        "Failed",
        "died too often",
        ("True", "Failed"),
    )
    assert find_unreported_jobs(rig.server.resources(), rig.snapshot) == ()
    rig.advance(86_399.0)
    assert rig.compute_writes() == ()
    rig.advance(1.0)
    ((step,),) = rig.compute_writes()
    assert isinstance(step, Delete)
    rig.write()
    assert status_of(rig)["phase"] == "Failed"  # its finalizer holds it
    rig.write()
    assert rig.server.resources().elastic_jobs == ()


def test_deleting_the_resource_cancels_an_http_job() -> None:
    rig = with_jobs(build_running_job())
    rig.write()
    rig.server.delete(ELASTIC_JOB, "llama-abc123", NAMESPACE)
    assert rig.run_round() == ["CancelJob"]
    assert rig.snapshot.jobs["llama-abc123"].intent is Intent.CANCEL
    assert status_of(rig)["reason"] == "Cancelling"
    rig.snapshot = replace(rig.snapshot, jobs={})
    rig.write()
    assert rig.server.resources().elastic_jobs == ()
    assert rig.compute_writes() == ()


def test_loan_resource_follows_the_loan_and_stays_an_hour() -> None:
    loan = a_loan("i0")
    rig = with_jobs(build_running_job(), loans=[loan])
    rig.write()
    reported = rig.server.get(LOAN, loan.id)
    assert reported["spec"] == {"node": "i0", "pool": "inference"}
    assert (reported["status"]["state"], reported["status"]["usedGpus"], reported["status"]["jobs"]) == (
        "active",
        4,
        "llama-abc123",
    )
    recalled = loan.transition_to(LoanState.RECALLED, NOW_S, return_by_s=NOW_S + 300.0)
    rig.snapshot = replace(rig.snapshot, loans={"i0": recalled})
    rig.write()
    assert rig.server.get(LOAN, loan.id)["status"]["returnBy"] == "2026-11-22T06:15:00Z"
    home = recalled.transition_to(LoanState.RETURNED, NOW_S + 60.0)
    rig.snapshot = replace(rig.snapshot, loans={}, jobs={})
    rig.server.objects.pop(("ElasticJob", NAMESPACE, "llama-abc123"))
    assert find_unreported_loans(rig.server.resources(), rig.snapshot) == (loan.id,)
    rig.write(ended_loans={loan.id: home})
    status = rig.server.get(LOAN, loan.id)["status"]
    assert (status["state"], status["usedGpus"], "returnBy" in status) == ("returned", 0, False)
    assert find_unreported_loans(rig.server.resources(), rig.snapshot) == ()
    rig.advance(3659.0)
    assert rig.compute_writes() == ()
    rig.advance(1.0)
    rig.write()
    assert rig.server.resources().loans == ()


def test_unknown_loan_is_deleted() -> None:
    rig = with_jobs(loans=[a_loan("i0")])
    rig.write()
    rig.snapshot = replace(rig.snapshot, loans={})
    rig.write()
    assert rig.server.resources().loans == ()


def in_a_later_epoch(kind: ResourceKind) -> OperatorRig:
    rig = with_jobs(build_running_job(), loans=[a_loan("i0")])
    rig.server.add(POOL, "gpus", {"kind": "training", "nodeSelector": {"a": "b"}})
    rig.write()
    for key, item in rig.server.objects.items():
        if key[0] == kind.name:
            item["metadata"]["annotations"]["ebbtide.dev/epoch"] = "4"
            del item["status"]
    return rig


@pytest.mark.parametrize("kind", [LOAN, POOL])
def test_resources_of_a_newer_leader_are_not_overwritten(kind: ResourceKind) -> None:
    with pytest.raises(FencedError, match="epoch 4"):
        in_a_later_epoch(kind).compute_writes()


def test_epoch_of_an_elastic_job_is_ignored() -> None:
    rig = in_a_later_epoch(ELASTIC_JOB)
    assert len(rig.compute_writes()) == 1
    rig.server.get(ELASTIC_JOB, "llama-abc123", NAMESPACE)["metadata"]["annotations"]["ebbtide.dev/epoch"] = "9" * 5000
    assert len(rig.compute_writes()) == 1


def test_empty_state_needs_no_writes() -> None:
    assert OperatorRig(snapshot=Snapshot(now_s=NOW_S)).compute_writes() == ()


def test_creation_and_status_are_one_sequence() -> None:
    ((created, status),) = with_jobs(build_running_job()).compute_writes()
    assert isinstance(created, Create)
    assert isinstance(status, Patch)
    assert status.status


def test_merge_patch_contains_only_differences() -> None:
    before = {"a": 1, "b": {"c": 1, "d": [1]}, "gone": 2}
    assert compute_merge_patch(before, {"a": 1, "b": {"c": 2, "d": [1]}}) == {"b": {"c": 2}, "gone": None}
    assert compute_merge_patch(before, before) == {}
    assert compute_merge_patch("nonsense", {"a": 1}) == {"a": 1}
