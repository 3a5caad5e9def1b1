"""SimulatedExecutor: what runs where and when, without a clock."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from scheduler.domain.checkpoints import CheckpointRequest, CheckpointSpec
from scheduler.domain.fleet import Loan, LoanState
from scheduler.domain.gpu_sets import Gpus
from scheduler.domain.job import Job
from scheduler.domain.job_state import Allocation
from scheduler.domain.observation import Run, RunPhase
from scheduler.domain.scaling_curve import build_data_parallel_plan
from scheduler.domain.snapshot import Snapshot
from scheduler.executors.simulated_executor import SimulatedExecutor
from scheduler.executors.simulated_run import Delays
from tests.builders import GPU, a_job, a_loan, a_node

NODES = (
    *(a_node(name, gpus=4) for name in ("t0", "t1")),
    *(a_node(name, "inference", gpus=4) for name in ("i0", "i1")),
)
DELAYS = Delays(start_s=20.0, reconfiguration_s=30.0, drain_s=60.0)
"""A save takes 10 s and a restart 20 s."""
TWO: Gpus = {"t0": (0, 1)}
FOUR: Gpus = {"t0": (0, 1, 2, 3)}


class Desired:
    """A desired state under construction. Each call creates and applies its next generation."""

    def __init__(self, executor: SimulatedExecutor) -> None:
        self.executor = executor
        self.snapshot = Snapshot(nodes={node.name: node for node in NODES})

    def job(self, job_id: str, target: Gpus, *, leave_by_s: float | None = None, **spec: Any) -> Job:
        old = self.snapshot.jobs.get(job_id, a_job(job_id, 1, 8, **spec))
        width = sum(map(len, target.values()))
        allocation = Allocation(
            generation=old.allocation.generation + 1,
            target=target,
            releasing=old.allocation.target,
            plan=build_data_parallel_plan(GPU, width) if width else None,
            leave_by_s=leave_by_s,
            asked_at_generation=self.snapshot.generation + 1,
        )
        job = replace(old, allocation=allocation)
        self.put(jobs={**self.snapshot.jobs, job_id: job})
        return job

    def put(self, jobs: Mapping[str, Job] | None = None, loans: Mapping[str, Loan] | None = None) -> None:
        before = self.snapshot
        self.snapshot = replace(
            before,
            generation=before.generation + 1,
            jobs=before.jobs if jobs is None else jobs,
            loans=before.loans if loans is None else loans,
        )
        self.executor.converge(self.snapshot)

    def loan(self, *loans: Loan) -> None:
        self.put(loans={loan.node: loan for loan in loans})


def planned_step_s(job: Job) -> float:
    assert job.allocation.plan is not None
    return job.allocation.plan.iteration_time_s


def world(factor: float = 1.0) -> tuple[SimulatedExecutor, Desired]:
    executor = SimulatedExecutor(NODES, delays=DELAYS, compute_step_s=lambda job: factor * planned_step_s(job))
    return executor, Desired(executor)


def runs(executor: SimulatedExecutor, at_s: float) -> list[Run]:
    executor.advance_to(at_s)
    return list(executor.observe().runs)


def test_new_job_starts_and_runs() -> None:
    executor, desired = world()
    desired.job("a", TWO)
    (starting,) = runs(executor, 19.0)
    assert (starting.phase, starting.generation, starting.gpus) == (RunPhase.STARTING, 1, TWO)
    assert executor.next_event_s() == 20.0
    (running,) = runs(executor, 30.0)
    assert (running.phase, running.steps) == (RunPhase.RUNNING, 20.0)


def test_job_completes_with_its_last_step() -> None:
    executor, desired = world()
    desired.job("a", FOUR, steps=1000)
    executor.advance_to(20.0)
    executor.observe()
    assert executor.next_event_s() == 270.0
    (run,) = runs(executor, 270.0)
    assert (run.phase, run.steps, run.gpus) == (RunPhase.SUCCEEDED, 1000.0, {})


def test_step_time_factor_applies_to_every_step() -> None:
    executor, desired = world(factor=1.5)
    desired.job("a", FOUR, steps=1000)
    executor.advance_to(20.0)
    executor.observe()
    assert executor.next_event_s() == 20.0 + 375.0
    (early,), (late,) = runs(executor, 50.0), runs(executor, 80.0)
    assert (early.steps, late.steps) == (80.0, 160.0)


def test_next_generation_starts_after_the_older_one_left() -> None:
    executor, desired = world()
    desired.job("a", TWO)
    executor.advance_to(120.0)
    desired.job("a", FOUR, leave_by_s=200.0)
    (leaving,) = runs(executor, 125.0)
    assert (leaving.phase, leaving.generation, leaving.gpus) == (RunPhase.LEAVING, 1, TWO)
    left, starting = runs(executor, 130.0)
    assert (left.phase, left.steps, left.checkpoint_steps, left.gpus) == (RunPhase.LEFT, 200.0, 200.0, {})
    assert (starting.phase, starting.generation, starting.gpus) == (RunPhase.STARTING, 2, FOUR)
    executor.advance_to(151.0)
    assert executor.observe().runs[-1].steps == 204.0


def test_slow_save_is_killed_at_the_deadline() -> None:
    executor, desired = world()
    desired.job("a", TWO, checkpoint=CheckpointSpec(interval_s=40.0))
    executor.advance_to(120.0)
    assert executor.delay_save("a", 100.0)
    desired.job("a", {}, leave_by_s=150.0)
    (leaving,) = runs(executor, 149.0)
    (lost,) = runs(executor, 150.0)
    assert (leaving.phase, lost.phase, lost.gpus) == (RunPhase.LEAVING, RunPhase.LOST, {})
    assert lost.checkpoint_steps == 160.0, "restarts from the checkpoint at 100 s"
    (work,) = executor.work
    assert (work.since_s, work.kept_until_s, work.until_s) == (20.0, 100.0, 120.0)


GIB = 2**30
STORAGE = replace(DELAYS, storage_bytes_per_s=GIB, checkpoint_bytes={"a": 30 * GIB})
"""A save on one node takes 40 s and a restart 50 s; on two nodes 25 s and 35 s."""


def stored_world() -> tuple[SimulatedExecutor, Desired]:
    executor = SimulatedExecutor(NODES, delays=STORAGE)
    return executor, Desired(executor)


def test_bytes_of_the_checkpoint_are_saved_and_loaded_by_all_nodes_together() -> None:
    executor, desired = stored_world()
    desired.job("a", TWO)
    executor.advance_to(120.0)
    desired.job("a", {"t0": (0,), "t1": (0,)}, leave_by_s=200.0)
    assert [run.phase for run in runs(executor, 159.0)] == [RunPhase.LEAVING]
    assert [run.phase for run in runs(executor, 160.0)] == [RunPhase.LEFT, RunPhase.STARTING]
    assert runs(executor, 196.0)[-1].phase is RunPhase.RUNNING
    assert runs(executor, 197.0)[-1].steps == 204.0, "35 s after the old workers left"
    desired.job("a", {}, leave_by_s=400.0)
    assert [run.phase for run in runs(executor, 221.0)][-1] is RunPhase.LEAVING
    assert [run.phase for run in runs(executor, 222.0)][-1] is RunPhase.LEFT


def test_save_that_takes_longer_than_the_notice_is_incomplete() -> None:
    executor, desired = stored_world()
    desired.job("a", TWO, checkpoint=CheckpointSpec(interval_s=40.0))
    executor.advance_to(120.0)
    desired.job("a", {}, leave_by_s=150.0)
    (lost,) = runs(executor, 150.0)
    assert (lost.phase, lost.checkpoint_steps) == (RunPhase.LOST, 80.0)
    (work,) = executor.work
    assert (work.kept_until_s, work.until_s, work.is_save_incomplete) == (60.0, 120.0, True)


def test_periodic_checkpoint_counts_once_its_bytes_are_written() -> None:
    executor, desired = stored_world()
    desired.job("a", TWO, checkpoint=CheckpointSpec(interval_s=40.0))
    executor.advance_to(20.0)
    executor.observe()
    desired.put()
    executor.observe()
    assert [run.checkpoint_steps for run in runs(executor, 89.0)] == [0.0]
    assert [run.checkpoint_steps for run in runs(executor, 90.0)] == [80.0]
    assert executor.crash_job("a")
    assert executor.work[0].is_save_incomplete is False


def test_workers_stop_at_a_step_boundary() -> None:
    executor, desired = world()
    desired.job("a", {"t0": (0,)})
    executor.advance_to(50.4)
    desired.job("a", {}, leave_by_s=200.0)
    assert executor.next_event_s() == 50.4, "leaving is a change"
    executor.observe()
    assert executor.next_event_s() == pytest.approx(61.0)
    (left,) = runs(executor, 61.0)
    assert (left.phase, left.steps) == (RunPhase.LEFT, 31.0)


def test_job_leaving_in_its_last_step_succeeds() -> None:
    executor, desired = world()
    desired.job("a", {"t0": (0,)}, steps=100)
    executor.advance_to(119.5)
    desired.job("a", FOUR, leave_by_s=200.0)
    seen = runs(executor, 120.0)
    assert [run.phase for run in seen] == [RunPhase.SUCCEEDED]
    assert [run.phase for run in runs(executor, 500.0)] == [RunPhase.SUCCEEDED], "no generation follows it"


def test_unstarted_run_leaves_at_once() -> None:
    executor, desired = world()
    desired.job("a", TWO)
    executor.advance_to(5.0)
    desired.job("a", {}, leave_by_s=100.0)
    (run,) = runs(executor, 5.0)
    assert (run.phase, run.steps) == (RunPhase.LEFT, 0.0)


def test_ended_run_is_reported_until_the_state_moves_on() -> None:
    executor, desired = world()
    desired.job("a", TWO)
    executor.advance_to(60.0)
    assert executor.crash_job("a")
    for _ in range(2):
        assert [run.phase for run in runs(executor, 60.0)] == [RunPhase.FAILED]
        desired.put()
    desired.job("a", FOUR)
    assert [(run.phase, run.generation) for run in runs(executor, 60.0)] == [(RunPhase.STARTING, 2)]


def test_unobserved_end_is_still_reported() -> None:
    executor, desired = world()
    desired.job("a", TWO)
    executor.advance_to(60.0)
    assert executor.crash_job("a")
    desired.job("a", FOUR)
    assert [run.phase for run in runs(executor, 60.0)] == [RunPhase.FAILED, RunPhase.STARTING]


def test_crash_restarts_from_the_last_checkpoint() -> None:
    executor, desired = world()
    desired.job("a", TWO, checkpoint=CheckpointSpec(interval_s=100.0))
    executor.advance_to(330.0)
    assert executor.crash_job("a")
    (failed,) = runs(executor, 330.0)
    assert (failed.steps, failed.checkpoint_steps) == (620.0, 600.0)
    desired.job("a", FOUR)
    executor.advance_to(351.0)
    assert executor.observe().runs[-1].steps == 604.0


def test_failed_node_loses_its_runs() -> None:
    executor, desired = world()
    desired.job("a", {"t0": (0,), "t1": (0,)})
    desired.job("b", {"t0": (1,)})
    executor.advance_to(60.0)
    executor.fail_node("t1")
    phases = {run.job_id: run.phase for run in runs(executor, 60.0)}
    assert phases == {"a": RunPhase.LOST, "b": RunPhase.RUNNING}
    assert not executor.observe().nodes["t1"].up
    desired.job("c", {"t1": (0,)})
    assert RunPhase.LOST in [run.phase for run in runs(executor, 60.0) if run.job_id == "c"]
    executor.restore_node("t1")
    assert executor.observe().nodes["t1"].up


def test_removed_job_is_ended() -> None:
    executor, desired = world()
    desired.job("a", TWO)
    executor.advance_to(60.0)
    desired.put(jobs={})
    assert runs(executor, 60.0) == []
    assert executor.occupied_gpus == 0


def test_converge_is_idempotent() -> None:
    executor, desired = world()
    desired.job("a", TWO)
    executor.converge(desired.snapshot)
    assert len(runs(executor, 0.0)) == 1
    assert executor.occupied_gpus == 2


def test_unchanged_run_reports_no_steps() -> None:
    executor, desired = world()
    desired.job("a", TWO, checkpoint=CheckpointSpec(interval_s=100.0))
    assert runs(executor, 60.0)[0].steps == 80.0
    desired.put()
    steady = runs(executor, 70.0)[0]
    assert steady.steps is None
    assert runs(executor, 80.0)[0] is steady
    news = runs(executor, 121.0)[0]
    assert (news.steps, news.checkpoint_steps) == (202.0, 200.0)


def test_changes_are_reported_until_committed() -> None:
    executor, desired = world()
    desired.job("a", TWO)
    assert runs(executor, 60.0)[0].steps == 80.0
    executor.converge(desired.snapshot)
    assert runs(executor, 61.0)[0].steps == 82.0


def test_inference_fills_nodes_in_order_and_drains_offered_ones() -> None:
    executor, desired = world()
    executor.set_demand("inference", 4.5)
    facts = executor.observe().nodes
    assert [facts[name].inference_gpus for name in ("i0", "i1", "t0")] == [4, 1, 0]
    desired.loan(a_loan("i1", LoanState.OFFERED))
    assert executor.observe().nodes["i1"].inference_gpus == 1
    assert executor.next_event_s() == 60.0
    executor.advance_to(60.0)
    assert executor.observe().nodes["i1"].inference_gpus == 0
    desired.loan(replace(a_loan("i1", LoanState.OFFERED), state=LoanState.ACTIVE))
    executor.set_demand("inference", 8.0)
    assert executor.observe().nodes["i1"].inference_gpus == 0, "a lent node takes no inference"
    desired.loan()
    assert executor.observe().nodes["i1"].inference_gpus == 4


def test_idle_node_is_free_when_offered() -> None:
    executor, desired = world()
    executor.set_demand("inference", 2.0)
    executor.observe()
    desired.loan(a_loan("i1", LoanState.OFFERED))
    assert executor.next_event_s() == 0.0, "the control loop should look at once"
    assert executor.observe().nodes["i1"].inference_gpus == 0


def test_release_of_free_gpus_is_a_change() -> None:
    executor, desired = world()
    desired.job("a", TWO, steps=100)
    executor.advance_to(70.0)
    executor.observe()
    assert executor.next_event_s() == math.inf
    desired.job("a", {}, leave_by_s=70.0)
    assert executor.next_event_s() == 70.0
    assert executor.observe().converged_generation == desired.snapshot.generation


def test_time_cannot_go_back() -> None:
    executor, _ = world()
    executor.advance_to(10.0)
    with pytest.raises(ValueError, match="now_s is"):
        executor.advance_to(9.0)


def test_unknown_node_is_rejected() -> None:
    executor, _ = world()
    with pytest.raises(ValueError, match="'t9'"):
        executor.fail_node("t9")


def test_repeated_leave_is_a_change_only_with_a_new_deadline() -> None:
    executor, desired = world()
    desired.job("a", TWO)
    executor.advance_to(120.0)
    leaving = desired.job("a", {}, leave_by_s=200.0)
    executor.observe()
    desired.put(jobs={"a": replace(leaving, message="settled meanwhile")})
    executor.observe()
    assert executor.next_event_s() == 130.0
    earlier = replace(leaving, allocation=replace(leaving.allocation, leave_by_s=125.0))
    desired.put(jobs={"a": earlier})
    executor.observe()
    assert executor.next_event_s() == 125.0
    assert [run.phase for run in runs(executor, 125.0)] == [RunPhase.LOST]


def test_requested_checkpoint_is_kept() -> None:
    executor = SimulatedExecutor(NODES, delays=DELAYS)
    desired = Desired(executor)
    job = desired.job("a", TWO, checkpoint=CheckpointSpec(interval_s=1e6), steps=10_000)
    executor.advance_to(100.0)
    (seen,) = executor.observe().runs
    assert (seen.checkpoint_steps, seen.steps is None) == (0.0, False)
    wish = CheckpointRequest(100.0, job.allocation.generation, steps=seen.steps)
    for _ in range(2):  # converge is idempotent
        desired.put(jobs={"a": replace(job, save_wish=wish)})
    executor.advance_to(110.0)
    (saved,) = executor.observe().runs
    assert saved.checkpoint_steps == math.ceil(seen.steps or 0.0)
    executor.advance_to(200.2)
    desired.put(jobs={"a": replace(job, save_wish=replace(wish, asked_at_s=200.2))})
    assert executor.observe().runs[0].checkpoint_steps == saved.checkpoint_steps
    assert executor.crash_job("a")
    assert executor.observe().runs[0].checkpoint_steps == saved.checkpoint_steps
