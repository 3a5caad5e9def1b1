"""Commands: their effects and refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.domain.commands import (
    AddNode,
    CancelJob,
    ChangeJob,
    ChangeQueue,
    Command,
    CommandBody,
    CordonNode,
    CreatePool,
    CreateQueue,
    CurveSolved,
    DeletePool,
    DeleteQueue,
    ForecastMade,
    FreezeResizes,
    PauseLending,
    RecallAll,
    RemoveNode,
    ReportDemand,
    ReportProgress,
    ResumeJob,
    ResumeLending,
    ScaleJob,
    SetLendingPolicy,
    SolverChanged,
    SubmitJob,
    SuspendJob,
    UncordonNode,
)
from scheduler.domain.events import EventCode
from scheduler.domain.fleet import Forecast, Pool, PoolKind
from scheduler.domain.gpu_sets import GpuGroup, GpuShape
from scheduler.domain.job import Intent
from scheduler.domain.job_queue import JobQueue, describe_quota
from scheduler.domain.job_state import JobState
from scheduler.domain.lending_policy import LendingPolicy
from scheduler.domain.observation import Observation
from scheduler.domain.scaling_curve import ScalingCurve, build_data_parallel_plan
from scheduler.domain.snapshot import Snapshot, Switches
from scheduler.domain.step_measurements import ModelMeasurements
from scheduler.scheduling.snapshot_update import SnapshotUpdate, update_snapshot
from tests.builders import GPU, a_curve, a_fleet, a_job, a_loan, a_node, a_snapshot, a_spec

FLEET = a_fleet(training=1, inference=1)
FOUR = {"t0": (0, 1, 2, 3)}
FORECAST = Forecast(0.0, 600.0, (0.999,), (3.0,), "scripted")


def told(snapshot: Snapshot, *bodies: CommandBody, at_s: float = 0.0) -> SnapshotUpdate:
    commands = [Command(f"c{at}", at_s, body) for at, body in enumerate(bodies)]
    return update_snapshot(snapshot, Observation(snapshot.now_s, -1), commands)


def is_refused(absorbed: SnapshotUpdate) -> bool:
    return [event.code for event in absorbed.events] == [EventCode.COMMAND_REFUSED]


@pytest.mark.parametrize(
    "body",
    [
        SubmitJob("queued", a_spec()),
        CancelJob("unknown"),
        CancelJob("ended"),
        SuspendJob("ended"),
        ResumeJob("unknown"),
        ScaleJob("unknown", 1, 2),
        ScaleJob("queued", 4, 2),
        CreatePool(Pool("training", PoolKind.TRAINING)),
        DeletePool("training"),
        DeletePool("unknown"),
        SetLendingPolicy("unknown", LendingPolicy()),
        CreateQueue(JobQueue("vision", 4)),
        ChangeQueue(JobQueue("unknown")),
        DeleteQueue("unknown"),
        AddNode(a_node("t0")),
        AddNode(a_node("new", "unknown")),
        RemoveNode("unknown"),
        RemoveNode("t0"),
        RemoveNode("i0"),
        CordonNode("unknown"),
        UncordonNode("unknown"),
        ReportDemand("unknown", 1.0),
    ],
    ids=str,
)
def test_inapplicable_command_is_refused_without_effect(body: CommandBody) -> None:
    ended = a_job("ended", 4, state=JobState.SUCCEEDED, releasing=FOUR)
    snapshot = a_snapshot(
        FLEET,
        [a_job("queued"), ended],
        [replace(a_loan("i0"), unused_since_s=0.0)],
        queues={"vision": JobQueue("vision")},
    )
    absorbed = told(snapshot, body)
    assert is_refused(absorbed)
    assert absorbed.snapshot == snapshot


def test_job_without_a_model_is_queued_at_once() -> None:
    job = told(a_snapshot(FLEET), SubmitJob("j", a_spec(2, 4))).snapshot.jobs["j"]
    assert (job.state, job.intent) == (JobState.QUEUED, Intent.RUN)


def test_job_with_a_model_is_queued_once_its_minimum_is_solved() -> None:
    spec = a_spec(2, 4, model="llama-2-7b", global_batch=8)
    planning = told(a_snapshot(FLEET), SubmitJob("j", spec)).snapshot
    assert planning.jobs["j"].state is JobState.PLANNING
    other = told(
        planning, CurveSolved(spec.curve_key, GpuShape.packed(GPU, 4, 8), build_data_parallel_plan(GPU, 4))
    ).snapshot
    assert other.jobs["j"].state is JobState.PLANNING
    solved = told(planning, CurveSolved(spec.curve_key, GpuShape.packed(GPU, 2, 8), None, "needs 94.1 GB")).snapshot
    assert solved.jobs["j"].state is JobState.QUEUED


def test_new_solver_drops_curves_and_keeps_running_plans() -> None:
    job = a_job("j", 4, state=JobState.RUNNING, on=FOUR, model="llama-2-7b", global_batch=8)
    curves = {job.spec.curve_key: a_curve({GpuShape.packed(GPU, 4, 8): 1.0})}
    absorbed = told(a_snapshot(FLEET, [job], curves=curves, solver="old"), SolverChanged("new"))
    assert (dict(absorbed.snapshot.curves), absorbed.snapshot.solver) == ({}, "new")
    assert absorbed.snapshot.jobs["j"] is job
    assert [event.code for event in absorbed.events] == [EventCode.CURVES_DROPPED]
    same = told(a_snapshot(FLEET, curves=curves, solver="new"), SolverChanged("new"))
    assert (same.snapshot.curves, same.events) == (curves, ())


MIXED = GpuShape((GpuGroup("h100-80g", 1, 8), GpuGroup("l4", 1, 8)))


def test_changed_hardware_drops_the_points_that_name_its_gpu_model() -> None:
    four, cheap = GpuShape.packed("h100-80g", 4, 8), GpuShape.packed("l4", 4, 8)
    mixed, other = a_curve({four: 1.0, cheap: 2.0, MIXED: 0.5}), a_curve({four: 1.0})
    mixed = mixed.with_infeasible(GpuShape.packed("l4", 1, 8), "needs 94.1 GB")
    rows = {"h100-80g gpt2": ModelMeasurements(1.0), "l4 gpt2": ModelMeasurements(1.0)}
    snapshot = a_snapshot(FLEET, curves={"mixed": mixed, "other": other}, solver="5f0e", step_measurements=rows)
    snapshot = replace(snapshot, curve_hardware={"h100-80g": "a1"})
    absorbed = told(snapshot, SolverChanged("5f0e", {"h100-80g": "a1", "l4": "b2"}))
    assert absorbed.snapshot.curves == {"mixed": a_curve({four: 1.0}), "other": other}
    assert absorbed.snapshot.curves["other"] is other
    assert absorbed.snapshot.step_measurements.keys() == {"h100-80g gpt2"}
    assert absorbed.snapshot.curve_hardware == {"h100-80g": "a1", "l4": "b2"}
    assert [event.code for event in absorbed.events] == [EventCode.CURVES_DROPPED]
    deleted = told(absorbed.snapshot, SolverChanged("5f0e", {"l4": "b2"})).snapshot
    assert deleted.curves == {"mixed": ScalingCurve(), "other": ScalingCurve()}
    assert deleted.step_measurements == {}


def test_hardware_of_unused_gpu_models_drops_nothing() -> None:
    curve = a_curve({GpuShape.packed("h100-80g", 4, 8): 1.0})
    snapshot = a_snapshot(FLEET, curves={"c": curve}, solver="5f0e")
    absorbed = told(snapshot, SolverChanged("5f0e", {"t4": "c3"}))
    assert (absorbed.snapshot.curves, absorbed.events) == ({"c": curve}, ())
    assert absorbed.snapshot.curve_hardware == {"t4": "c3"}


def test_duration_estimate_sets_the_step_time() -> None:
    spec = a_spec(2, steps=1000, duration_estimate_s=500.0)
    assert told(a_snapshot(FLEET), SubmitJob("j", spec)).snapshot.jobs["j"].progress.correction == 1.0


def test_cancellation_is_final() -> None:
    snapshot = a_snapshot(FLEET, [a_job("j")])
    job = told(snapshot, CancelJob("j"), SuspendJob("j"), ResumeJob("j")).snapshot.jobs["j"]
    assert job.intent is Intent.CANCEL


def test_resumed_job_is_queued() -> None:
    job = replace(a_job("j", state=JobState.SUSPENDED), intent=Intent.SUSPEND)
    resumed = told(a_snapshot(FLEET, [job]), ResumeJob("j")).snapshot.jobs["j"]
    assert (resumed.state, resumed.intent) == (JobState.QUEUED, Intent.RUN)


def test_scale_replaces_the_range() -> None:
    job = told(a_snapshot(FLEET, [a_job("j", 1, 2)]), ScaleJob("j", 4, 8)).snapshot.jobs["j"]
    assert (job.spec.min_gpus, job.spec.max_gpus) == (4, 8)


def test_progress_of_another_generation_is_ignored() -> None:
    job = a_job("j", 4, state=JobState.STARTING, on=FOUR)
    snapshot = a_snapshot(FLEET, [job])
    assert told(snapshot, ReportProgress("j", 0, 10.0, 1.5, 8.0)).snapshot == snapshot
    assert not snapshot.jobs["j"].has_reported
    assert told(snapshot, ReportProgress("j", 1, 10.0)).snapshot.jobs["j"].has_reported
    progress = told(snapshot, ReportProgress("j", 1, 10.0, 1.5, 8.0)).snapshot.jobs["j"].progress
    assert (progress.loss, progress.checkpoint_steps) == (1.5, 8.0)


def test_last_throughput_and_highest_memory_are_kept() -> None:
    snapshot = a_snapshot(FLEET, [a_job("j", 4, state=JobState.STARTING, on=FOUR)])
    first = ReportProgress("j", 1, 10.0, samples_per_s=8.0, peak_bytes=700)
    progress = told(snapshot, first, ReportProgress("j", 1, 11.0)).snapshot.jobs["j"].progress
    assert (progress.samples_per_s, progress.peak_bytes) == (8.0, 700)
    later = ReportProgress("j", 1, 12.0, samples_per_s=7.0, peak_bytes=600)
    progress = told(snapshot, first, later).snapshot.jobs["j"].progress
    assert (progress.samples_per_s, progress.peak_bytes) == (7.0, 700)


def test_deleting_a_pool_deletes_its_demand() -> None:
    snapshot = a_snapshot(FLEET)
    filled = told(
        snapshot, CreatePool(Pool("p", PoolKind.INFERENCE)), ReportDemand("p", 0.0), ForecastMade("p", FORECAST)
    )
    assert "p" in filled.snapshot.demand
    assert told(filled.snapshot, DeletePool("p")).snapshot == snapshot


def test_queue_is_created_changed_and_deleted_without_its_jobs() -> None:
    snapshot = a_snapshot(FLEET, [a_job("j", queue="vision")])
    declared = told(snapshot, CreateQueue(JobQueue("vision", 4)), ChangeQueue(JobQueue("vision", 2, 6, 0.5)))
    assert declared.snapshot.queues == {"vision": JobQueue("vision", 2, 6, 0.5)}
    quotas = [describe_quota(queue.quota) for queue in (JobQueue("vision", 4), JobQueue("vision", 2, 6, 0.5))]
    assert [event.message for event in declared.events] == [f"queue vision: {quota}" for quota in quotas]
    assert told(declared.snapshot, DeleteQueue("vision")).snapshot == snapshot


def test_drained_node_is_unschedulable_until_uncordoned() -> None:
    drained = told(a_snapshot(FLEET), CordonNode("t0", drain=True)).snapshot
    assert drained.must_vacate(drained.nodes["t0"])
    assert not drained.serves_training(drained.nodes["t0"])
    cordoned = told(drained, CordonNode("t0")).snapshot
    assert cordoned.nodes["t0"].draining
    assert told(drained, UncordonNode("t0")).snapshot == a_snapshot(FLEET)


def test_unused_node_can_be_removed() -> None:
    assert set(told(a_snapshot(FLEET), RemoveNode("t0")).snapshot.nodes) == {"i0"}


def test_demand_above_capacity_is_clamped_with_an_event() -> None:
    absorbed = told(a_snapshot(FLEET), ReportDemand("inference", 20.0))
    reading = absorbed.snapshot.demand["inference"]
    assert (reading.gpus, reading.asked_gpus) == (8.0, 20.0)
    assert [event.code for event in absorbed.events] == [EventCode.DEMAND_CLAMPED]
    assert absorbed.readings == (("inference", reading),)


def test_older_demand_reading_is_ignored() -> None:
    snapshot = told(replace(a_snapshot(FLEET), now_s=50.0), ReportDemand("inference", 2.0), at_s=50.0).snapshot
    assert told(snapshot, ReportDemand("inference", 7.0), at_s=40.0).snapshot == snapshot


def test_switches_are_set_and_reset() -> None:
    snapshot = a_snapshot(FLEET)
    assert told(snapshot, PauseLending()).snapshot.switches == Switches(lending_paused=True)
    recalled = told(snapshot, FreezeResizes(True), RecallAll()).snapshot
    assert recalled.switches == Switches(lending_paused=True, loans_recalled=True, resizes_frozen=True)
    assert told(recalled, ResumeLending()).snapshot.switches == Switches(resizes_frozen=True)
    assert told(recalled, ResumeLending(), FreezeResizes(False)).snapshot.switches == Switches()


def test_switches_of_lending_name_their_author() -> None:
    commands = [
        Command("pause", 50.0, PauseLending(), actor="ada"),
        Command("freeze", 60.0, FreezeResizes(True), "bob"),
    ]
    done = update_snapshot(replace(a_snapshot(FLEET), now_s=60.0), Observation(60.0, -1), commands).snapshot
    assert (done.lending_set_by, done.lending_set_at_s) == ("ada", 50.0)


def test_forecast_of_a_deleted_pool_is_ignored() -> None:
    assert told(a_snapshot(FLEET), ForecastMade("gone", FORECAST)).snapshot == a_snapshot(FLEET)
    kept = told(a_snapshot(FLEET), ForecastMade("inference", FORECAST)).snapshot
    assert kept.forecasts == {"inference": FORECAST}


def test_set_lending_policy_replaces_the_policy() -> None:
    lending = LendingPolicy(kept_nodes_min=1)
    assert (
        told(a_snapshot(FLEET), SetLendingPolicy("inference", lending)).snapshot.pools["inference"].lending == lending
    )


def test_label_changes_are_merged_and_reported_once() -> None:
    snapshot = a_snapshot(FLEET, [a_job("a", 1, state=JobState.QUEUED, labels={"team": "vision", "tier": "dev"})])
    many: dict[str, str | None] = {f"k{number}": "v" for number in range(40)}
    changes: list[dict[str, str | None]] = [{"stage": "tune"}, {"tier": None}, {"team": "vision"}, many]
    commands = [Command(f"c{at}", 0.0, ChangeJob("a", labels=labels)) for at, labels in enumerate(changes)]
    done = update_snapshot(snapshot, Observation(0.0, 0), commands)
    assert done.snapshot.jobs["a"].spec.labels == {"stage": "tune", "team": "vision"}
    codes = [event.code for event in done.events]
    assert codes == [EventCode.JOB_STATE, EventCode.JOB_STATE, EventCode.COMMAND_REFUSED]


def test_job_change_is_atomic() -> None:
    snapshot = a_snapshot(FLEET, [a_job("a", 1, state=JobState.QUEUED)])
    done = update_snapshot(snapshot, Observation(0.0, 0), [Command("c", 0.0, ChangeJob("a", "blue", 3, 2, 4))])
    spec = done.snapshot.jobs["a"].spec
    assert (spec.queue, spec.priority, spec.min_gpus, spec.max_gpus) == ("blue", 3, 2, 4)
    refused = update_snapshot(snapshot, Observation(0.0, 0), [Command("c", 0.0, ChangeJob("a", "blue", 3, 5, 4))])
    assert refused.snapshot.jobs == snapshot.jobs
    assert [event.code for event in refused.events] == [EventCode.COMMAND_REFUSED]
