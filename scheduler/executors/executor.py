"""What the runtime needs of an executor, and nothing else.

RecordingExecutor: writes down what it was asked to do and does nothing. For dry runs and tests.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Protocol

from scheduler.domain.fleet import NodeState
from scheduler.domain.job import Job
from scheduler.domain.observation import NodeFacts, Observation, Run, RunPhase
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


class RecordingExecutor:
    """Observes a world exactly as the last desired state has it: every job runs on its target, whatever had to
    leave has left, inference has left the nodes that were offered. `converged` holds each state it was given."""

    def __init__(self, snapshot: Snapshot | None = None) -> None:
        self.converged_snapshots: list[Snapshot] = []
        self._world = snapshot or Snapshot()
        self._shown: dict[str, tuple[Job, Run]] = {}
        self._nodes: tuple[Snapshot, dict[str, NodeFacts]] | None = None

    def observe(self) -> Observation:
        """What nothing has happened to is the same object as before."""
        world, shown = self._world, self._shown
        placed = {job.id: job for job in world.jobs.values() if job.allocation.target}
        self._shown = {
            job_id: known
            if (known := shown.get(job_id)) and known[0] is job and known[1].steps is None
            else (job, _build_run(job, world.now_s))
            for job_id, job in placed.items()
        }
        if self._nodes is None or not _have_same_nodes(self._nodes[0], world):
            self._nodes = world, _build_node_facts(world)
        return Observation(world.now_s, world.generation, tuple(run for _, run in self._shown.values()), self._nodes[1])

    def converge(self, desired: Snapshot) -> None:
        self.converged_snapshots.append(desired)
        self._world = desired

    def close(self) -> None:
        """There is nothing to end."""


def _have_same_nodes(one: Snapshot, other: Snapshot) -> bool:
    return one.nodes is other.nodes and one.loans is other.loans


def _build_node_facts(snapshot: Snapshot) -> dict[str, NodeFacts]:
    return {
        node.name: NodeFacts(
            up=node.state is NodeState.UP,
            inference_gpus=0 if _is_on_loan(snapshot, node.name) else node.inference_gpus,
            other_gpus=node.other_gpus,
        )
        for node in snapshot.nodes.values()
    }


def _build_run(job: Job, now_s: float) -> Run:
    """It saves at once where it is asked to, and tells of its steps only then."""
    run = Run(job.id, job.allocation.generation, RunPhase.RUNNING, job.allocation.target)
    if job.pending_checkpoint_request is None:
        return run
    steps = max(1.0, math.floor(job.steps_at(now_s)))
    return replace(run, steps=steps, checkpoint_steps=steps)


def _is_on_loan(snapshot: Snapshot, node: str) -> bool:
    loan = snapshot.loans.get(node)
    return loan is not None and loan.is_live
