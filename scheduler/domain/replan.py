"""Replan: where the time of a re-plan goes, from the notice to the first step of the next generation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class ReplanPhase(StrEnum):
    """In order of time. NOTICE: from the notice to the step boundary at which it is followed; SAVE; TEARDOWN: from the
    last word of a rank to the end of its session; START: from the start of a process until its group is made; LOAD:
    until the state is in place; FIRST_STEP."""

    NOTICE = "notice"
    SAVE = "save"
    TEARDOWN = "teardown"
    START = "start"
    LOAD = "load"
    FIRST_STEP = "first_step"


LEAVING_PHASES = (ReplanPhase.NOTICE, ReplanPhase.SAVE, ReplanPhase.TEARDOWN)
COMING_PHASES = (ReplanPhase.START, ReplanPhase.LOAD, ReplanPhase.FIRST_STEP)


@dataclass(frozen=True, slots=True)
class LoadTraffic:
    """Bytes that a load fills (`needed_bytes`), those that it read from pieces of the checkpoint to do so, and of the
    latter those that were written on another node than they were read on. Ranks that need the same bytes count each."""

    needed_bytes: int = 0
    read_bytes: int = 0
    moved_bytes: int = 0

    def __add__(self, other: LoadTraffic) -> LoadTraffic:
        return LoadTraffic(
            self.needed_bytes + other.needed_bytes,
            self.read_bytes + other.read_bytes,
            self.moved_bytes + other.moved_bytes,
        )


@dataclass(frozen=True, slots=True)
class Replan:
    """What is known of the re-plan under way. `generation` is the last one whose first step was seen, `left_s` the
    seconds by phase that the workers of that generation or of a later one took to leave."""

    generation: int = 0
    left_s: Mapping[str, float] = field(default_factory=dict)


NO_REPLAN = Replan()
