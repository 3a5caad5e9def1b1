"""Out-of-memory failures: corrected plans, backoff and a limit of attempts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.domain.commands import Command, CurveSolved, ResumeJob
from scheduler.domain.decisions import ReasonCode, RejectJob
from scheduler.domain.gpu_sets import GpuShape
from scheduler.domain.job import Intent, Job
from scheduler.domain.job_records import OOM_ATTEMPTS_MAX, MemoryRecord
from scheduler.domain.job_state import JobState
from scheduler.domain.observation import FailureCause, Observation, Run, RunPhase
from scheduler.domain.scaling_curve import ScalingCurve, build_data_parallel_plan
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.tick_report import Invariant, WantedShape
from scheduler.executors.executor import RecordingExecutor
from scheduler.runtime.clock import ManualClock
from scheduler.runtime.reconciler import tick
from scheduler.scheduling.explanation import explain
from scheduler.scheduling.policy_sets import load_policy_set
from scheduler.scheduling.scheduler import decide
from scheduler.scheduling.snapshot_update import update_snapshot
from scheduler.store.memory_store import MemoryStore
from tests.builders import GPU, a_fleet, a_job, a_snapshot

FLEET = a_fleet(training=1, inference=0)
TWO = {"t0": (0, 1)}
SHAPE = GpuShape.packed(GPU, 2, 8)
PREDICTED_BYTES = 80_000_000_000
NOW_S = 100.0


def planned(peak_bytes: int = PREDICTED_BYTES) -> ScalingCurve:
    return ScalingCurve({SHAPE: replace(build_data_parallel_plan(GPU, 2), peak_bytes_per_gpu=peak_bytes)})


def running(*, model: str = "llama-2-7b", **more: object) -> Job:
    job = a_job("j", 2, state=JobState.RUNNING, on=TWO, model=model, global_batch=8 if model else 0)
    plan = planned().plans[SHAPE] if model else build_data_parallel_plan(GPU, 2)
    return replace(job, allocation=replace(job.allocation, plan=plan), **more)  # type: ignore[arg-type]  # a test's own


def died(job: Job, *, generation: int = 1, peak_bytes: int | None = 84_000_000_000, now_s: float = NOW_S) -> Snapshot:
    run = Run("j", generation, RunPhase.FAILED, reason="rank 1: OutOfMemoryError", peak_bytes=peak_bytes)
    run = replace(run, cause=FailureCause.OUT_OF_MEMORY)
    snapshot = a_snapshot(FLEET, [job], curves={job.curve_key: planned()}, now_s=now_s, generation=7)
    return update_snapshot(snapshot, Observation(now_s, 7, (run,)), ()).snapshot


def later(snapshot: Snapshot, now_s: float, *bodies: CurveSolved | ResumeJob) -> Snapshot:
    commands = [Command(f"c{at}", now_s, body) for at, body in enumerate(bodies)]
    return update_snapshot(replace(snapshot, now_s=now_s), Observation(now_s, 7), commands).snapshot


@pytest.mark.parametrize("state", [JobState.STARTING, JobState.RUNNING, JobState.RESIZING])
def test_out_of_memory_failure_costs_no_retry_and_requests_plans(state: JobState) -> None:
    snapshot = died(running(state=state))
    job = snapshot.jobs["j"]
    assert (job.state, job.account.failures, job.memory.percent) == (JobState.PLANNING, 0, 110)
    assert job.curve_key == "llama-2-7b/batch-8/seq-0/memory-110"
    assert "80.0 GB predicted, 84.0 GB measured" in job.message
    assert "OutOfMemoryError" in job.message
    result = decide(snapshot, load_policy_set("ebbtide"))
    assert result.wanted_shapes[0] == WantedShape(job.curve_key, SHAPE)
    assert result.waiting["j"].code is ReasonCode.WAITING_FOR_PLAN
    assert result.next_wake_s == NOW_S + 10.0
    assert not result.decisions


def test_backoff_applies_even_if_a_plan_is_solved() -> None:
    snapshot = died(running())
    solved = CurveSolved("llama-2-7b/batch-8/seq-0/memory-110", SHAPE, planned(40_000_000_000).plans[SHAPE])
    pausing = later(snapshot, NOW_S + 4.0, solved)
    waiting = decide(pausing, load_policy_set("ebbtide")).waiting
    assert waiting["j"].code is ReasonCode.BACKING_OFF
    assert waiting["j"].numbers["retry_at_s"] == NOW_S + 10.0
    assert "backoff" in explain(pausing, waiting, "j").unblocks
    rested = later(pausing, NOW_S + 10.0)
    (start,) = decide(rested, load_policy_set("ebbtide")).decisions
    assert rested.jobs["j"].state is JobState.QUEUED
    assert getattr(start, "plan", None) == solved.plan


def test_owner_cannot_shorten_the_backoff() -> None:
    pausing = died(running())
    suspended = replace(pausing.jobs["j"], intent=Intent.SUSPEND).transition_to(JobState.SUSPENDED, NOW_S)
    resumed = later(replace(pausing, jobs={"j": suspended}), NOW_S + 1.0, ResumeJob("j")).jobs["j"]
    assert resumed.state is JobState.PLANNING


def test_job_is_rejected_if_no_plan_fits() -> None:
    snapshot = died(running())
    infeasible = CurveSolved("llama-2-7b/batch-8/seq-0/memory-110", SHAPE, None, "needs 94.1 GB of 72.7 GB per GPU")
    (rejected,) = decide(later(snapshot, NOW_S + 10.0, infeasible), load_policy_set("ebbtide")).decisions
    assert isinstance(rejected, RejectJob)
    assert rejected.reason.code is ReasonCode.NO_FEASIBLE_PLAN
    assert "needs 94.1 GB of 72.7 GB per GPU" in rejected.reason.detail
    assert rejected.reason.numbers == {"memory_factor": 1.1}


def test_last_out_of_memory_failure_fails_the_job() -> None:
    job = running()
    for tried in range(1, OOM_ATTEMPTS_MAX + 1):
        snapshot = died(job, generation=job.allocation.generation)
        ended = snapshot.jobs["j"]
        assert len(ended.memory.deaths) == tried
        job = replace(running(), memory=ended.memory)
    assert ended.state is JobState.FAILED
    assert ended.message.startswith("out of memory")
    assert ended.message.count("80.0 GB predicted, 84.0 GB measured, 85.9 GB per GPU") == 3


def test_job_without_a_model_backs_off_and_keeps_its_curve() -> None:
    snapshot = died(running(model=""))
    job = snapshot.jobs["j"]
    assert (job.state, job.memory.percent, job.curve_key) == (JobState.PLANNING, 100, "linear")
    assert decide(snapshot, load_policy_set("ebbtide")).waiting["j"].code is ReasonCode.BACKING_OFF
    assert later(snapshot, NOW_S + 10.0).jobs["j"].state is JobState.QUEUED


def test_earlier_measurement_counts_without_a_final_one() -> None:
    job = running()
    job = replace(job, progress=replace(job.progress, peak_bytes=85_000_000_000))
    assert died(job, peak_bytes=None).jobs["j"].memory.deaths[0].measured_bytes == 85_000_000_000


def test_failure_observed_twice_counts_once() -> None:
    run = replace(Run("j", 1, RunPhase.FAILED, reason="x"), cause=FailureCause.OUT_OF_MEMORY)
    once = died(running(), peak_bytes=None)
    twice = update_snapshot(once, Observation(NOW_S, 7, (run,)), ()).snapshot
    assert twice.jobs["j"].memory == once.jobs["j"].memory


@pytest.mark.parametrize("name", ["ebbtide", "fifo", "lyra", "afs"])
def test_plan_above_the_corrected_memory_is_dropped(name: str) -> None:
    """A faulty solver returns a plan that does not fit with the job's memory correction."""
    job = a_job("j", 2, model="llama-2-7b", global_batch=8, now_s=NOW_S)
    job = replace(job, memory=MemoryRecord(110))
    store = MemoryStore(a_snapshot(FLEET, [job], curves={job.curve_key: planned()}, now_s=NOW_S))
    lease = store.acquire_lease("test", now_s=NOW_S, ttl_s=60.0)
    assert lease is not None
    report = tick(store, RecordingExecutor(), ManualClock(NOW_S), load_policy_set(name), epoch=lease.epoch)
    assert [violation.invariant for violation in report.violations] == [Invariant.PEAK_MEMORY_EXCEEDED]
    assert all(number in report.violations[0].detail for number in ("1.1", "80000000000", "85899345920"))
    assert store.load().snapshot.jobs["j"].state is JobState.QUEUED
