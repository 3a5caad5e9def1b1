"""Command: something that was asked for or reported, waiting in the inbox for the next tick.

Whoever is not the leader's tick changes nothing else. `id` makes a command idempotent: the inbox takes each
id once.
"""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.domain.fleet import Forecast, LendingPolicy, Node, Pool
from scheduler.domain.gpu_sets import GpuShape
from scheduler.domain.job import JobSpec
from scheduler.domain.job_queue import JobQueue
from scheduler.domain.parallel_plan import ParallelPlan


@dataclass(frozen=True, slots=True)
class SubmitJob:
    job_id: str
    spec: JobSpec


@dataclass(frozen=True, slots=True)
class CancelJob:
    job_id: str


@dataclass(frozen=True, slots=True)
class SuspendJob:
    job_id: str


@dataclass(frozen=True, slots=True)
class ResumeJob:
    job_id: str


@dataclass(frozen=True, slots=True)
class CheckpointJob:
    """Its workers save at the next step boundary, and go on."""

    job_id: str


@dataclass(frozen=True, slots=True)
class ScaleJob:
    job_id: str
    min_gpus: int
    max_gpus: int


@dataclass(frozen=True, slots=True)
class ChangeJob:
    """What is None stays as it is."""

    job_id: str
    queue: str | None = None
    priority: int | None = None
    min_gpus: int | None = None
    max_gpus: int | None = None


@dataclass(frozen=True, slots=True)
class ReportProgress:
    """A worker's word on its job. Reports of another generation than the job's present one are dropped.

    `frozen_layers`: so many of the first layers are frozen from now on; None: as many as before.
    """

    job_id: str
    generation: int
    steps: float
    loss: float | None = None
    checkpoint_steps: float | None = None
    samples_per_s: float | None = None
    peak_bytes: int | None = None
    frozen_layers: int | None = None


@dataclass(frozen=True, slots=True)
class CreatePool:
    pool: Pool


@dataclass(frozen=True, slots=True)
class DeletePool:
    name: str


@dataclass(frozen=True, slots=True)
class SetLendingPolicy:
    pool: str
    lending: LendingPolicy


@dataclass(frozen=True, slots=True)
class CreateQueue:
    queue: JobQueue


@dataclass(frozen=True, slots=True)
class ChangeQueue:
    """`queue` takes the place of the declared queue of its name."""

    queue: JobQueue


@dataclass(frozen=True, slots=True)
class DeleteQueue:
    """Its jobs stay, without guarantee and without limit."""

    name: str


@dataclass(frozen=True, slots=True)
class AddNode:
    node: Node


@dataclass(frozen=True, slots=True)
class RemoveNode:
    name: str


@dataclass(frozen=True, slots=True)
class CordonNode:
    """`drain` also moves the node's jobs away."""

    name: str
    drain: bool = False


@dataclass(frozen=True, slots=True)
class UncordonNode:
    name: str


@dataclass(frozen=True, slots=True)
class ReportDemand:
    """How many GPUs a pool's inference needs from now on (a step function)."""

    pool: str
    gpus: float


@dataclass(frozen=True, slots=True)
class PauseLending:
    """No new loans; the ones that run go on."""


@dataclass(frozen=True, slots=True)
class ResumeLending:
    pass


@dataclass(frozen=True, slots=True)
class RecallAll:
    """Every loan is recalled and lending pauses."""


@dataclass(frozen=True, slots=True)
class FreezeResizes:
    frozen: bool


@dataclass(frozen=True, slots=True)
class CurveSolved:
    """One point of a scaling curve: a plan, or why no plan can work on that shape."""

    curve_key: str
    shape: GpuShape
    plan: ParallelPlan | None
    infeasible: str = ""


@dataclass(frozen=True, slots=True)
class SolverChanged:
    """Points that another solver than the one of this fingerprint has solved are worth nothing any more."""

    solver: str


@dataclass(frozen=True, slots=True)
class ForecastMade:
    pool: str
    forecast: Forecast


CommandBody = (
    SubmitJob
    | CancelJob
    | SuspendJob
    | ResumeJob
    | CheckpointJob
    | ScaleJob
    | ChangeJob
    | ReportProgress
    | CreatePool
    | DeletePool
    | SetLendingPolicy
    | CreateQueue
    | ChangeQueue
    | DeleteQueue
    | AddNode
    | RemoveNode
    | CordonNode
    | UncordonNode
    | ReportDemand
    | PauseLending
    | ResumeLending
    | RecallAll
    | FreezeResizes
    | CurveSolved
    | SolverChanged
    | ForecastMade
)


@dataclass(frozen=True, slots=True)
class Command:
    """`basis`: the tag (core/preconditions) of what it changes, as whoever asked had read it: it is refused where that
    has another one when it is obeyed. Empty: it is meant whatever has happened since. `is_counted`: a job that it
    brings into a queue counts against the queue's `user_jobs_max`."""

    id: str
    at_s: float
    body: CommandBody
    actor: str = ""
    basis: str = ""
    is_counted: bool = False
