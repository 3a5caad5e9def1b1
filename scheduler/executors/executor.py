"""The executor protocol, and RecordingExecutor for dry runs and tests."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from typing import Protocol

from scheduler.domain.fleet import Node, NodeState
from scheduler.domain.job import Job
from scheduler.domain.observation import NodeFacts, Observation, Run, RunPhase
from scheduler.domain.placement_record import TemplateReview, VolumeFacts
from scheduler.domain.snapshot import Snapshot


class Executor(Protocol):
    """Interface that makes the cluster match the desired state. Level-triggered and idempotent.

    `job.allocation` states which generation of a job's workers belongs on which GPUs under which plan. Runs of older
    generations, and of jobs without a target, are asked to save and leave, and are killed at `allocation.leave_by_s`. A
    generation starts only after the job's older runs have left.
    """

    def observe(self) -> Observation:
        """Return the runs and their nodes.

        Ended runs are reported until a converge shows that the state has moved on.
        """

    def converge(self, desired: Snapshot) -> None:
        """Take the missing steps towards `desired`, without waiting for processes.

        Called once before a controller's first tick, which recovers from a crash between commit and execution.
        """

    def close(self) -> None:
        """Release resources that cannot outlive the controller.

        Local executors end processes. Kubernetes keeps pods.
        """


class RecordingExecutor:
    """Executor that does nothing, and observes a cluster that matches the last desired state.

    Every job runs on its target, leaving jobs have left, and offered nodes are drained. `converged_snapshots` records
    all desired states. The pods of the jobs `accepted` are accepted, and their volumes can be mounted everywhere.
    """

    def __init__(self, snapshot: Snapshot | None = None, *, accepted: Collection[str] = ()) -> None:
        self._accepted = tuple(accepted)
        self.converged_snapshots: list[Snapshot] = []
        self._snapshot = snapshot or Snapshot()
        self._last_runs: dict[str, tuple[Job, Run]] = {}
        self._nodes: tuple[Snapshot, dict[str, NodeFacts]] | None = None

    def observe(self) -> Observation:
        """Return the observation. Unchanged runs and nodes are the same objects as before."""
        snapshot, last_runs = self._snapshot, self._last_runs
        placed = {job.id: job for job in snapshot.jobs.values() if job.allocation.target}
        self._last_runs = {
            job_id: last
            if (last := last_runs.get(job_id)) and last[0] is job and last[1].steps is None
            else (job, _build_run(job, snapshot.now_s))
            for job_id, job in placed.items()
        }
        if self._nodes is None or not _have_same_nodes(self._nodes[0], snapshot):
            self._nodes = snapshot, _build_node_facts(snapshot)
        return Observation(
            snapshot.now_s,
            snapshot.generation,
            tuple(run for _, run in self._last_runs.values()),
            self._nodes[1],
            dict.fromkeys(self._accepted, VolumeFacts()),
            dict.fromkeys(self._accepted, TemplateReview()),
        )

    def converge(self, desired: Snapshot) -> None:
        self.converged_snapshots.append(desired)
        self._snapshot = desired

    def close(self) -> None:
        """Do nothing: there are no processes."""


def _have_same_nodes(first: Snapshot, second: Snapshot) -> bool:
    return first.nodes is second.nodes and first.loans is second.loans


def _build_node_facts(snapshot: Snapshot) -> dict[str, NodeFacts]:
    return {
        node.name: NodeFacts(
            up=node.state is NodeState.UP,
            inference_gpus=min(node.inference_gpus, _count_serving_gpus(snapshot, node)),
            other_gpus=node.other_gpus,
        )
        for node in snapshot.nodes.values()
    }


def _build_run(job: Job, now_s: float) -> Run:
    """Return the job's run. Requested checkpoints complete at once, and only then are steps reported."""
    run = Run(job.id, job.allocation.generation, RunPhase.RUNNING, job.allocation.target)
    if job.pending_checkpoint_request is None:
        return run
    steps = max(1.0, math.floor(job.steps_at(now_s)))
    return replace(run, steps=steps, checkpoint_steps=steps)


def _count_serving_gpus(snapshot: Snapshot, node: Node) -> int:
    """Return the GPUs of the node that its loan, if any, leaves to inference."""
    loan = snapshot.loans.get(node.name)
    return node.gpus if loan is None or not loan.is_in_effect else loan.count_kept_gpus(node)
