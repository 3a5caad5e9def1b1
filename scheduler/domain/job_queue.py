"""JobQueue: who pays for jobs, and how many GPUs that buys.

Usage: the GPU-seconds that were held in one hour, by queue, owner and kind of GPU.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class JobQueue:
    """`guaranteed_gpus` are the queue's own whenever its jobs ask for them; what it uses above is borrowed.

    It never uses more than `limit_gpus` (None: no limit), and the jobs of one owner in it never more than
    `user_limit_gpus` together; jobs that nobody is known to own are one owner's. GPUs of all models count alike. Where
    several queues borrow, the one that borrows least for its `weight` comes first. A queue that nobody declared has no
    guarantee, no limit, and weight 1. The service takes no more than `user_jobs_max` waiting jobs of one owner.
    """

    name: str
    guaranteed_gpus: int = 0
    limit_gpus: int | None = None
    weight: float = 1.0
    user_limit_gpus: int | None = None
    user_jobs_max: int | None = None

    def __post_init__(self) -> None:
        if self.guaranteed_gpus < 0:
            raise ValueError(f"guaranteed_gpus must be at least 0, got {self.guaranteed_gpus}")
        if self.limit_gpus is not None and self.limit_gpus < self.guaranteed_gpus:
            least = f"at least guaranteed_gpus = {self.guaranteed_gpus}"
            raise ValueError(f"limit_gpus must be {least}, or absent, got {self.limit_gpus}")
        for name in ("user_limit_gpus", "user_jobs_max"):
            if (value := getattr(self, name)) is not None and value < 0:
                raise ValueError(f"{name} must be at least 0, or absent, got {value}")
        if not 0.0 < self.weight < float("inf"):
            raise ValueError(f"weight must be a positive, finite number, got {self.weight}")


HOUR_S = 3600


@dataclass(frozen=True, slots=True, order=True)
class UsageKey:
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

    key: UsageKey
    gpu_s: float
    lost_gpu_s: float = 0.0
