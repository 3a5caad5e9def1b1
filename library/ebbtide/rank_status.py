"""Records of a rank's status file, shared by ranks and the control plane."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class RankPhase(str, Enum):
    """Phase of one rank. LEFT: it saved and exited as requested. SUCCEEDED: all steps are done."""

    STARTING = "starting"
    RUNNING = "running"
    SAVING = "saving"
    LEFT = "left"
    SUCCEEDED = "succeeded"
    FAILED = "failed"

    __str__ = str.__str__

    @property
    def is_clean_exit(self) -> bool:
        return self in (RankPhase.LEFT, RankPhase.SUCCEEDED)

    @property
    def is_terminal(self) -> bool:
        return self.is_clean_exit or self is RankPhase.FAILED


class FailureCause(str, Enum):
    """Proven cause of a failed run."""

    OUT_OF_MEMORY = "out-of-memory"
    HANG = "hang"

    __str__ = str.__str__


class ReplanPhase(str, Enum):
    """Phases of a re-plan, in order of time.

    NOTICE: from the notice to the step boundary at which workers act on it. SAVE: the checkpoint is written. TEARDOWN:
    from a rank's last report to the end of its session. START: from the start of a process until its process group is
    ready. LOAD: until the state is loaded. FIRST_STEP: the first step.
    """

    NOTICE = "notice"
    SAVE = "save"
    TEARDOWN = "teardown"
    START = "start"
    LOAD = "load"
    FIRST_STEP = "first_step"

    __str__ = str.__str__


@dataclass(frozen=True)
class LoadTraffic:
    """Bytes of a checkpoint load, summed over ranks.

    `needed_bytes` is the size of the loaded state. `read_bytes` were read from checkpoint shards for it. `moved_bytes`
    of these were written on another node than the one that read them.
    """

    needed_bytes: int = 0
    read_bytes: int = 0
    moved_bytes: int = 0

    def __add__(self, other: LoadTraffic) -> LoadTraffic:
        return LoadTraffic(
            self.needed_bytes + other.needed_bytes,
            self.read_bytes + other.read_bytes,
            self.moved_bytes + other.moved_bytes,
        )


@dataclass(frozen=True)
class RankStatus:
    """Status that one rank reports about itself.

    `step` is the last finished step, `checkpoint_step` the step of the last complete checkpoint. `peak_bytes` is the
    largest memory use so far. `phases_s` are seconds by `ReplanPhase`. `written_at_ns` is the modification time of the
    status file, which orders the reports of ranks. `memory_events` is the kernel file that counts out-of-memory kills
    in the rank's control group, and `oom_kills` its count at the last report. `frozen_layers` and `traffic` are None if
    not reported. `probe_s` is how long a fixed computation takes on the rank's device, None if unknown.
    `awaits_exit_code`: SUCCEEDED was reported while the interpreter ended, so the script may have failed with
    `sys.exit`.
    """

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
    probe_s: float | None = None
    awaits_exit_code: bool = False

    @property
    def is_clean_exit(self) -> bool:
        return self.phase.is_clean_exit

    @property
    def is_terminal(self) -> bool:
        return self.phase.is_terminal

    @property
    def has_loaded_state(self) -> bool:
        """Whether the state was loaded, so that `step` is a measurement."""
        return self.phase not in (RankPhase.STARTING, RankPhase.FAILED) or self.step > 0
