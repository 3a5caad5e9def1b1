"""Shared code of the local executor's contract tests: tiny jobs, their desired states, and a driver loop."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from scheduler.domain import gpu_sets
from scheduler.domain.gpu_sets import Gpus
from scheduler.domain.job import Job
from scheduler.domain.job_state import Allocation, JobState
from scheduler.domain.observation import Observation, Run
from scheduler.domain.scaling_curve import build_data_parallel_plan
from scheduler.domain.snapshot import Snapshot
from scheduler.executors.local_executor import LocalExecutor
from tests.builders import GPU, a_fleet, a_job, a_snapshot

RANK_SCRIPT = Path(__file__).with_name("local_rank.py")
# A stand-in for the rendezvous store: it publishes a port and lives until its stdin closes.
RENDEZVOUS = (
    sys.executable,
    "-SEc",
    "import os, sys; part = sys.argv[2] + '.new'; open(part, 'w').write('29500'); "
    "os.rename(part, sys.argv[2]); sys.stdin.read()",
)
FLEET = a_fleet(training=2, inference=2, gpus_per_node=4)
PATIENCE_S = 60.0


def rank_job(job_id: str, behavior: str, on: Gpus, folder: Path, **env: str) -> Job:
    """Build a job whose ranks run `local_rank.py` with `behavior`."""
    command = ("python", str(RANK_SCRIPT), behavior)
    job = a_job(job_id, 1, 8, state=JobState.STARTING, on=on, command=command, env=env)
    return _with_slots(job, folder)


def moved(job: Job, to: Gpus, *, leave_by_s: float, folder: Path) -> Job:
    """Return the job with its next generation on other GPUs, or none."""
    width = gpu_sets.count(to)
    allocation = Allocation(
        generation=job.allocation.generation + 1,
        target=to,
        releasing=gpu_sets.difference(job.allocation.held, to),
        plan=build_data_parallel_plan(GPU, width) if width else None,
        leave_by_s=leave_by_s,
    )
    return _with_slots(replace(job, allocation=allocation), folder)


def desired(generation: int, *jobs: Job) -> Snapshot:
    return replace(a_snapshot(FLEET, jobs), generation=generation)


def drive(executor: LocalExecutor, state: Snapshot, until: Callable[[Observation], bool]) -> Observation:
    """Observe and converge, like ticks, until the observation matches."""
    limit_s = time.monotonic() + PATIENCE_S
    while not until(seen := executor.observe()):
        assert time.monotonic() < limit_s, f"not reached within {PATIENCE_S:g} s; last seen: {seen.runs}"
        executor.converge(state)
        time.sleep(0.01)
    return seen


def run_of(seen: Observation, job_id: str, generation: int = 1) -> Run:
    found = [run for run in seen.runs if (run.job_id, run.generation) == (job_id, generation)]
    assert len(found) == 1, f"expected one run {job_id}/{generation} in {seen.runs}"
    return found[0]


def phases(seen: Observation) -> dict[tuple[str, int], str]:
    return {(run.job_id, run.generation): run.phase.value for run in seen.runs}


def _with_slots(job: Job, folder: Path) -> Job:
    slots = [f"{node}-{gpu}" for node in sorted(job.allocation.target) for gpu in job.allocation.target[node]]
    # Lent nodes sort before owned ones by name here, but ranks are assigned to owned ones first.
    slots.sort(key=lambda slot: not slot.startswith("t"))
    env = {**job.spec.env, "SLOT_DIR": str(folder), "SLOTS": ",".join(slots)}
    return replace(job, spec=replace(job.spec, env=env))
