"""Checkpoints of a job: where they are kept, and a user's request for one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CheckpointVolume:
    """Persistent volume claim for a job's checkpoints on Kubernetes, and the directory in it (empty: the job's id)."""

    claim: str
    sub_path: str = ""


@dataclass(frozen=True, slots=True)
class CheckpointSpec:
    """Location, interval and number of checkpoints.

    An empty `dir` means a directory that the executor chooses. `volume` is mounted there in each pod of the job.
    """

    dir: str = ""
    interval_s: float = 900.0
    keep: int = 2
    volume: CheckpointVolume | None = None

    def __post_init__(self) -> None:
        if not self.interval_s > 0:
            raise ValueError(f"checkpoint.interval must be above 0 s, got {self.interval_s}")
        if self.keep < 1:
            raise ValueError(f"checkpoint.keep must be at least 1, got {self.keep}")


DEFAULT_CHECKPOINT = CheckpointSpec()


@dataclass(frozen=True, slots=True)
class CheckpointRequest:
    """A user's request that the workers of `generation` save a checkpoint now.

    `steps` is the number of steps done when the request was first observed, at least 1, or None before that. A
    checkpoint of at least that many steps fulfils it.
    """

    asked_at_s: float
    generation: int
    steps: float | None = None
