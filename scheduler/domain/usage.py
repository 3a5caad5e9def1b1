"""Usage: the GPU-seconds that were held in one hour, by queue, owner and kind of GPU."""

from __future__ import annotations

from dataclasses import dataclass

HOUR_S = 3600


@dataclass(frozen=True, slots=True, order=True)
class UsageKind:
    """What is told apart: the hour that began at `hour_s` (UTC), the job's queue and owner, the model of GPU, and
    whether it was lent by an inference pool, or training's own."""

    hour_s: int
    queue: str
    owner: str
    gpu: str
    is_lent: bool


@dataclass(frozen=True, slots=True, order=True)
class UsageEntry:
    """`lost_gpu_s` is the part of the jobs' GPU-seconds whose work was lost, in the hour in which that came to light;
    it may be above the hour's `gpu_s`."""

    kind: UsageKind
    gpu_s: float
    lost_gpu_s: float = 0.0
