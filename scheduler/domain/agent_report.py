"""Runs whose ranks no controller can see: what it let begin, and what node agents say of their ranks."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.domain.gpus import Gpus, Seats
from scheduler.domain.rank_status import RankStatus


@dataclass(frozen=True, slots=True)
class BegunRun:
    """A generation of a job whose ranks may be started: `seats` is the GPU of each rank. Begun once and never again."""

    job_id: str
    generation: int
    gpus: Gpus
    seats: Seats
    begun_at_s: float


@dataclass(frozen=True, slots=True)
class RankReport:
    """`exit_code` is minus the signal's number where one ended the rank, None while it lives. `tail`: the end of its
    log, where it ended otherwise than well."""

    rank: int
    exit_code: int | None = None
    status: RankStatus | None = None
    tail: str = ""


@dataclass(frozen=True, slots=True)
class AgentReport:
    """The newest word of the agent of one job on one node. `pod` tells one agent there from the next one.

    `ranks` are those of `generation` on that node; none and generation 0 before its first start. `failure`: why it
    could not start them.
    """

    job_id: str
    node: str
    pod: str
    at_s: float
    generation: int = 0
    ranks: tuple[RankReport, ...] = ()
    failure: str = ""
