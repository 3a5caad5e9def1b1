"""Commands: requests and reports that wait in the inbox for the next tick.

Only the leader's tick changes state. The inbox accepts each command id once, so commands are idempotent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from scheduler.domain.demand_source import PrometheusDemand
from scheduler.domain.fleet import Forecast, Node, Pool, PoolNetwork
from scheduler.domain.gpu_sets import GpuShape
from scheduler.domain.job_queue import JobQueue
from scheduler.domain.job_spec import JobSpec
from scheduler.domain.lending_policy import LendingPolicy
from scheduler.domain.owner_ids import derive_owner_id
from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.domain.serving import ModelLoad, ServedModel


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
    """Ask the workers to save a checkpoint at the next step boundary and continue."""

    job_id: str


@dataclass(frozen=True, slots=True)
class ScaleJob:
    job_id: str
    min_gpus: int
    max_gpus: int


@dataclass(frozen=True, slots=True)
class ChangeJob:
    """Change the fields that are not None. `labels` are merged with the job's; a label that is None is removed."""

    job_id: str
    queue: str | None = None
    priority: int | None = None
    min_gpus: int | None = None
    max_gpus: int | None = None
    labels: Mapping[str, str | None] | None = None


@dataclass(frozen=True, slots=True)
class ReportProgress:
    """Report of a worker about its job. Reports of other generations than the current one are dropped.

    `frozen_layers` is the number of leading layers that are frozen from now on, or None if unchanged.
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
class SetPoolNetwork:
    """Set the network between the nodes of a pool. None: that of the GPU profiles."""

    pool: str
    network: PoolNetwork | None


@dataclass(frozen=True, slots=True)
class SetServedModels:
    """Replace the models that a pool serves. They were validated before."""

    pool: str
    models: tuple[ServedModel, ...]


@dataclass(frozen=True, slots=True)
class SetGpuProfile:
    """Set or replace the profile of a GPU model. The profile was validated before."""

    name: str
    profile_json: str


@dataclass(frozen=True, slots=True)
class DeleteGpuProfile:
    """Return to the profile of the GPU model that was in effect before one was set."""

    name: str


@dataclass(frozen=True, slots=True)
class CreateQueue:
    queue: JobQueue


@dataclass(frozen=True, slots=True)
class ChangeQueue:
    """Replace the queue of the same name."""

    queue: JobQueue


@dataclass(frozen=True, slots=True)
class DeleteQueue:
    """Delete a queue. Its jobs remain, without a guarantee and under the limits of the default queue."""

    name: str


@dataclass(frozen=True, slots=True)
class SetSecret:
    """Let the jobs of the queue that need this secret start. The value is not part of the state."""

    queue: str
    name: str


@dataclass(frozen=True, slots=True)
class DeleteSecret:
    """Let no job of the queue that needs this secret start until it is set again, or can be decrypted again."""

    queue: str
    name: str


@dataclass(frozen=True, slots=True)
class AddNode:
    node: Node


@dataclass(frozen=True, slots=True)
class RemoveNode:
    name: str


@dataclass(frozen=True, slots=True)
class CordonNode:
    """Cordon a node. With `drain`, also move its jobs away."""

    name: str
    drain: bool = False


@dataclass(frozen=True, slots=True)
class UncordonNode:
    """Allow scheduling on a node again. A quarantined node is released, and its incidents are forgotten."""

    name: str


@dataclass(frozen=True, slots=True)
class ChangeNode:
    """Set whether a node can be lent, and which of its GPUs a loan takes; None keeps either as it is.

    A loan that no longer fits is recalled.
    """

    name: str
    lendable: bool | None = None
    lendable_gpus: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class ReportDemand:
    """Set the number of GPUs that a pool's inference needs from now on.

    `loads` are the requests from which the number follows. With them, models that are scaled need what is proposed for
    them.
    """

    pool: str
    gpus: float
    loads: tuple[ModelLoad, ...] = ()

    @classmethod
    def of_loads(cls, pool: str, loads: Iterable[ModelLoad]) -> ReportDemand:
        """Return the report of the GPUs that these loads need."""
        loads = tuple(loads)
        return cls(pool, float(sum(load.replicas * load.gpus for load in loads)), loads)


@dataclass(frozen=True, slots=True)
class ReportDemandHistory:
    """Record readings of a pool's demand, mostly of the past.

    `readings` are pairs of the time in seconds since 1970 and the number of GPUs, in ascending order of time, each time
    once.
    """

    pool: str
    readings: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class SetDemandSource:
    """Set where the demand of an inference pool comes from. None: reports of the API alone."""

    pool: str
    source: PrometheusDemand | None


@dataclass(frozen=True, slots=True)
class DemandSourceFailed:
    """Record that the demand source of a pool returns no demand. `reason` is one word."""

    pool: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class PauseLending:
    """Make no new loans. Existing loans continue."""


@dataclass(frozen=True, slots=True)
class ResumeLending:
    pass


@dataclass(frozen=True, slots=True)
class RecallAll:
    """Recall every loan and pause lending."""


VETO_REASON_LENGTH_MAX = 500


@dataclass(frozen=True, slots=True)
class VetoLoan:
    """Reject a proposed loan. `webhook_id` names the webhook whose receiver answered so; empty: a user did."""

    loan_id: str
    reason: str
    webhook_id: str = ""


@dataclass(frozen=True, slots=True)
class FreezeResizes:
    frozen: bool


@dataclass(frozen=True, slots=True)
class CurveSolved:
    """Store one point of a scaling curve: a plan, or the reason why no plan is feasible."""

    curve_key: str
    shape: GpuShape
    plan: ParallelPlan | None
    infeasible: str = ""


@dataclass(frozen=True, slots=True)
class SolverChanged:
    """Discard the curve points of another solver, and those on GPU models whose hardware has changed.

    `hardware` holds the digest of what was set for a GPU model, by its name.
    """

    solver: str
    hardware: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GpuThroughputsChanged:
    """Replace the table of work per second by GPU model, in any common unit, that the GPU profiles give."""

    throughputs: Mapping[str, float]


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
    | SetPoolNetwork
    | SetServedModels
    | SetGpuProfile
    | DeleteGpuProfile
    | CreateQueue
    | ChangeQueue
    | DeleteQueue
    | SetSecret
    | DeleteSecret
    | AddNode
    | RemoveNode
    | CordonNode
    | UncordonNode
    | ChangeNode
    | ReportDemand
    | ReportDemandHistory
    | SetDemandSource
    | DemandSourceFailed
    | PauseLending
    | ResumeLending
    | RecallAll
    | FreezeResizes
    | CurveSolved
    | SolverChanged
    | GpuThroughputsChanged
    | ForecastMade
    | VetoLoan
)


@dataclass(frozen=True, slots=True)
class Command:
    """A request with its id and time.

    `basis` is the entity tag that the caller read (see preconditions); the command is refused if the entity has changed
    since. An empty `basis` applies to any state. With `is_counted`, a job that enters a queue counts against the
    queue's `user_jobs_max`. `actor` is the display name of the caller, `actor_id` its stable id.
    """

    id: str
    at_s: float
    body: CommandBody
    actor: str = ""
    basis: str = ""
    is_counted: bool = False
    actor_id: str = ""

    @property
    def actor_key(self) -> str:
        """The id by which jobs of this caller are recognized. Commands of older releases have only a name."""
        return self.actor_id or derive_owner_id(self.actor)
