"""What the runtime needs of an executor, and nothing else."""

from __future__ import annotations

from typing import Protocol

from scheduler.domain.observation import Observation
from scheduler.domain.snapshot import Snapshot


class Executor(Protocol):
    """Makes the world like the desired state in a snapshot, level-triggered and idempotent.

    For each job, `job.allocation` says which generation of its workers belongs on which exact GPUs under which
    plan. A run of an older generation, or of a job without a target, is told to save and leave, and is killed at
    `allocation.leave_by_s`. A generation starts when the job's older runs have left, never beside them.
    """

    def observe(self) -> Observation:
        """What runs where. Ended runs are reported until a converge shows that the desired state has moved on."""

    def converge(self, desired: Snapshot) -> None:
        """Take the steps that are missing between what is and what `desired` says. Never waits for a process.

        Called once before the first tick of a controller's life, which heals a crash between commit and effect.
        """

    def close(self) -> None:
        """End what cannot outlive the controller. A local executor ends its processes; Kubernetes keeps its pods."""
