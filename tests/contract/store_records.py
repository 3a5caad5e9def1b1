"""Records and commits for the contract tests of stores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from scheduler.domain.job import Intent, Job, Progress
from scheduler.domain.job_account import JobAccount
from scheduler.domain.job_spec import JobSpec
from scheduler.domain.job_state import Allocation, JobState
from scheduler.domain.scaling_curve import build_data_parallel_plan
from scheduler.domain.snapshot import Snapshot
from scheduler.store.api_protocol import ApiStore
from scheduler.store.protocol import Commit, Store

OpenStore = Callable[[], ApiStore]


def make_stored_job(number: int, state: JobState) -> Job:
    plan = build_data_parallel_plan("a100-80g", 2)
    spec = JobSpec(f"j{number}", 1, 4, env={"SEED": str(number)}, command=("python", "train.py"))
    allocation = Allocation(3, {"t0": (0, 1)}, {"i0": (2,)}, plan, leave_by_s=90.5, asked_at_generation=7)
    allocation = replace(allocation, seats=(("t0", 1), ("t0", 0)))
    account = JobAccount(waited_s=5.0, first_started_at_s=None, failures=1)
    return Job(
        f"job-{number}", spec, state, 1.5, 2.5, Progress(3.5, loss=0.25), account, allocation, Intent.SUSPEND, "so"
    )


def make_next_snapshot(previous: Snapshot, **changes: Any) -> Snapshot:
    return replace(previous, generation=previous.generation + 1, **changes)


def commit_next(store: Store, **changes: Any) -> Snapshot:
    """Commit an otherwise unchanged snapshot with the epoch of a lease that was never acquired."""
    previous = store.load().snapshot
    snapshot = make_next_snapshot(previous, **changes)
    store.commit(Commit(previous, snapshot, epoch=0))
    return snapshot
