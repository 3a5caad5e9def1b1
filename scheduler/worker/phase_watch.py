"""PhaseWatch: how long one process took for each of its parts of a re-plan, by its own monotonic clock alone."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from scheduler.domain.replan import ReplanPhase

_START_TIME = 19
"""Of the fields of /proc/self/stat behind the program's name (proc_pid_stat(5), field 22)."""


def process_began_s() -> float:
    """When this process was started, on its monotonic clock; by the kernel's ticks, which are 10 ms."""
    # The name of the program, in brackets, may hold blanks: what follows it is counted from there.
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    started_s = int(fields[_START_TIME]) / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started_s)


class PhaseWatch:
    """`began_s`: when the process began to be this rank, on `time.monotonic`; default: when it was started. Each phase
    counts once, from the end of the one before, and those of coming before those of leaving."""

    def __init__(self, began_s: float | None = None) -> None:
        self._since_s: float = process_began_s() if began_s is None else began_s
        self._seconds: dict[ReplanPhase, float] = {}

    @property
    def seconds(self) -> Mapping[str, float]:
        return {phase.value: seconds for phase, seconds in self._seconds.items()}

    def has(self, phase: ReplanPhase) -> bool:
        return phase in self._seconds

    def end(self, phase: ReplanPhase) -> None:
        """The phase ends now."""
        if phase not in self._seconds:
            now_s = time.monotonic()
            self._seconds[phase], self._since_s = now_s - self._since_s, now_s

    def begin(self) -> None:
        """The next phase begins only now; what was before is none."""
        self._since_s = time.monotonic()

    def hear(self, waited_s: float) -> None:
        """A notice is followed now that has waited so long for a step boundary. The phases of leaving begin."""
        if ReplanPhase.NOTICE not in self._seconds:
            self._seconds[ReplanPhase.NOTICE] = waited_s
            self._since_s = time.monotonic()
