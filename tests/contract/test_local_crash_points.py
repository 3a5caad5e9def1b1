"""The controller is killed at every crash point of its executor; the next one recovers without orphans."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from scheduler.domain.observation import RunPhase
from scheduler.domain.snapshot import Snapshot
from scheduler.executors.local_executor import CRASH_POINTS, LocalExecutor
from scheduler.executors.local_run import find_marked_processes
from tests.contract.local_controller import NOW_S, OF_THE_CONTROLLER, committed, state
from tests.contract.local_rig import PATIENCE_S, RENDEZVOUS, drive, moved, phases

ROOT = Path(__file__).parents[2]
LEAVES_RANKS = ("between-two-spawns", "after-spawn", "before-notice", "after-notice", "before-kill", "during-a-save")


@pytest.mark.e2e
@pytest.mark.parametrize("point", [*CRASH_POINTS, *OF_THE_CONTROLLER])
def test_recovery_after_a_crash_at(point: str, tmp_path: Path) -> None:
    controller = [sys.executable, "-m", "tests.contract.local_controller", str(tmp_path), point]
    died = subprocess.run(controller, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert died.returncode == -signal.SIGKILL, died.stderr
    left_behind = find_marked_processes(tmp_path / "run")
    assert left_behind or point not in LEAVES_RANKS, "the scenario has to leave orphans at this point"

    executor = LocalExecutor(tmp_path / "run", now=lambda: NOW_S, rendezvous_command=RENDEZVOUS, preload=())
    begun = executor.observe()
    assert not find_marked_processes(tmp_path / "run"), "orphans are ended before anything is started"
    assert {run.phase for run in begun.runs} <= {RunPhase.LOST, RunPhase.LEFT}
    assert not any(run.gpus for run in begun.runs)

    wanted = state(committed(tmp_path), tmp_path)
    executor.converge(wanted)
    wanted = _next_generations(executor, wanted, tmp_path)
    goal = {(job.id, job.allocation.generation): "running" for job in wanted.jobs.values()}
    seen = drive(executor, wanted, lambda seen: goal.items() <= phases(seen).items())
    assert {(run.job_id, run.generation): run.gpus for run in seen.runs if run.gpus} == {
        (job.id, job.allocation.generation): job.allocation.target for job in wanted.jobs.values()
    }
    executor.close(grace_s=0.0)
    assert not find_marked_processes(tmp_path / "run")
    assert not (tmp_path / "double").exists(), "a slot was used by two at once"


def _next_generations(executor: LocalExecutor, wanted: Snapshot, folder: Path) -> Snapshot:
    """Give each job with a lost generation a new one, as the scheduler does."""
    ended = {(run.job_id, run.generation) for run in executor.observe().runs if not run.gpus and _is_over(run.phase)}
    jobs = {
        job.id: moved(job, job.allocation.target, leave_by_s=NOW_S, folder=folder)
        if (job.id, job.allocation.generation) in ended
        else job
        for job in wanted.jobs.values()
    }
    return replace(wanted, generation=wanted.generation + 1, jobs=jobs)


def _is_over(phase: RunPhase) -> bool:
    return phase in (RunPhase.LOST, RunPhase.LEFT)


@pytest.mark.e2e
def test_statuses_of_orphaned_ranks_count(tmp_path: Path) -> None:
    """The controller is killed while the ranks save. They finish saving and leave by themselves."""
    controller = [sys.executable, "-m", "tests.contract.local_controller", str(tmp_path), "during-a-save"]
    subprocess.run(controller, cwd=ROOT, capture_output=True, timeout=PATIENCE_S)
    status = tmp_path / "run/jobs/mover/gen-1/status-0.json"
    limit_s = time.monotonic() + PATIENCE_S
    while "left" not in status.read_text():
        assert time.monotonic() < limit_s
        time.sleep(0.02)
    executor = LocalExecutor(tmp_path / "run", now=lambda: NOW_S, rendezvous_command=RENDEZVOUS, preload=())
    runs = {(run.job_id, run.generation): run for run in executor.observe().runs}
    assert runs["mover", 1].phase is RunPhase.LEFT
    assert runs["mover", 1].checkpoint_steps == 7.0
    assert (runs["stayer", 1].phase, runs["stayer", 1].checkpoint_steps) == (RunPhase.LOST, 3.0)
    executor.close(grace_s=0.0)
