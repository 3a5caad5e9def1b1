"""Observations of an executor, applied to jobs, nodes and loans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from scheduler.domain.checkpoints import CheckpointSpec
from scheduler.domain.events import EventCode
from scheduler.domain.fleet import LoanState, NodeState
from scheduler.domain.gpu_sets import Gpus
from scheduler.domain.job import Job, Progress
from scheduler.domain.job_account import OnResize, PermanentFault, RunFailure
from scheduler.domain.job_state import JobState
from scheduler.domain.observation import FailureCause, NodeFacts, Observation, ReplicaStart, Run, RunPhase
from scheduler.domain.program import SETUP_TIMEOUT_S, Program
from scheduler.domain.return_times import LeaveTime
from scheduler.scheduling.snapshot_update import START_TIMEOUT_S, SnapshotUpdate, update_snapshot
from tests.builders import a_fleet, a_job, a_loan, a_snapshot

FOUR = {"t0": (0, 1, 2, 3)}
GENERATION = 7
FLEET = a_fleet(training=2, inference=1)


def observe(
    job: Job, *runs: Run, now_s: float = 100.0, converged: int = GENERATION, outage_s: float = 0.0
) -> SnapshotUpdate:
    snapshot = a_snapshot(FLEET, [job], now_s=now_s, generation=GENERATION)
    return update_snapshot(snapshot, Observation(now_s, converged, runs), (), outage_s=outage_s)


def running(*, asked_at: int = 0, steps: float = 0.0, **more: object) -> Job:
    job = a_job("j", 4, state=JobState.RUNNING, on=FOUR)
    progress = replace(job.progress, steps=steps)
    return replace(job, progress=progress, allocation=replace(job.allocation, asked_at_generation=asked_at), **more)  # type: ignore[arg-type]  # a test's own fields


def run(phase: RunPhase, generation: int = 1, gpus: Gpus | None = None, **more: object) -> Run:
    return Run("j", generation, phase, gpus or {}, **more)  # type: ignore[arg-type]  # a test's own fields


def test_job_runs_once_its_workers_run() -> None:
    job = a_job("j", 4, state=JobState.STARTING, on=FOUR)
    assert observe(job, run(RunPhase.STARTING, gpus=FOUR)).snapshot.jobs["j"].state is JobState.STARTING
    assert observe(job, run(RunPhase.RUNNING, gpus=FOUR)).snapshot.jobs["j"].state is JobState.RUNNING


def test_job_with_vanished_workers_is_queued() -> None:
    job = observe(running()).snapshot.jobs["j"]
    assert (job.state, job.account.failures) == (JobState.QUEUED, 0)
    assert job.allocation.releasing == FOUR


def test_stale_observation_does_not_requeue_a_job() -> None:
    assert observe(running(asked_at=7), converged=6).snapshot.jobs["j"].state is JobState.RUNNING


def test_failed_workers_cost_a_retry() -> None:
    job = running()
    failed = run(RunPhase.FAILED, checkpoint_steps=0.0, reason="out of memory")
    first = observe(job, failed).snapshot.jobs["j"]
    assert (first.state, first.account.failures, first.message) == (JobState.QUEUED, 1, "out of memory")
    last = observe(replace(job, account=replace(job.account, failures=3)), failed).snapshot.jobs["j"]
    assert (last.state, last.account.failures) == (JobState.FAILED, 4)


def test_start_without_its_secrets_costs_no_retry() -> None:
    """An agent that does not get the secrets reports the same failure each time, at once."""
    job = replace(a_job("j", 4, state=JobState.STARTING, on=FOUR), missing_secrets=("token",))
    job = replace(job, failure=RunFailure(90.0, "no secrets", "", 0.0), spec=replace(job.spec, retries=0))
    failed = run(RunPhase.FAILED, reason="no secrets", ran_s=0.0)
    waiting = observe(job, failed).snapshot.jobs["j"]
    assert (waiting.state, waiting.account.failures, waiting.message) == (JobState.PLANNING, 0, "no secrets")
    began = replace(job, state=JobState.RUNNING)
    assert observe(began, failed).snapshot.jobs["j"].state is JobState.FAILED


@pytest.mark.parametrize("phase", [RunPhase.LOST, RunPhase.LEFT])
def test_lost_workers_cost_no_retry(phase: RunPhase) -> None:
    job = observe(running(), run(phase, checkpoint_steps=10.0)).snapshot.jobs["j"]
    assert (job.state, job.account.failures, job.progress.steps) == (JobState.QUEUED, 0, 10.0)


def test_lost_work_is_counted_once() -> None:
    """The job finished 400 steps in 100 s on 4 GPUs, and saved 100 of them."""
    lost = run(RunPhase.LOST, steps=400.0, checkpoint_steps=100.0)
    first = observe(running(), lost)
    job = first.snapshot.jobs["j"]
    assert (job.progress.steps, job.progress.checkpoint_steps) == (100.0, 100.0)
    assert job.account.lost_gpu_s == pytest.approx(300.0)
    assert [event.numbers["steps"] for event in first.events if event.code is EventCode.JOB_LOST_WORK] == [300.0]
    again = update_snapshot(first.snapshot, Observation(101.0, GENERATION, (lost,)), ())
    assert again.snapshot.jobs["j"].account.lost_gpu_s == pytest.approx(300.0)
    assert not [event for event in again.events if event.code is EventCode.JOB_LOST_WORK]


def lost_work(update: SnapshotUpdate) -> list[dict[str, float]]:
    return [dict(event.numbers) for event in update.events if event.code is EventCode.JOB_LOST_WORK]


@pytest.mark.parametrize("phase", [RunPhase.LEFT, RunPhase.LOST, RunPhase.FAILED])
def test_job_that_never_reported_loses_all_gpu_seconds(phase: RunPhase) -> None:
    """It held 4 GPUs for 100 s. Its estimated steps are not named as lost, and are not counted twice."""
    first = observe(running(), run(phase))
    job = first.snapshot.jobs["j"]
    assert (job.progress.steps, job.progress.is_reported, job.account.lost_gpu_s) == (0.0, False, 400.0)
    assert lost_work(first) == [{"gpu_s": 400.0, "restart_step": 0.0}]
    again = update_snapshot(first.snapshot, Observation(101.0, GENERATION, (run(phase),)), ())
    assert (again.snapshot.jobs["j"].account.lost_gpu_s, lost_work(again)) == (400.0, [])


@pytest.mark.parametrize(("saved_at_s", "lost_gpu_s"), [(100.0, 0.0), (75.0, 100.0)])
def test_job_with_checkpoints_of_its_own_loses_the_work_since_the_last_one(
    saved_at_s: float, lost_gpu_s: float
) -> None:
    """It held 4 GPUs for 100 s. Its steps are estimated."""
    ended = observe(running(), run(RunPhase.LOST, checkpoint_at_s=saved_at_s)).snapshot.jobs["j"]
    assert ended.account.lost_gpu_s == pytest.approx(lost_gpu_s)
    assert (ended.progress.is_reported, ended.progress.steps > 0.0) == (False, True)


def test_checkpoint_of_a_running_script_is_recorded_once() -> None:
    saved = run(RunPhase.RUNNING, gpus=FOUR, checkpoint_at_s=75.0)
    first = observe(running(), saved).snapshot
    progress = first.jobs["j"].progress
    assert (progress.checkpoint_at_s, progress.checkpoint_steps > 0.0, progress.steps) == (75.0, True, 0.0)
    again = update_snapshot(first, Observation(101.0, GENERATION, (replace(saved, checkpoint_at_s=75.3),)), ())
    assert again.snapshot.jobs["j"] is first.jobs["j"]


@pytest.mark.parametrize(
    ("changes", "lacks"),
    [
        ({}, True),
        ({"on_resize": OnResize.RESTART}, False),
        ({"checkpoint": CheckpointSpec(path="ckpt.pt")}, False),
    ],
)
def test_job_that_declares_checkpoints_and_opens_no_session_is_not_resized(
    changes: dict[str, Any], lacks: bool
) -> None:
    job = a_job("j", 4, state=JobState.STARTING, on=FOUR, **changes)
    update = observe(job, run(RunPhase.RUNNING, gpus=FOUR, lacks_session=True))
    silent = update.snapshot.jobs["j"]
    assert (silent.lacks_session, silent.is_resizable) == (lacks, not lacks)
    events = [event for event in update.events if event.code is EventCode.JOB_HAS_NO_SESSION]
    assert len(events) == lacks
    reported = observe(silent, run(RunPhase.RUNNING, gpus=FOUR, steps=1.0)).snapshot.jobs["j"]
    assert reported.is_resizable


def test_silent_job_that_dies_while_it_starts_loses_its_gpu_seconds() -> None:
    job = a_job("j", 4, state=JobState.STARTING, on=FOUR)
    assert observe(job, run(RunPhase.FAILED)).snapshot.jobs["j"].account.lost_gpu_s == 400.0
    reported = replace(job, progress=replace(job.progress, is_reported=True))
    assert observe(reported, run(RunPhase.FAILED)).snapshot.jobs["j"].account.lost_gpu_s == 0.0


def test_lost_work_names_the_step_of_the_restart() -> None:
    for kept in (0.0, 100.0):
        ended = observe(running(), run(RunPhase.LOST, steps=400.0, checkpoint_steps=kept))
        assert [numbers["restart_step"] for numbers in lost_work(ended)] == [kept]


def test_steps_count_as_reported_from_the_first_report() -> None:
    silent = observe(running(), run(RunPhase.RUNNING, gpus=FOUR)).snapshot.jobs["j"]
    assert not silent.progress.is_reported
    reported = observe(silent, run(RunPhase.RUNNING, gpus=FOUR, steps=0.0)).snapshot.jobs["j"]
    assert (reported.progress.is_reported, reported.progress.steps) == (True, 0.0)
    later = observe(reported, run(RunPhase.RUNNING, gpus=FOUR)).snapshot.jobs["j"]
    assert later.progress.is_reported
    ended = observe(running(), run(RunPhase.SUCCEEDED)).snapshot.jobs["j"]
    assert not ended.progress.is_reported


def test_job_that_cannot_heal_is_not_retried() -> None:
    failed = run(RunPhase.FAILED, reason="no module", permanent_fault=PermanentFault.IMPORT_ERROR, ran_s=300.0)
    job = observe(running(), failed).snapshot.jobs["j"]
    assert (job.state, job.account.failures) == (JobState.FAILED, 1)
    assert job.failure == RunFailure(100.0, "no module", "import-error", 300.0)


def test_a_missing_module_of_the_jobs_framework_is_named() -> None:
    spec = replace(running().spec, framework="megatron-lm", model="gpt2", global_batch=8)
    for module, is_named in (("megatron", True), ("megatron.training", True), ("wandb", False)):
        reason = f"rank 0: ModuleNotFoundError: No module named '{module}'"
        failed = run(RunPhase.FAILED, reason=reason, permanent_fault=PermanentFault.IMPORT_ERROR)
        job = observe(replace(running(), spec=spec), failed).snapshot.jobs["j"]
        assert job.failure is not None
        assert ("framework is megatron-lm" in job.failure.reason) is is_named
        assert job.failure.reason.endswith(reason)


@pytest.mark.parametrize(
    ("reasons", "ran_s", "state"),
    [
        (("a", "a"), (0.5, 1.9), JobState.FAILED),
        (("a", "b"), (0.5, 0.5), JobState.QUEUED),
        (("a", "a"), (0.5, 2.0), JobState.QUEUED),
        (("a", "a"), (2.0, 0.5), JobState.QUEUED),
        (("a", "a"), (None, 0.5), JobState.QUEUED),
    ],
)
def test_same_failure_twice_at_once_is_not_retried(
    reasons: tuple[str, str], ran_s: tuple[float | None, float], state: JobState
) -> None:
    first = observe(running(), run(RunPhase.FAILED, reason=reasons[0], ran_s=ran_s[0])).snapshot.jobs["j"]
    assert first.state is JobState.QUEUED
    second = replace(running(), failure=first.failure, account=first.account)
    ended = observe(second, run(RunPhase.FAILED, reason=reasons[1], ran_s=ran_s[1])).snapshot.jobs["j"]
    assert ended.state is state
    assert ended.failure is not None
    assert ended.failure.code == ("repeated-failure" if state is JobState.FAILED else "")


def test_failures_with_another_run_between_are_not_in_a_row() -> None:
    failed = run(RunPhase.FAILED, reason="a", ran_s=0.5)
    first = observe(running(), failed).snapshot.jobs["j"]
    lost = observe(replace(running(), failure=first.failure), run(RunPhase.LOST)).snapshot.jobs["j"]
    assert observe(replace(running(), failure=lost.failure), failed).snapshot.jobs["j"].state is JobState.QUEUED


def test_work_lost_twice_never_exceeds_the_gpu_seconds_used() -> None:
    """400 steps are finished and lost, then finished again in the same time and lost again."""
    lost = run(RunPhase.LOST, steps=400.0, checkpoint_steps=0.0)
    job = replace(running(), account=replace(running().account, gpu_s=400.0, lost_gpu_s=400.0))
    assert observe(job, lost).snapshot.jobs["j"].account.lost_gpu_s == pytest.approx(800.0)


def test_clean_leave_loses_no_work() -> None:
    job = replace(a_job("j", 4, state=JobState.RESIZING, on=FOUR), progress=Progress(0.0, steps=400.7))
    job = replace(job, allocation=replace(job.allocation, generation=2))
    absorbed = observe(job, run(RunPhase.LEFT, steps=400.0, checkpoint_steps=400.0))
    assert absorbed.snapshot.jobs["j"].account.lost_gpu_s == 0.0
    assert absorbed.snapshot.jobs["j"].progress.steps == 400.0
    assert absorbed.events == ()


def test_latest_old_generation_sets_the_progress() -> None:
    job = a_job("j", 4, state=JobState.RESIZING, on=FOUR)
    job = replace(job, allocation=replace(job.allocation, generation=3))
    older = run(RunPhase.LEFT, 1, steps=100.0, checkpoint_steps=100.0)
    later = run(RunPhase.LEFT, 2, steps=250.0, checkpoint_steps=250.0)
    assert observe(job, later, older).snapshot.jobs["j"].progress.steps == 250.0


def test_leaving_workers_may_succeed() -> None:
    job = a_job("j", 4, state=JobState.PREEMPTED, releasing=FOUR)
    job = replace(job, allocation=replace(job.allocation, generation=2))
    ended = observe(job, run(RunPhase.SUCCEEDED, 1, steps=3600.0)).snapshot.jobs["j"]
    assert (ended.state, ended.progress.steps) == (JobState.SUCCEEDED, 3600.0)


def test_gpus_are_free_once_no_old_run_is_observed() -> None:
    job = a_job("j", 4, state=JobState.QUEUED, releasing=FOUR)
    job = replace(job, allocation=replace(job.allocation, generation=2, asked_at_generation=7))
    partly = observe(job, run(RunPhase.LEAVING, 1, {"t0": (0, 1)})).snapshot.jobs["j"]
    assert partly.allocation.releasing == {"t0": (0, 1)}
    assert observe(job, converged=6).snapshot.jobs["j"].allocation.releasing == FOUR
    assert observe(job).snapshot.jobs["j"].allocation.releasing == {}


def test_loss_survives_observations_without_one() -> None:
    job = running()
    job = replace(job, progress=replace(job.progress, loss=2.5))
    measured = observe(job, run(RunPhase.RUNNING, gpus=FOUR, steps=100.0)).snapshot.jobs["j"]
    assert (measured.progress.steps, measured.progress.loss) == (100.0, 2.5)
    ended = observe(job, run(RunPhase.SUCCEEDED, steps=3600.0)).snapshot.jobs["j"]
    assert ended.progress.loss == 2.5


def test_lost_work_event_has_its_cause() -> None:
    for phase, cause, word in (
        (RunPhase.LOST, None, "lost"),
        (RunPhase.FAILED, None, "failed"),
        (RunPhase.FAILED, FailureCause.OUT_OF_MEMORY, "out-of-memory"),
    ):
        ended = observe(running(), run(phase, steps=400.0, checkpoint_steps=100.0, cause=cause))
        assert [event.cause for event in ended.events if event.code is EventCode.JOB_LOST_WORK] == [word]


def test_changed_throughput_and_memory_are_recorded() -> None:
    known = observe(running(), run(RunPhase.RUNNING, gpus=FOUR, samples_per_s=8.0, peak_bytes=700)).snapshot.jobs["j"]
    assert (known.progress.samples_per_s, known.progress.peak_bytes) == (8.0, 700)
    hardly = observe(known, run(RunPhase.RUNNING, gpus=FOUR, samples_per_s=8.1, peak_bytes=690)).snapshot.jobs["j"]
    assert hardly is known
    ended = observe(known, run(RunPhase.SUCCEEDED, steps=3600.0, peak_bytes=900)).snapshot.jobs["j"]
    assert ended.progress.peak_bytes == 900


def test_new_workers_are_measured_again() -> None:
    job = observe(running(), run(RunPhase.RUNNING, gpus=FOUR, samples_per_s=8.0, peak_bytes=700)).snapshot.jobs["j"]
    queued = observe(job, run(RunPhase.LOST)).snapshot.jobs["j"]
    assert (queued.state, queued.progress.peak_bytes) == (JobState.QUEUED, 700)
    started = queued.transition_to(JobState.STARTING, 200.0, allocation=job.allocation)
    assert (started.progress.samples_per_s, started.progress.peak_bytes) == (None, None)


def test_measured_steps_correct_the_curve_by_half() -> None:
    """The plan predicts 400 steps in 100 s; 200 are finished, so a step takes twice as long."""
    job = observe(running(), run(RunPhase.RUNNING, gpus=FOUR, steps=200.0)).snapshot.jobs["j"]
    assert job.progress.correction == pytest.approx(1.5)
    assert observe(running(), run(RunPhase.RUNNING, gpus=FOUR, steps=399.0)).snapshot.jobs["j"].progress.steps == 0.0


def test_a_report_that_is_seen_again_later_does_not_change_the_speed() -> None:
    """An agent reports every 20 s. A step takes 1 s, four times as long as predicted."""
    job = running()
    for second in range(1, 401):
        reported = float(second // 20 * 20)
        seen = run(RunPhase.RUNNING, gpus=FOUR, steps=reported, steps_at_s=reported)
        job = observe(job, seen, now_s=float(second)).snapshot.jobs["j"]
    assert job.progress.correction == pytest.approx(4.0, rel=0.05)
    assert job.progress.steps <= 400.0
    assert job.steps_at(400.0) == pytest.approx(400.0, abs=20.0)


@pytest.mark.parametrize("state", [JobState.STARTING, JobState.RESIZING])
def test_start_timeout_requeues_the_job(state: JobState) -> None:
    job = a_job("j", 4, state=state, on=FOUR)
    assert observe(job, now_s=START_TIMEOUT_S).snapshot.jobs["j"].state is state
    requeued = observe(job, now_s=START_TIMEOUT_S + 1.0).snapshot.jobs["j"]
    assert (requeued.state, requeued.account.failures) == (JobState.QUEUED, 1)


def test_setup_command_adds_its_own_limit_to_that_of_a_start() -> None:
    job = a_job("j", 4, state=JobState.STARTING, on=FOUR)
    job = replace(job, spec=replace(job.spec, program=Program(archive=f"sha256:{0:064}", setup=("make",))))
    limit_s = START_TIMEOUT_S + SETUP_TIMEOUT_S
    assert observe(job, now_s=limit_s).snapshot.jobs["j"].state is JobState.STARTING
    requeued = observe(job, now_s=limit_s + 1.0).snapshot.jobs["j"]
    assert (requeued.state, requeued.account.failures) == (JobState.QUEUED, 1)
    assert f"{limit_s:.0f} s" in requeued.message


def test_start_during_an_outage_costs_no_retry() -> None:
    job = a_job("j", 4, state=JobState.STARTING, on=FOUR)
    job = replace(job, spec=replace(job.spec, retries=0))
    later_s = 2 * START_TIMEOUT_S
    requeued = observe(job, now_s=later_s, outage_s=later_s).snapshot.jobs["j"]
    assert (requeued.state, requeued.account.failures) == (JobState.QUEUED, 0)
    assert "1800 s" in requeued.message
    assert observe(job, now_s=later_s, outage_s=300.0).snapshot.jobs["j"].state is JobState.FAILED


def test_start_timeout_begins_after_old_workers_left() -> None:
    job = a_job("j", 4, state=JobState.RESIZING, on=FOUR, releasing={"t1": (0,)})
    job = replace(job, allocation=replace(job.allocation, leave_by_s=1800.0, asked_at_generation=8))
    assert observe(job, now_s=START_TIMEOUT_S + 1.0).snapshot.jobs["j"].state is JobState.RESIZING
    assert observe(job, now_s=1801.0 + START_TIMEOUT_S).snapshot.jobs["j"].state is JobState.QUEUED


def test_preempted_job_is_queued_once_its_gpus_are_free() -> None:
    job = a_job("j", 4, state=JobState.PREEMPTED, releasing=FOUR)
    job = replace(job, allocation=replace(job.allocation, generation=2))
    assert observe(job, run(RunPhase.LEAVING, 1, FOUR)).snapshot.jobs["j"].state is JobState.PREEMPTED
    assert observe(job).snapshot.jobs["j"].state is JobState.QUEUED


def test_down_node_loses_its_loan() -> None:
    snapshot = a_snapshot(FLEET, loans=[a_loan("i0")])
    absorbed = update_snapshot(snapshot, Observation(0.0, 0, nodes={"i0": NodeFacts(up=False)}), ())
    assert absorbed.snapshot.nodes["i0"].state is NodeState.DOWN
    assert absorbed.snapshot.loans["i0"].state is LoanState.LOST
    assert {event.code for event in absorbed.events} == {EventCode.NODE_CHANGED, EventCode.LOAN_LOST}


def test_offered_node_is_active_once_inference_left() -> None:
    snapshot = a_snapshot(FLEET, loans=[a_loan("i0", LoanState.OFFERED)])
    still = update_snapshot(snapshot, Observation(0.0, 0, nodes={"i0": NodeFacts(True, 3)}), ())
    assert still.snapshot.loans["i0"].state is LoanState.OFFERED
    gone = update_snapshot(still.snapshot, Observation(0.0, 0, nodes={"i0": NodeFacts(True, 0)}), ())
    assert gone.snapshot.loans["i0"].state is LoanState.ACTIVE


def test_unknown_nodes_and_runs_are_ignored() -> None:
    snapshot = a_snapshot(FLEET)
    seen_of_others = Observation(0.0, 0, (run(RunPhase.RUNNING),), {"unknown": NodeFacts(up=False)})
    assert update_snapshot(snapshot, seen_of_others, ()).snapshot == snapshot


def test_time_in_which_a_job_left_a_recalled_node_is_measured() -> None:
    lent = {"i0": (0, 1), "t0": (0,)}
    job = a_job("j", 4, state=JobState.PREEMPTED, releasing=lent)
    recalled = replace(a_loan("i0", LoanState.RECALLED, return_by_s=300.0), recalled_at_s=40.0)
    snapshot = a_snapshot(FLEET, [job], [recalled], now_s=100.0, generation=GENERATION)
    partly = Observation(100.0, GENERATION, (run(RunPhase.LEAVING, 0, {"i0": (1,)}),))
    assert update_snapshot(snapshot, partly, ()).snapshot.return_times == {}
    left = update_snapshot(snapshot, Observation(100.0, GENERATION), ()).snapshot
    assert left.return_times["inference"].leave_times == (LeaveTime("j", 60.0),)


def test_nodes_that_are_not_recalled_measure_no_way_back() -> None:
    job = a_job("j", 4, state=JobState.PREEMPTED, releasing={"i0": (0, 1), "t0": (0,)})
    snapshot = a_snapshot(FLEET, [job], [a_loan("i0")], now_s=100.0, generation=GENERATION)
    assert update_snapshot(snapshot, Observation(100.0, GENERATION), ()).snapshot.return_times == {}


def test_starts_of_replicas_are_measured_once_in_the_order_of_their_readiness() -> None:
    fleet = a_fleet(training=1, inference=2)
    starts = {"i0": ReplicaStart(90.0, 30.0), "i1": ReplicaStart(80.0, 50.0), "t0": ReplicaStart(70.0, 1.0)}
    facts = {name: NodeFacts(inference_gpus=8, replica_start=start) for name, start in starts.items()}
    snapshot = a_snapshot(fleet, now_s=100.0)
    for _ in range(2):
        snapshot = update_snapshot(snapshot, Observation(100.0, 0, (), facts), ()).snapshot
        assert snapshot.return_times["inference"].start_times_s == (50.0, 30.0)
