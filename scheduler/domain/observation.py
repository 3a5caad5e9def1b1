"""Observation: what an executor saw of processes and nodes. It may be stale.

RankStatus: what one rank of a job says of itself.

Runs whose ranks no controller can see: what it let begin, and what node agents say of their ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from scheduler.domain.gpu_sets import Gpus, RankPlacement
from scheduler.domain.job_records import LoadTraffic
from scheduler.domain.parallel_plan import ParallelPlan


class RunPhase(StrEnum):
    """Where the worker processes of one job generation stand."""

    STARTING = "starting"
    RUNNING = "running"
    LEAVING = "leaving"
    LEFT = "left"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    LOST = "lost"


class FailureCause(StrEnum):
    """What a run has died of, where there is proof of it."""

    OUT_OF_MEMORY = "out-of-memory"


@dataclass(frozen=True, slots=True)
class Run:
    """One generation of one job as seen.

    LEFT: it saved and left as it was asked to. FAILED: its own fault, which costs a retry. LOST: killed at its
    deadline, or gone with its node or its controller. `gpus` are those its processes still occupy: none once
    they are gone. `checkpoint_steps` is the last complete checkpoint, None where it has none. `peak_bytes` is the most
    memory that a rank has had at once, `phases_s` the seconds of its parts of re-plans by `ReplanPhase`, the longest of
    its ranks'. `frozen_layers`: so many of the first layers are frozen, None where it does not say. `traffic`: what its
    ranks together read of a checkpoint, None where they read none or do not say.
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


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """`inference_gpus` and `other_gpus`: as in `Node`."""

    up: bool = True
    inference_gpus: int = 0
    other_gpus: int = 0


@dataclass(frozen=True, slots=True)
class Observation:
    """All runs that exist, and the nodes that the executor can see.

    `converged_generation` is the newest snapshot generation that the executor had put into effect before it
    looked. A run that is absent here is known to be gone only as of that generation.
    """

    at_s: float
    converged_generation: int
    runs: tuple[Run, ...] = ()
    nodes: Mapping[str, NodeFacts] = field(default_factory=dict)


class RankPhase(StrEnum):
    STARTING = "starting"
    RUNNING = "running"
    SAVING = "saving"
    LEFT = "left"
    SUCCEEDED = "succeeded"
    FAILED = "failed"

    @property
    def is_clean_exit(self) -> bool:
        return self in (RankPhase.LEFT, RankPhase.SUCCEEDED)

    @property
    def is_terminal(self) -> bool:
        return self.is_clean_exit or self is RankPhase.FAILED


@dataclass(frozen=True, slots=True)
class RankStatus:
    """`step` is the last finished one, `checkpoint_step` that of the last complete checkpoint. `peak_bytes`: the most
    memory that the rank has had at once. `phases_s`: seconds by `ReplanPhase`. `written_at_ns` is the file's own time,
    good for telling which of two ranks spoke first. `memory_events` is the file in which the kernel counts whom it has
    killed for memory in this rank's control group, `oom_kills` that count when the rank last wrote. `frozen_layers` is
    None where the script says nothing of them, `traffic` where it says nothing of what it read of a checkpoint."""

    phase: RankPhase
    step: int = 0
    checkpoint_step: int | None = None
    loss: float | None = None
    reason: str = ""
    written_at_ns: int = 0
    cause: FailureCause | None = None
    samples_per_s: float | None = None
    peak_bytes: int | None = None
    phases_s: Mapping[str, float] = field(default_factory=dict)
    memory_events: str = ""
    oom_kills: int | None = None
    frozen_layers: int | None = None
    traffic: LoadTraffic | None = None

    @property
    def is_clean_exit(self) -> bool:
        return self.phase.is_clean_exit

    @property
    def is_terminal(self) -> bool:
        return self.phase.is_terminal

    @property
    def has_loaded_state(self) -> bool:
        """Its step is a measurement: the state was in place."""
        return self.phase not in (RankPhase.STARTING, RankPhase.FAILED) or self.step > 0


@dataclass(frozen=True, slots=True)
class KillOrder:
    """Ranks of a run that are still there at `by_s` are killed by their agents.

    `fault`: it has failed through this; `loss`: it is lost because of this; both empty: rank 0 has said its last word,
    and the others outstay it. `is_hearsay`: the fault is what a rank said of itself, perhaps because others had died.
    """

    by_s: float
    fault: str = ""
    loss: str = ""
    is_hearsay: bool = False


@dataclass(frozen=True, slots=True)
class BegunRun:
    """A generation of a job whose ranks may be started: all that an agent needs to start them, but the job's spec.

    Begun once and never again. `seats` is the GPU of each rank, `pods` the one agent of each node that may start
    those of that node. `doom` once its ranks have to end, `end` once they have: as it was seen then.
    """

    job_id: str
    generation: int
    gpus: Gpus
    seats: RankPlacement
    begun_at_s: float
    pods: Mapping[str, str]
    plan: ParallelPlan
    frozen_layers: int = 0
    doom: KillOrder | None = None
    end: Run | None = None

    @property
    def may_start(self) -> bool:
        return self.doom is None and self.end is None

    @property
    def kill_at_s(self) -> float:
        """When ranks that are left of it have to be killed; infinite while they may stay."""
        if self.end is not None:
            return -math.inf
        return math.inf if self.doom is None else self.doom.by_s


@dataclass(frozen=True, slots=True)
class RankReport:
    """`exit_code` is minus the signal's number where one ended the rank, None while it lives. `tail`: the end of its
    log, where it ended otherwise than well. `oom_kills`: the kernel's count of those killed for memory in the rank's
    control group, read after its end."""

    rank: int
    exit_code: int | None = None
    status: RankStatus | None = None
    tail: str = ""
    oom_kills: int | None = None


@dataclass(frozen=True, slots=True)
class AgentReport:
    """The newest word of the agent of one job on one node. `pod` tells one agent there from the next one.

    `ranks` are those of `generation` on that node; none and generation 0 before its first start. `since_s`: it tells
    of this generation since then. `failure`: why it could not start them. `killed`: why they were killed, where nobody
    had doomed them. `terminated`: it has sent them SIGTERM, because none of them had said anything.
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

    @property
    def has_living_ranks(self) -> bool:
        return any(rank.exit_code is None for rank in self.ranks)
