"""PhaseWatch: how long one process took for each of its parts of a re-plan, by its own monotonic clock alone."""

from __future__ import annotations

import time
from collections.abc import Mapping

from scheduler.domain.replan import ReplanPhase


def process_began_s() -> float:
    """When this process was started, on its monotonic clock."""
    import psutil

    return time.monotonic() - max(0.0, time.time() - psutil.Process().create_time())


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
