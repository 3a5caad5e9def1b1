"""Reports about running workers: executor observations, rank status files and node agent reports."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

# The library of the ranks owns these records. The control plane imports them from here.
from ebbtide.rank_status import FailureCause as FailureCause
from ebbtide.rank_status import LoadTraffic
from ebbtide.rank_status import RankPhase as RankPhase
from ebbtide.rank_status import RankStatus as RankStatus
from scheduler.domain.gpu_sets import Gpus, RankPlacement
from scheduler.domain.job_account import PermanentFault
from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.domain.placement_record import PodRefusal, TemplateReview, VolumeFacts
from scheduler.domain.pod_requirements import NodeCapacity
from scheduler.domain.prefetch import PrefetchResult
from scheduler.domain.run_document import MasterAddress
from scheduler.domain.standby import StandbyPhase


class RunPhase(StrEnum):
    """Phase of the worker processes of one job generation."""

    STARTING = "starting"
    RUNNING = "running"
    LEAVING = "leaving"
    LEFT = "left"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Straggler:
    """The slowest rank of a run, with the time of a fixed computation on its device and the median of the others."""

    rank: int
    node: str
    probe_s: float
    others_s: float

    @property
    def ratio(self) -> float:
        return self.probe_s / self.others_s


@dataclass(frozen=True, slots=True)
class Run:
    """One generation of one job, as observed.

    LEFT: it saved and exited as requested. FAILED: it failed by itself, which costs a retry. LOST: it was killed at its
    deadline, or its node or controller disappeared. `gpus` are the GPUs that its processes still occupy.
    `checkpoint_steps` is the last complete checkpoint, or None. `peak_bytes` is the largest memory use of any rank.
    `phases_s` are seconds by `ReplanPhase`, the longest of all ranks. `frozen_layers` is None if not reported.
    `traffic` is the checkpoint load of all ranks together, or None. `permanent_fault` is why a retry of a failed run
    cannot succeed. `ran_s` is how long the ranks ran, or None if unknown. `suspects` are nodes whose machine may have
    ended the run, and `straggler` is a rank that is persistently slower than the others. `refusal` is set if a node
    refused a pod before any rank started. `checkpoint_at_s` is when a script without a session last completed a
    checkpoint, or None. `steps_at_s` is when `steps` were reported; None at the observation. `lacks_session` is set
    once no rank has opened a session in the time that it has for that.
    """

    job_id: str
    generation: int
    phase: RunPhase
    gpus: Gpus = field(default_factory=dict)
    steps: float | None = None
    checkpoint_steps: float | None = None
    loss: float | None = None
    reason: str = ""
    cause: FailureCause | None = None
    samples_per_s: float | None = None
    peak_bytes: int | None = None
    phases_s: Mapping[str, float] = field(default_factory=dict)
    frozen_layers: int | None = None
    traffic: LoadTraffic | None = None
    permanent_fault: PermanentFault | None = None
    ran_s: float | None = None
    suspects: tuple[str, ...] = ()
    straggler: Straggler | None = None
    refusal: PodRefusal | None = None
    checkpoint_at_s: float | None = None
    lacks_session: bool = False
    steps_at_s: float | None = None


@dataclass(frozen=True, slots=True)
class ReplicaStart:
    """An inference replica that became ready at `ready_at_s`, `seconds` after it was scheduled on its node."""

    ready_at_s: float
    seconds: float


@dataclass(frozen=True, slots=True)
class StandbyFacts:
    """State of the standby replicas on a node. A phase of None says that nothing new is known.

    `wake` is the newest time that they took from the order to wake until they served.
    """

    phase: StandbyPhase | None = None
    detail: str = ""
    wake: ReplicaStart | None = None


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """Observed facts of a node. The numbers of GPUs and `capacity` are defined as in `Node`.

    `replica_start` is the start of the inference replica on it that became ready last; None if none is known. `standby`
    is None if the pool of the node has no standby. `prefetches` are the ended ones whose pods still exist.
    """

    up: bool = True
    inference_gpus: int = 0
    other_gpus: int = 0
    capacity: NodeCapacity | None = None
    replica_start: ReplicaStart | None = None
    standby: StandbyFacts | None = None
    prefetches: tuple[PrefetchResult, ...] = ()


@dataclass(frozen=True, slots=True)
class Observation:
    """All existing runs, and the nodes that the executor observes. It may be stale.

    `converged_generation` is the newest snapshot generation that was in effect before the observation. A run that is
    absent here is known to be gone only as of that generation. `volumes` is the state of the volume claims by job, as
    far as they were read.
    """

    at_s: float
    converged_generation: int
    runs: tuple[Run, ...] = ()
    nodes: Mapping[str, NodeFacts] = field(default_factory=dict)
    volumes: Mapping[str, VolumeFacts] = field(default_factory=dict)
    reviews: Mapping[str, TemplateReview] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class KillOrder:
    """Order to kill the ranks of a run that still exist at `by_s`.

    `fault` is the reason of a failed run, `loss` the reason of a lost run. Both are empty if rank 0 has ended and other
    ranks remain. `is_hearsay` means that a rank reported the fault itself, perhaps because other ranks had died.
    `permanent_fault` is why a retry of a failed run cannot succeed. `cause` is the proven cause of a fault, and
    `suspects` are the nodes whose machine may have caused it.
    """

    by_s: float
    fault: str = ""
    loss: str = ""
    is_hearsay: bool = False
    permanent_fault: PermanentFault | None = None
    cause: FailureCause | None = None
    suspects: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BegunRun:
    """A generation whose ranks may be started, with all that an agent needs except the job's specification.

    A generation is begun once. `seats` is the GPU of each rank. `pods` is the agent of each node that may start ranks
    there: the uid of a pod if the run is `in_pods`, else of a machine. `master` is where the ranks meet. `doom` is set
    once the ranks must end, `end` once they have ended. `is_restored` means that the run had begun when the database
    was backed up: its ranks may have ended since, and it never starts again.
    """

    job_id: str
    generation: int
    gpus: Gpus
    seats: RankPlacement
    begun_at_s: float
    pods: Mapping[str, str]
    plan: ParallelPlan
    frozen_layers: int = 0
    master: MasterAddress | None = None
    in_pods: bool = False
    doom: KillOrder | None = None
    end: Run | None = None
    is_restored: bool = False

    @property
    def may_start(self) -> bool:
        return self.doom is None and self.end is None and not self.is_restored

    @property
    def kill_at_s(self) -> float:
        """Time at which remaining ranks must be killed. Infinite while the run may continue."""
        if self.end is not None:
            return -math.inf
        return math.inf if self.doom is None else self.doom.by_s


class RankLiveness(StrEnum):
    """What a node agent knows of a rank's progress.

    STEPPING: it reports steps in time. WORKING: it reports none, but saves a checkpoint, reads files or writes to its
    log. STALLED: it has reported steps, and none for too long. A rank that never reported a step is BUSY, or IDLE once
    all processes of its run on the node use neither CPU nor GPU and write no log for too long.
    """

    STEPPING = "stepping"
    WORKING = "working"
    STALLED = "stalled"
    BUSY = "busy"
    IDLE = "idle"

    @property
    def is_inactive(self) -> bool:
        return self in (RankLiveness.STALLED, RankLiveness.IDLE)


@dataclass(frozen=True, slots=True)
class RankReport:
    """Report about one rank by its agent.

    `exit_code` is minus the signal number if a signal ended the rank, and None while it lives. `tail` is the end of its
    log after a failure. `oom_kills` is the kernel's count of out-of-memory kills in the rank's control group, read
    after its end. `liveness` is None if the agent does not observe it. `inactive_s` is how long a rank that is stalled
    or idle has made no progress, and `stack` the innermost frames of its main thread, if they are known.
    """

    rank: int
    exit_code: int | None = None
    status: RankStatus | None = None
    tail: str = ""
    oom_kills: int | None = None
    liveness: RankLiveness | None = None
    inactive_s: float = 0.0
    stack: str = ""


@dataclass(frozen=True, slots=True)
class AgentReport:
    """Latest report of a job's agent on one node. `pod` identifies the agent.

    `ranks` are the ranks of `generation` on the node; generation 0 without ranks before the first start. `since_s` is
    when the agent first reported this generation. `failure` is why it could not start ranks, and `permanent_fault` why
    another start cannot succeed either. `killed` is why it killed ranks without a kill order, and `machine_fault`
    whether its machine was the reason. `terminated` means that it sent SIGTERM because no rank had reported. `prepared`
    is a newer generation that can start at once, 0 for none, and `master_port` the port that is reserved for it if the
    node holds rank 0. `address` is where ranks on other nodes reach the node. `checkpoint_at_s` is when a file of
    `checkpoint.path` was last complete, and `saved` whether one was after the ranks were asked to leave.
    `exceeded_memory` is the memory limit in bytes for which the kernel has killed a process of the run; None for none.
    `setting_up` is a newer generation whose setup command runs, 0 for none.
    """

    job_id: str
    node: str
    pod: str
    at_s: float
    generation: int = 0
    ranks: tuple[RankReport, ...] = ()
    failure: str = ""
    killed: str = ""
    terminated: bool = False
    since_s: float = 0.0
    prepared: int = 0
    master_port: int = 0
    address: str = ""
    machine_fault: bool = False
    checkpoint_at_s: float | None = None
    saved: bool = False
    permanent_fault: PermanentFault | None = None
    exceeded_memory: int | None = None
    setting_up: int = 0

    @property
    def has_living_ranks(self) -> bool:
        return any(rank.exit_code is None for rank in self.ranks)
