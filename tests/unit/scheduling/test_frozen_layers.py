"""Frozen layers: reports, curves, re-plans and measured speed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from scheduler.domain.codec import decode, encode
from scheduler.domain.commands import Command, CommandBody, CurveSolved, ReportProgress
from scheduler.domain.decisions import ReasonCode, ResizeJob, StartJob
from scheduler.domain.events import EventCode
from scheduler.domain.gpu_sets import GpuShape
from scheduler.domain.job import Job
from scheduler.domain.job_records import FrozenLayers, MemoryRecord
from scheduler.domain.job_state import JobState
from scheduler.domain.observation import FailureCause, Observation, Run, RunPhase
from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan, Stage
from scheduler.domain.snapshot import Snapshot, Switches
from scheduler.domain.snapshot_index import SnapshotIndex
from scheduler.domain.tick_report import TickResult, WantedShape
from scheduler.scheduling.desired_state import apply_decisions
from scheduler.scheduling.policy_sets import load_policy_set
from scheduler.scheduling.scheduler import decide
from scheduler.scheduling.snapshot_update import SnapshotUpdate, update_snapshot
from tests.builders import GPU, a_curve, a_fleet, a_job, a_snapshot

EIGHT = {"t0": tuple(range(8))}
SHAPE = GpuShape.packed(GPU, 8, 8)
KEY = "gpt2/batch-64/seq-0"
FREE_S = 10_000.0
"""Long after the start, so that the resize pause is over."""


def a_plan(stages: int, step_s: float) -> ParallelPlan:
    """Return a plan of 12 layers in equal stages on 8 GPUs."""
    layers, width = 12 // stages, 8 // stages
    runs = (LayerStrategy(layers=layers, dp=width),)
    cut = tuple(Stage(at * layers, (at + 1) * layers - 1, GPU, width, runs) for at in range(stages))
    return replace(a_curve({SHAPE: step_s}).plans[SHAPE], stages=cut)


def pipelined(*, steps: int = 50_000, now_s: float = FREE_S) -> Snapshot:
    """Return a job that runs as a pipeline of four stages, at 1 s a step, with a solved curve."""
    job = a_job("j", 8, state=JobState.RUNNING, on=EIGHT, model="gpt2", global_batch=64, steps=steps)
    allocation = replace(job.allocation, plan=a_plan(4, 1.0))
    job = replace(job, allocation=allocation, progress=replace(job.progress, at_s=now_s))
    curve = a_curve({SHAPE: 1.0}).with_plan(SHAPE, a_plan(4, 1.0))
    fleet = a_fleet(training=1, inference=0)
    return a_snapshot(fleet, [job], curves={KEY: curve}, now_s=now_s, full_pass_at_s=now_s, generation=7)


def update(
    snapshot: Snapshot, *bodies: CommandBody, after_s: float = 0.0, runs: Iterable[Run] | None = None
) -> SnapshotUpdate:
    """Update the snapshot `after_s` seconds later with commands and observed runs."""
    now_s = snapshot.now_s + after_s
    seen = tuple(runs) if runs is not None else (a_run(),)
    commands = [Command(f"c{number}", now_s, body) for number, body in enumerate(bodies)]
    return update_snapshot(replace(snapshot, now_s=now_s), Observation(now_s, snapshot.generation, seen), commands)


def a_run(phase: RunPhase = RunPhase.RUNNING, **more: float) -> Run:
    return Run("j", 1, phase, EIGHT, **more)  # type: ignore[arg-type]  # a test's own fields


def report_frozen(layers: int) -> ReportProgress:
    return ReportProgress("j", 1, 10.0, frozen_layers=layers)


def curve_solved(layers: int, plan: ParallelPlan) -> CurveSolved:
    return CurveSolved(f"{KEY}/frozen-{layers}", SHAPE, plan)


def decided(snapshot: Snapshot, policies: str = "ebbtide") -> TickResult:
    return decide(snapshot, load_policy_set(policies))


def job_of(snapshot: Snapshot) -> Job:
    return snapshot.jobs["j"]


def with_frozen_layers(plan: ParallelPlan, *, after_s: float = 100.0, steps: int = 50_000) -> Snapshot:
    """Return a job of which 7 layers froze `after_s` seconds ago, with the next curve solved."""
    return update(
        update(pipelined(steps=steps), report_frozen(7)).snapshot, curve_solved(7, plan), after_s=after_s
    ).snapshot


def test_job_keeps_its_curve_until_the_next_one_is_curve_solved() -> None:
    updated = update(pipelined(), report_frozen(7))
    job = job_of(updated.snapshot)
    assert (job.state, job.allocation) == (JobState.RUNNING, job_of(pipelined()).allocation)
    assert (job.curve_key, job.next_curve_key) == (KEY, f"{KEY}/frozen-7")
    assert [event.code for event in updated.events] == [EventCode.JOB_FROZE]
    result = decided(updated.snapshot)
    assert result.wanted_shapes == (WantedShape(f"{KEY}/frozen-7", SHAPE),)
    assert result.decisions == ()
    assert {request.key for request in job.curve_requests} == {KEY, f"{KEY}/frozen-7"}
    assert job_of(update(updated.snapshot, curve_solved(7, a_plan(2, 0.7))).snapshot).curve_key == f"{KEY}/frozen-7"


def test_incomplete_curve_is_not_used() -> None:
    wide = replace(job_of(pipelined()), spec=replace(job_of(pipelined()).spec, min_gpus=7))
    half = update(replace(pipelined(), jobs={"j": wide}), report_frozen(7), curve_solved(7, a_plan(2, 0.7))).snapshot
    assert job_of(half).curve_key == KEY
    seven = GpuShape.packed(GPU, 7, 8)
    assert WantedShape(f"{KEY}/frozen-7", seven) in decided(half).wanted_shapes
    whole = update(half, CurveSolved(f"{KEY}/frozen-7", seven, None, "no")).snapshot
    assert job_of(whole).curve_key == f"{KEY}/frozen-7"


def test_job_is_replanned_on_its_gpus_if_worthwhile() -> None:
    snapshot = with_frozen_layers(a_plan(2, 0.7))
    [decision] = decided(snapshot).decisions
    assert isinstance(decision, ResizeJob)
    assert (decision.gpus, decision.plan) == (EIGHT, a_plan(2, 0.7))
    assert decision.reason.code is ReasonCode.LAYERS_FROZE
    numbers = decision.reason.numbers
    assert (numbers["frozen_layers"], numbers["step_time_s_before"]) == (7.0, 1.0)
    assert numbers["step_time_s"] == pytest.approx(0.7)
    after = apply_decisions(snapshot, [decision])
    assert job_of(after).state is JobState.RESIZING
    assert job_of(after).allocation.releasing == {}
    assert job_of(after).freezing == FrozenLayers(7, 7, FREE_S)
    assert after.index.needs_new_plan == SnapshotIndex.build(after).needs_new_plan == set()


@pytest.mark.parametrize("policies", ["las", "lyra", "fifo"])
def test_every_policy_set_replans(policies: str) -> None:
    assert [type(decision) for decision in decided(with_frozen_layers(a_plan(2, 0.7)), policies).decisions] == [
        ResizeJob
    ]


def test_no_replan_without_enough_gain_or_another_plan() -> None:
    """A re-plan must save twice the reconfiguration of 30 s."""
    gain_s = 0.3
    for steps, count in ((150, 0), (round(60 / gain_s) + 150, 1)):
        assert len(decided(with_frozen_layers(a_plan(2, 1.0 - gain_s), steps=steps)).decisions) == count
    assert decided(with_frozen_layers(a_plan(4, 0.6))).decisions == ()
    assert decided(with_frozen_layers(a_plan(2, 1.1))).decisions == ()
    frozen = replace(with_frozen_layers(a_plan(2, 0.7)), switches=Switches(resizes_frozen=True))
    assert decided(frozen).decisions == ()


def test_replan_waits_for_a_measured_speed() -> None:
    early = decided(with_frozen_layers(a_plan(2, 0.7), after_s=20.0))
    assert early.decisions == ()
    assert early.next_wake_s == FREE_S + 60.0


def test_replan_waits_for_the_resize_pause() -> None:
    young = with_frozen_layers(a_plan(2, 0.7))
    job = replace(job_of(young), state_since_s=young.now_s - 50.0)
    result = decided(replace(young, jobs={"j": job}))
    assert result.decisions == ()
    assert result.next_wake_s == young.now_s + 70.0


def test_gain_under_the_old_plan_is_not_counted_twice() -> None:
    """The job is 10% slower than its curve. With 7 frozen layers, a step of its old plan takes 0.66 s, not 1.1 s."""
    slow = replace(job_of(pipelined()), progress=replace(job_of(pipelined()).progress, correction=1.1))
    snapshot = update(replace(pipelined(), jobs={"j": slow}), report_frozen(7)).snapshot
    steps = 0.0
    for _ in range(20):
        steps += 20.0 / 0.66
        snapshot = update(snapshot, after_s=20.0, runs=[a_run(steps=steps)]).snapshot
    assert job_of(snapshot).step_time_s() == pytest.approx(0.66, rel=0.1)
    assert job_of(snapshot).steps_at(snapshot.now_s) == pytest.approx(steps, rel=0.02)
    planned = update(snapshot, curve_solved(7, a_plan(2, 0.5))).snapshot
    assert job_of(planned).curve_correction == 1.1
    [decision] = decided(planned).decisions
    assert decision.reason.numbers["step_time_s"] == pytest.approx(0.55)
    after = apply_decisions(planned, [decision])
    again = update(replace(after, generation=8), after_s=30.0, runs=[Run("j", 2, RunPhase.RUNNING, EIGHT)]).snapshot
    assert job_of(again).step_time_s() == pytest.approx(0.55)
    later_s = again.now_s + 55.0
    assert job_of(again).steps_at(later_s) == pytest.approx(job_of(planned).steps_at(planned.now_s) + 100.0)


def test_newer_freeze_replaces_the_requested_curve() -> None:
    updated = update(update(pipelined(), report_frozen(4)).snapshot, report_frozen(7)).snapshot
    assert decided(updated).wanted_shapes == (WantedShape(f"{KEY}/frozen-7", SHAPE),)
    assert job_of(update(updated, curve_solved(4, a_plan(2, 0.8))).snapshot).curve_key == KEY


def test_frozen_layers_never_decrease_or_exceed_the_model() -> None:
    updated = update(pipelined(), report_frozen(7)).snapshot
    lower = update(updated, report_frozen(4), ReportProgress("j", 1, 11.0))
    assert (job_of(lower.snapshot), lower.events) == (job_of(updated), ())
    refused = update(updated, report_frozen(13))
    assert job_of(refused.snapshot) is job_of(updated)
    [event] = refused.events
    assert event.code is EventCode.COMMAND_REFUSED
    assert "`frozen_layers` is 13; it must be at most 12" in event.message


def test_observed_frozen_layers_count_like_reported_ones() -> None:
    updated = update(pipelined(), runs=[a_run(frozen_layers=9)])
    assert job_of(updated.snapshot).freezing.layers == 9
    assert job_of(update(updated.snapshot, runs=[a_run(frozen_layers=9)]).snapshot) is job_of(updated.snapshot)


def test_frozen_layers_survive_a_crash_and_a_restart() -> None:
    updated = update(pipelined(), report_frozen(7)).snapshot
    crashed = job_of(update(updated, curve_solved(7, a_plan(2, 0.7)), runs=[a_run(RunPhase.FAILED)]).snapshot)
    assert (crashed.state, crashed.freezing.layers) == (JobState.QUEUED, 7)
    assert decode(Job, encode(crashed)) == crashed
    older = encode(job_of(pipelined()))
    del older["freezing"]
    assert decode(Job, older) == job_of(pipelined())


def test_job_without_a_model_measures_its_speed_again() -> None:
    job = a_job("j", 8, state=JobState.RUNNING, on=EIGHT)
    job = replace(job, progress=replace(job.progress, corrections=((4, 1.0), (8, 1.1))))
    fleet = a_fleet(training=1, inference=0)
    updated = update(a_snapshot(fleet, [job], now_s=FREE_S, full_pass_at_s=FREE_S, generation=7), report_frozen(99))
    frozen = job_of(updated.snapshot)
    assert (frozen.freezing, frozen.progress.corrections) == (FrozenLayers(99, 99, FREE_S), ())
    assert decided(updated.snapshot).decisions == ()


def run_out_of_memory(snapshot: Snapshot, **more: float) -> Snapshot:
    """Fail the workers out of memory, under a plan predicted to use 80 of the 85.9 GB of a GPU."""
    run = replace(a_run(RunPhase.FAILED, **more), cause=FailureCause.OUT_OF_MEMORY)
    dead = update(snapshot, runs=[replace(run, generation=job_of(snapshot).allocation.generation)]).snapshot
    return replace(dead, generation=snapshot.generation + 1)


def with_full_memory(snapshot: Snapshot) -> Snapshot:
    job = job_of(snapshot)
    assert job.allocation.plan is not None
    plan = replace(job.allocation.plan, peak_bytes_per_gpu=80_000_000_000)
    return replace(snapshot, jobs={"j": replace(job, allocation=replace(job.allocation, plan=plan))})


def test_out_of_memory_and_freezing_request_one_curve() -> None:
    dead = run_out_of_memory(update(with_full_memory(pipelined()), report_frozen(7)).snapshot)
    both = f"{KEY}/memory-110/frozen-7"
    assert (job_of(dead).state, job_of(dead).curve_key, job_of(dead).next_curve_key) == (JobState.PLANNING, both, both)
    assert [(request.memory_percent, request.frozen_layers) for request in job_of(dead).curve_requests] == [(110, 7)]
    assert {wanted.curve_key for wanted in decided(dead).wanted_shapes} == {both}
    pausing = update(dead, CurveSolved(both, SHAPE, a_plan(2, 0.7)), after_s=5.0, runs=()).snapshot
    assert decided(pausing).waiting["j"].code is ReasonCode.BACKING_OFF
    rested = update(pausing, after_s=5.0, runs=()).snapshot
    [start] = decided(rested).decisions
    assert isinstance(start, StartJob)
    assert start.plan == a_plan(2, 0.7)
    assert job_of(apply_decisions(rested, [start])).freezing == FrozenLayers(7, 7, FREE_S)


def test_infeasible_unfrozen_model_does_not_fail_the_job() -> None:
    dead = run_out_of_memory(update(with_full_memory(pipelined()), report_frozen(7)).snapshot)
    unfrozen = CurveSolved(f"{KEY}/memory-110", SHAPE, None, "needs 94.1 GB")
    frozen = CurveSolved(f"{KEY}/memory-110/frozen-7", SHAPE, a_plan(2, 0.7))
    rested = update(dead, unfrozen, frozen, after_s=10.0, runs=()).snapshot
    assert [type(decision) for decision in decided(rested).decisions] == [StartJob]


def test_memory_corrected_job_waits_for_the_curve_with_both() -> None:
    job = replace(job_of(pipelined()), memory=MemoryRecord(110))
    corrected = replace(pipelined(), jobs={"j": job}, curves={f"{KEY}/memory-110": pipelined().curves[KEY]})
    updated = update(corrected, report_frozen(7)).snapshot
    assert job_of(updated).curve_key == f"{KEY}/memory-110"
    assert decided(updated).wanted_shapes == (WantedShape(f"{KEY}/memory-110/frozen-7", SHAPE),)
    bare = update(updated, curve_solved(7, a_plan(2, 0.7)), after_s=100.0).snapshot
    assert decided(bare).decisions == (), "the curve does not have the job's memory correction"
    both = update(bare, CurveSolved(f"{KEY}/memory-110/frozen-7", SHAPE, a_plan(2, 0.7))).snapshot
    assert [type(decision) for decision in decided(both).decisions] == [ResizeJob]


def test_second_out_of_memory_failure_replaces_the_requested_curve() -> None:
    job = replace(job_of(pipelined()), memory=MemoryRecord(110), freezing=FrozenLayers(4, 4, FREE_S))
    running = with_full_memory(replace(pipelined(), jobs={"j": job}))
    dead = run_out_of_memory(update(running, report_frozen(9)).snapshot, peak_bytes=92_000_000_000)
    assert job_of(dead).curve_key == job_of(dead).next_curve_key == f"{KEY}/memory-115/frozen-9"
    assert job_of(dead).freezing.needs_new_plan
    assert {wanted.curve_key for wanted in decided(dead).wanted_shapes} == {f"{KEY}/memory-115/frozen-9"}
    late = update(dead, report_frozen(11), runs=()).snapshot
    assert job_of(late).freezing.layers == 9, "reports of failed workers are ignored"
