"""ReportRecorder on hand-written ticks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from scheduler.domain.decisions import Decision, PreemptJob, Reason, ReasonCode, RejectJob, ResizeJob
from scheduler.domain.fleet import Forecast, LoanState
from scheduler.domain.gpu_sets import Gpus
from scheduler.domain.job import Job
from scheduler.domain.job_state import JobState
from scheduler.domain.scaling_curve import build_data_parallel_plan
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.tick_report import TickReport
from scheduler.executors.simulated_run import Delays, RunWork
from scheduler.scheduling.policies.settings import PolicySettings
from scheduler.simulator.demand import DemandChange
from scheduler.simulator.engine import Scenario, TickRecord
from scheduler.simulator.recorder import ReportRecorder
from scheduler.simulator.report import PolicyReport
from scheduler.simulator.workloads import Submission
from tests.builders import GPU, a_fleet, a_job, a_loan, a_snapshot, a_spec

FLEET = a_fleet(training=1, inference=1, gpus_per_node=4)
SPREAD: Gpus = {"t0": (0, 1), "i0": (0, 1, 2)}
SCENARIO = Scenario(
    pools=tuple(FLEET[0].values()),
    nodes=tuple(FLEET[1].values()),
    submissions=tuple(Submission(at_s, f"job-{at_s:.0f}", a_spec(2), 2, 10.0) for at_s in (0.0, 100.0)),
    demand=(),
    delays=Delays(),
    seed=0,
)
FORECAST = Forecast(100.0, 600.0, (0.5, 0.999), (2.0, 3.5), "seasonal")
RECALL = Reason(ReasonCode.NODE_RECALLED, "inference needs i0 back")


def make_snapshot(*jobs: Job, now_s: float = 0.0) -> Snapshot:
    loan = a_loan("i0", LoanState.RECALLED, return_by_s=300.0)
    return replace(a_snapshot(FLEET, jobs, [loan]), now_s=now_s)


def make_tick(
    before: Snapshot, after: Snapshot, *decisions: Decision, waiting: str = "", occupied: int = 0
) -> TickRecord:
    report = TickReport(
        generation=1,
        now_s=after.now_s,
        decisions=decisions,
        violations=(),
        breaches=(),
        waiting={waiting: Reason(ReasonCode.INSUFFICIENT_GPUS, "too few")} if waiting else {},
        wanted_shapes=(),
        events=(),
        next_wake_s=0.0,
        full_pass=False,
        committed=True,
    )
    return TickRecord(before, after, report, occupied, wall_s=0.001)


def build_report(*ticks: TickRecord, work: tuple[RunWork, ...] = (), ended: tuple[Job, ...] = ()) -> PolicyReport:
    recorder = ReportRecorder(SCENARIO, PolicySettings())
    for tick in ticks:
        recorder.on_tick(tick)
    last = ticks[-1].after if ticks else Snapshot(pools=FLEET[0], nodes=FLEET[1])
    report, _ = recorder.build_report("fifo", last, ended, work)
    return report


def test_collateral_gpus_are_given_up_on_other_nodes() -> None:
    before = make_snapshot(a_job("a", 4, 8, state=JobState.RUNNING, on=SPREAD))
    preempted = make_tick(before, before, PreemptJob("a", 300.0, RECALL))
    shrunk = make_tick(before, before, ResizeJob("a", {"t0": (0, 1)}, build_data_parallel_plan(GPU, 2), 300.0, RECALL))
    assert build_report(preempted).collateral_gpus == 2
    assert build_report(shrunk).collateral_gpus == 0
    for_room = Reason(ReasonCode.MAKES_ROOM_FOR_WAITING_JOB, "somebody waits")
    assert build_report(make_tick(before, before, PreemptJob("a", 300.0, for_room))).collateral_gpus == 0


def test_idle_gpus_count_only_while_a_job_waits() -> None:
    waiting, nobody = make_snapshot(a_job("b", 4)), make_snapshot(now_s=50.0)
    first = make_tick(waiting, waiting, waiting="b", occupied=1)
    assert build_report(first, make_tick(waiting, nobody)).idle_while_waiting_gpu_hours == pytest.approx(3 * 50 / 3600)
    assert (
        build_report(
            make_tick(waiting, nobody), make_tick(nobody, make_snapshot(now_s=90.0))
        ).idle_while_waiting_gpu_hours
        == 0.0
    )


def test_work_is_split_into_kept_and_lost() -> None:
    work = (RunWork("a", SPREAD, since_s=0.0, until_s=80.0, kept_until_s=60.0),)
    report = build_report(work=work)
    assert report.lost_gpu_hours == pytest.approx(5 * 20 / 3600)
    assert report.lost_ratio == pytest.approx(20 / 80)
    assert report.usage_ratio.training == pytest.approx(2 * 60 / (4 * 100))
    assert report.usage_ratio.inference == pytest.approx(3 * 60 / (4 * 100))
    assert report.usage_ratio.overall == pytest.approx(5 * 60 / (8 * 100))


def test_work_after_the_last_submission_does_not_count_as_usage() -> None:
    work = (RunWork("a", {"t0": (0,)}, since_s=90.0, until_s=500.0, kept_until_s=500.0),)
    assert build_report(work=work).usage_ratio.training == pytest.approx(10 / 400)


def test_incomplete_jobs_have_no_completion_time() -> None:
    done = replace(a_job("a", 2, state=JobState.SUCCEEDED), state_since_s=70.0)
    failed = replace(a_job("b", 2, state=JobState.FAILED), state_since_s=30.0)
    report = build_report(ended=(done, failed))
    assert (report.jobs, report.completed, report.makespan_s, report.jct_s.mean) == (2, 1, 70.0, 70.0)


def test_only_jobs_completed_in_time_meet_their_deadline() -> None:
    done = [
        replace(a_job(name, 2, state=JobState.SUCCEEDED, deadline_s=60.0), state_since_s=at_s)
        for name, at_s in (("a", 60.0), ("b", 61.0))
    ]
    failed = replace(a_job("c", 2, state=JobState.FAILED, deadline_s=60.0), state_since_s=5.0)
    free = replace(a_job("d", 2, state=JobState.SUCCEEDED), state_since_s=900.0)
    assert build_report(ended=(*done, failed, free)).deadlines_met_ratio == pytest.approx(1 / 3)
    assert build_report(ended=(free,)).deadlines_met_ratio is None


def test_rejected_jobs_are_counted() -> None:
    late = Reason(ReasonCode.DEADLINE_UNREACHABLE, "no share of the cluster meets it")
    before = make_snapshot(a_job("a", 2))
    assert build_report(make_tick(before, before, RejectJob("a", late))).rejected == 1


def test_series_follow_queue_loans_demand_and_forecast() -> None:
    recorder = ReportRecorder(SCENARIO, PolicySettings())
    recorder.on_demand_change(DemandChange(0.0, "inference", 3.0))
    alone = replace(a_snapshot(FLEET, [], []), now_s=0.0)
    waiting = replace(make_snapshot(a_job("a", 2), a_job("b", 2), now_s=100.0), forecasts={"inference": FORECAST})
    recorder.on_tick(make_tick(alone, alone))
    recorder.on_tick(make_tick(alone, waiting))
    recorder.on_demand_change(DemandChange(150.0, "inference", 9.0))
    _, series = recorder.build_report("fifo", replace(waiting, now_s=200.0), (), ())
    halves = [np.reshape(values, (2, -1)).mean(axis=1).tolist() for values in (series.queued_jobs, series.lent_nodes)]
    assert halves == [[0.0, 2.0], [0.0, 1.0]]
    assert np.reshape(series.demand_gpus, (4, -1)).mean(axis=1).tolist() == [3.0, 3.0, 3.0, 4.0]
    assert np.reshape(series.forecast_gpus, (2, -1)).mean(axis=1).tolist() == [3.0, 3.5]
    assert (series.inference_gpus, series.inference_nodes, series.submitting_s) == (4.0, 1, 100.0)
    assert series.inference_usage_ratio == pytest.approx([gpus / 4 for gpus in series.demand_gpus])
