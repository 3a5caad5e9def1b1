"""Goodput: how much of the GPU time that jobs held was of use.

Useful are GPU-seconds in which workers ran and whose work was kept: the part of the time held that ran, times the part
of the work that was not lost. Work that is lost is counted in GPU-seconds held (`JobLostWork`), starts and moves
included, so that subtracting it from the running time alone would count those twice.
"""

from __future__ import annotations

from collections import deque

from scheduler.domain.snapshot import Snapshot
from scheduler.telemetry.metrics import GOODPUT, GPU_SECONDS

WINDOW_S = 86_400.0
_SLOT_S = 3600.0


class Goodput:
    """Adds up what was held between two ticks, by the state that the first of them left; kept by the hour."""

    def __init__(self) -> None:
        self._until_s: float | None = None
        self._slots: deque[list[float]] = deque()

    def record(self, before: Snapshot, now_s: float, lost_gpu_s: float) -> None:
        """`before` has stood since the last call; `lost_gpu_s` came to light now."""
        elapsed_s = 0.0 if self._until_s is None else now_s - self._until_s
        self._until_s = now_s
        held, running = _gpus(before) if elapsed_s else (0, 0)
        GPU_SECONDS.labels("running").inc(running * elapsed_s)
        GPU_SECONDS.labels("moving").inc((held - running) * elapsed_s)
        slot_s = now_s // _SLOT_S * _SLOT_S
        if not self._slots or self._slots[-1][0] != slot_s:
            self._slots.append([slot_s, 0.0, 0.0, 0.0])
        for at, added in enumerate((held * elapsed_s, running * elapsed_s, lost_gpu_s), 1):
            self._slots[-1][at] += added
        while self._slots[0][0] <= now_s - WINDOW_S - _SLOT_S:
            self._slots.popleft()
        GOODPUT.set(self._ratio())

    def rest(self) -> None:
        self._until_s = None
        self._slots.clear()
        GOODPUT.set(float("nan"))

    def _ratio(self) -> float:
        held_s, running_s, lost_s = (sum(slot[at] for slot in self._slots) for at in (1, 2, 3))
        if not held_s:
            return float("nan")
        return running_s / held_s * max(0.0, 1.0 - lost_s / held_s)


def _gpus(snapshot: Snapshot) -> tuple[int, int]:
    """GPUs that jobs hold, and those of them under workers that run."""
    ledger = snapshot.ledger
    held = sum(map(len, ledger.holders.values()))
    return held, sum(snapshot.jobs[job_id].allocation.target_gpus for job_id in ledger.running)
