"""Observation: what an executor saw of processes and nodes. It may be stale."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from scheduler.domain.gpus import Gpus
from scheduler.domain.replan import LoadTraffic


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
