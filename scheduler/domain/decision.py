"""Decision: one complete change of the desired state, with its reason. Nothing is left for an executor to choose."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.domain.gpus import Gpus, Seats
from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.domain.reason import Reason


@dataclass(frozen=True, slots=True)
class StartJob:
    job_id: str
    gpus: Gpus
    plan: ParallelPlan
    reason: Reason


@dataclass(frozen=True, slots=True)
class ResizeJob:
    """Move the job to exactly `gpus` under `plan`. Workers that must go have until `leave_by_s`.

    Also a rearrangement (same GPUs, other plan) and a move (as many GPUs elsewhere). `seats`: the GPU of each rank,
    empty where the default order does.
    """

    job_id: str
    gpus: Gpus
    plan: ParallelPlan
    leave_by_s: float
    reason: Reason
    seats: Seats = ()


@dataclass(frozen=True, slots=True)
class PreemptJob:
    job_id: str
    leave_by_s: float
    reason: Reason


@dataclass(frozen=True, slots=True)
class SuspendRun:
    """Take a job's GPUs because its owner suspended it."""

    job_id: str
    leave_by_s: float
    reason: Reason


@dataclass(frozen=True, slots=True)
class StopJob:
    """End a job because its owner cancelled it."""

    job_id: str
    leave_by_s: float
    reason: Reason


@dataclass(frozen=True, slots=True)
class RejectJob:
    """End a job that can never run."""

    job_id: str
    reason: Reason


@dataclass(frozen=True, slots=True)
class LendNode:
    node: str
    reason: Reason


@dataclass(frozen=True, slots=True)
class RecallNode:
    node: str
    return_by_s: float
    reason: Reason


@dataclass(frozen=True, slots=True)
class CancelRecall:
    node: str
    reason: Reason


@dataclass(frozen=True, slots=True)
class ReturnNode:
    node: str
    reason: Reason


JobDecision = StartJob | ResizeJob | PreemptJob | SuspendRun | StopJob | RejectJob
NodeDecision = LendNode | RecallNode | CancelRecall | ReturnNode
Decision = JobDecision | NodeDecision


def subject(decision: Decision) -> str:
    """The job id or node name that the decision is about."""
    return decision.node if isinstance(decision, NodeDecision) else decision.job_id
