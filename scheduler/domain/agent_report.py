"""Runs whose ranks no controller can see: what it let begin, and what node agents say of their ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from scheduler.domain.gpus import Gpus, Seats
from scheduler.domain.observation import Run
from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.domain.rank_status import RankStatus


@dataclass(frozen=True, slots=True)
class Doom:
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
    seats: Seats
    begun_at_s: float
    pods: Mapping[str, str]
    plan: ParallelPlan
    frozen_layers: int = 0
    doom: Doom | None = None
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
