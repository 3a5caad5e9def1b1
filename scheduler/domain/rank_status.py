"""RankStatus: what one rank of a job says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from scheduler.domain.observation import FailureCause
from scheduler.domain.replan import LoadTraffic


class RankPhase(StrEnum):
    STARTING = "starting"
    RUNNING = "running"
    SAVING = "saving"
    LEFT = "left"
    SUCCEEDED = "succeeded"
    FAILED = "failed"

    @property
    def is_good_end(self) -> bool:
        return self in (RankPhase.LEFT, RankPhase.SUCCEEDED)

    @property
    def is_end(self) -> bool:
        return self.is_good_end or self is RankPhase.FAILED


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
    def is_good_end(self) -> bool:
        return self.phase.is_good_end

    @property
    def is_end(self) -> bool:
        return self.phase.is_end

    @property
    def has_begun(self) -> bool:
        """Its step is a measurement: the state was in place."""
        return self.phase not in (RankPhase.STARTING, RankPhase.FAILED) or self.step > 0
