"""MemoryRecord: what a job's deaths by memory have taught about the memory that it needs."""

from __future__ import annotations

from dataclasses import dataclass

MEMORY_TRIES_MAX = 3
"""A job that died of memory so often is not tried again."""

_BACK_OFF_S = 10.0
_GRID_PERCENT = 5
"""Corrections are rounded up to this grid, so that jobs of one model go on sharing their curves."""
_MARGIN_PERCENT = 2
"""How far beyond a GPU's memory a plan is taken to have been that died and could not be measured there."""
_GB = 1e9


@dataclass(frozen=True, slots=True)
class MemoryDeath:
    """One run that died of memory, on GPUs of at least `gpu_memory_bytes`. `predicted_bytes` is its plan's peak, 0
    where nothing predicts it; `measured_bytes` the highest use that a rank has told, which it had before it died."""

    plan: str
    gpus: int
    gpu_memory_bytes: int
    predicted_bytes: int
    measured_bytes: int | None

    def __str__(self) -> str:
        predicted = f"{self.predicted_bytes / _GB:.1f} GB predicted" if self.predicted_bytes else "nothing predicted"
        measured = "nothing" if self.measured_bytes is None else f"{self.measured_bytes / _GB:.1f} GB"
        where = f"{self.gpu_memory_bytes / _GB:.1f} GB a GPU"
        return f"{self.plan} on {self.gpus} GPU{'s' * (self.gpus > 1)} ({predicted}, {measured} measured, {where})"


@dataclass(frozen=True, slots=True)
class MemoryRecord:
    """`percent`: the job's peaks in percent of what its plans predict, at least 100. No start before `retry_at_s`."""

    percent: int = 100
    deaths: tuple[MemoryDeath, ...] = ()
    retry_at_s: float | None = None

    def __post_init__(self) -> None:
        if self.percent < 100:
            raise ValueError(f"percent must be at least 100, got {self.percent}")

    @property
    def factor(self) -> float:
        return self.percent / 100

    @property
    def is_spent(self) -> bool:
        """No try is left."""
        return len(self.deaths) >= MEMORY_TRIES_MAX

    def fits(self, predicted_bytes: int, gpu_memory_bytes: int) -> bool:
        """Whether a plan of this predicted peak fits once it is corrected."""
        return predicted_bytes * self.percent <= 100 * gpu_memory_bytes

    def backs_off(self, now_s: float) -> bool:
        return self.retry_at_s is not None and now_s < self.retry_at_s

    def after(self, death: MemoryDeath, now_s: float) -> MemoryRecord:
        """The record with one more death. The plan that died does not fit any more, and the pause has doubled."""
        pause_s = _BACK_OFF_S * 2 ** len(self.deaths)
        percent = self.percent
        if death.predicted_bytes:
            beyond = (100 + _MARGIN_PERCENT) * death.gpu_memory_bytes // death.predicted_bytes + 1
            measured = -(-100 * (death.measured_bytes or 0) // death.predicted_bytes)
            percent = max(percent, -(-max(beyond, measured) // _GRID_PERCENT) * _GRID_PERCENT)
        return MemoryRecord(percent, (*self.deaths, death), now_s + pause_s)


NO_DEATHS = MemoryRecord()
