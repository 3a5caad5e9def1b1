"""Freezing: how many of a job's layers are not trained any more, and what its curve and its speed know of that.

MemoryRecord: what a job's deaths by memory have taught about the memory that it needs.

Replan: where the time of a re-plan goes, from the notice to the first step of the next generation.

Sample: what a job's workers told of their work at one moment; of each job a series that stays bounded is kept.

A series has `SAMPLES_MAX` places. Time since its first sample is cut into cells of `SAMPLE_S_MIN`; whenever as many as
there are places have passed, cells become twice as wide, and those that follow take the places of every second one that
was before, from the oldest on: a series is halved by and by, evenly, without a delete. A cell keeps its newest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class FrozenLayers:
    """The first `layers` layers are frozen, as the job told at `at_s`: always from the front on, and never fewer than
    before (PipeTransformer, ICML'21, section 3.1).

    `curve_layers`: those that the job's curve counts on. It lags behind `layers` until the curve of all is solved.
    `correction`: the CurveCorrection from before layers froze that the present plan does not count on; None where there
    are none. What is measured of the present plan is then its own, and says nothing of the curve's other points.
    """

    layers: int = 0
    curve_layers: int = 0
    at_s: float = 0.0
    correction: float | None = None

    @property
    def is_curve_current(self) -> bool:
        """The job's curve counts on all frozen layers."""
        return self.curve_layers == self.layers

    @property
    def needs_new_plan(self) -> bool:
        """The present plan does not count on all frozen layers."""
        return self.correction is not None

    def with_layers(self, layers: int, now_s: float, *, correction: float | None) -> FrozenLayers:
        """With more layers frozen; `correction` is the job's, None for one without a curve of its own to wait for."""
        if correction is None:
            return FrozenLayers(layers, layers, now_s)
        known = correction if self.correction is None else self.correction
        return FrozenLayers(layers, self.curve_layers, now_s, known)

    def with_current_curve(self) -> FrozenLayers:
        """With the curve of all frozen layers."""
        return replace(self, curve_layers=self.layers)

    def with_new_plan(self) -> FrozenLayers:
        """Under a new plan from the job's curve."""
        return replace(self, correction=None) if self.is_curve_current else self


NO_FROZEN_LAYERS = FrozenLayers()


OOM_ATTEMPTS_MAX = 3
"""A job that died of memory so often is not tried again."""

_BACKOFF_S = 10.0
_GRID_PERCENT = 5
"""Corrections are rounded up to this grid, so that jobs of one model go on sharing their curves."""
_MARGIN_PERCENT = 2
"""How far beyond a GPU's memory a plan is taken to have been that died and could not be measured there."""
_GB = 1e9


@dataclass(frozen=True, slots=True)
class OomFailure:
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
    deaths: tuple[OomFailure, ...] = ()
    retry_at_s: float | None = None

    def __post_init__(self) -> None:
        if self.percent < 100:
            raise ValueError(f"percent must be at least 100, got {self.percent}")

    @property
    def factor(self) -> float:
        return self.percent / 100

    @property
    def is_exhausted(self) -> bool:
        """No try is left."""
        return len(self.deaths) >= OOM_ATTEMPTS_MAX

    def fits(self, predicted_bytes: int, gpu_memory_bytes: int) -> bool:
        """Whether a plan of this predicted peak fits once it is corrected."""
        return predicted_bytes * self.percent <= 100 * gpu_memory_bytes

    def is_backing_off(self, now_s: float) -> bool:
        return self.retry_at_s is not None and now_s < self.retry_at_s

    def with_failure(self, failure: OomFailure, now_s: float) -> MemoryRecord:
        """The record with one more death. The plan that died does not fit any more, and the pause has doubled."""
        pause_s = _BACKOFF_S * 2 ** len(self.deaths)
        percent = self.percent
        if failure.predicted_bytes:
            beyond = (100 + _MARGIN_PERCENT) * failure.gpu_memory_bytes // failure.predicted_bytes + 1
            measured = -(-100 * (failure.measured_bytes or 0) // failure.predicted_bytes)
            percent = max(percent, -(-max(beyond, measured) // _GRID_PERCENT) * _GRID_PERCENT)
        return MemoryRecord(percent, (*self.deaths, failure), now_s + pause_s)


NO_OOM_FAILURES = MemoryRecord()


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


SHUTDOWN_PHASES = (ReplanPhase.NOTICE, ReplanPhase.SAVE, ReplanPhase.TEARDOWN)
STARTUP_PHASES = (ReplanPhase.START, ReplanPhase.LOAD, ReplanPhase.FIRST_STEP)


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


SAMPLES_MAX = 500
SAMPLE_S_MIN = 5.0
_HALF = SAMPLES_MAX // 2


@dataclass(frozen=True, slots=True)
class Sample:
    """`at_s` is when it was reported; None is what was not told."""

    at_s: float
    steps: float
    loss: float | None = None
    samples_per_s: float | None = None
    peak_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class SlottedSample:
    """Takes the place, from 0 up to `SAMPLES_MAX`, of whatever is in it of the job's series."""

    job_id: str
    slot: int
    sample: Sample


@dataclass(frozen=True, slots=True)
class SampleSeries:
    """When the first and the last sample of a job's series were reported."""

    first_at_s: float
    last_at_s: float

    def accepts(self, at_s: float) -> bool:
        """Samples of a series ascend in time, at least `SAMPLE_S_MIN` apart."""
        return at_s - self.last_at_s >= SAMPLE_S_MIN


def compute_sample_slot(elapsed_s: float) -> int:
    """The place of a sample so long after the first one."""
    cell, stride = int(elapsed_s // SAMPLE_S_MIN), 1
    while cell >= SAMPLES_MAX * stride:
        stride *= 2
    while stride > 1:
        if cell >= _HALF * stride:
            # The j-th cell of the second half takes the place of the j-th odd one of those that were half as wide.
            cell = (2 * (cell // stride - _HALF) + 1) * (stride // 2)
        stride //= 2
    return cell
