"""Records about a job: progress, samples, frozen layers, out-of-memory failures and re-plan times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil

# The library of the ranks owns these records. The control plane imports them from here.
from ebbtide.rank_status import LoadTraffic as LoadTraffic
from ebbtide.rank_status import ReplanPhase as ReplanPhase


@dataclass(frozen=True, slots=True)
class FrozenLayers:
    """Frozen layers of a job: the first `layers` layers are not trained, as reported at `at_s`.

    The number never decreases.

    `curve_layers` is the number that the job's curve is solved for. It is lower than `layers` until the new curve is
    solved. `correction` is the curve correction from before the current plan became outdated, or None if the plan is
    current. While it is set, measurements apply to the current plan only and not to other points of the curve.

    Source: PipeTransformer, ICML 2021, section 3.1.
    """

    layers: int = 0
    curve_layers: int = 0
    at_s: float = 0.0
    correction: float | None = None

    @property
    def is_curve_current(self) -> bool:
        """Whether the job's curve is solved for all frozen layers."""
        return self.curve_layers == self.layers

    @property
    def needs_new_plan(self) -> bool:
        """Whether the current plan was made for fewer frozen layers."""
        return self.correction is not None

    def with_layers(self, layers: int, now_s: float, *, correction: float | None) -> FrozenLayers:
        """Return the record with more frozen layers.

        `correction` is the job's current curve correction, or None for a job without a curve of its own.
        """
        if correction is None:
            return FrozenLayers(layers, layers, now_s)
        known = correction if self.correction is None else self.correction
        return FrozenLayers(layers, self.curve_layers, now_s, known)

    def with_current_curve(self) -> FrozenLayers:
        return replace(self, curve_layers=self.layers)

    def with_new_plan(self) -> FrozenLayers:
        """Return the record of a job that received a new plan from its curve."""
        return replace(self, correction=None) if self.is_curve_current else self


NO_FROZEN_LAYERS = FrozenLayers()


OOM_ATTEMPTS_MAX = 3
"""Out-of-memory failures after which a job fails."""

_BACKOFF_S = 10.0
_GRID_PERCENT = 5
"""Corrections are rounded up to this grid, so that jobs of one model keep sharing their curves."""
MEMORY_PERCENT_MIN = 70
"""Least correction of predicted memory, however little was measured."""
_UNSEEN_PERCENT = 10
"""Assumed excess of a plan that was not measured over those that were."""
_MARGIN_PERCENT = 2
"""Assumed excess over the GPU's memory if a failed plan could not be measured."""
_GB = 1e9


@dataclass(frozen=True, slots=True)
class OomFailure:
    """A run that ran out of memory on GPUs of at least `gpu_memory_bytes`.

    `predicted_bytes` is the predicted peak of its plan, or 0 if unknown. `measured_bytes` is the highest use that a
    rank reported before it failed.
    """

    plan: str
    gpus: int
    gpu_memory_bytes: int
    predicted_bytes: int
    measured_bytes: int | None

    def __str__(self) -> str:
        predicted = f"{self.predicted_bytes / _GB:.1f} GB predicted" if self.predicted_bytes else "nothing predicted"
        measured = "nothing" if self.measured_bytes is None else f"{self.measured_bytes / _GB:.1f} GB"
        where = f"{self.gpu_memory_bytes / _GB:.1f} GB per GPU"
        return f"{self.plan} on {self.gpus} GPU{'s' * (self.gpus > 1)} ({predicted}, {measured} measured, {where})"


@dataclass(frozen=True, slots=True)
class MemoryRecord:
    """Out-of-memory failures of a job, and the correction of predicted memory that follows from them.

    `percent` is the expected peak in percent of the predicted peak. It is below 100 if jobs of the owner have measured
    less, and above after a failure. The job does not start before `retry_at_s`.
    """

    percent: int = 100
    deaths: tuple[OomFailure, ...] = ()
    retry_at_s: float | None = None

    def __post_init__(self) -> None:
        if self.percent < MEMORY_PERCENT_MIN:
            raise ValueError(f"percent must be at least {MEMORY_PERCENT_MIN}, got {self.percent}")

    @property
    def factor(self) -> float:
        return self.percent / 100

    @property
    def is_exhausted(self) -> bool:
        """Whether no attempt is left."""
        return len(self.deaths) >= OOM_ATTEMPTS_MAX

    def fits(self, predicted_bytes: int, gpu_memory_bytes: int) -> bool:
        """Return whether a plan of this predicted peak fits after the correction."""
        return predicted_bytes * self.percent <= 100 * gpu_memory_bytes

    def with_measured(self, ratio: float) -> MemoryRecord:
        """Return the record after plans of the job's model took at most `ratio` of their predicted peaks.

        It changes nothing once the job itself has failed, and never expects more than predicted: failures tell that.
        """
        expected = ceil((100 + _UNSEEN_PERCENT) * ratio / _GRID_PERCENT) * _GRID_PERCENT
        percent = min(100, max(MEMORY_PERCENT_MIN, expected))
        return self if self.deaths or percent == self.percent else replace(self, percent=percent)

    def with_failure(self, failure: OomFailure, now_s: float) -> MemoryRecord:
        """Return the record with one more failure: the failed plan no longer fits, and the backoff is doubled."""
        pause_s = _BACKOFF_S * 2 ** len(self.deaths)
        percent = max(100, self.percent)
        if failure.predicted_bytes:
            beyond = (100 + _MARGIN_PERCENT) * failure.gpu_memory_bytes // failure.predicted_bytes + 1
            measured = -(-100 * (failure.measured_bytes or 0) // failure.predicted_bytes)
            percent = max(percent, -(-max(beyond, measured) // _GRID_PERCENT) * _GRID_PERCENT)
        return MemoryRecord(percent, (*self.deaths, failure), now_s + pause_s)


NO_OOM_FAILURES = MemoryRecord()


SHUTDOWN_PHASES = (ReplanPhase.NOTICE, ReplanPhase.SAVE, ReplanPhase.TEARDOWN)
STARTUP_PHASES = (ReplanPhase.START, ReplanPhase.LOAD, ReplanPhase.FIRST_STEP)


@dataclass(frozen=True, slots=True)
class Replan:
    """Times of the current re-plan. `generation` is the last generation whose first step was observed.

    `left_s` are the seconds by phase that the workers of that generation or of a later one took to leave.
    """

    generation: int = 0
    left_s: Mapping[str, float] = field(default_factory=dict)


NO_REPLAN = Replan()


@dataclass(frozen=True, slots=True)
class GpuMeasurements:
    """Measured speed of a job without a model on one GPU model: pairs of GPU count and GPU-seconds per step."""

    gpu: str
    gpu_s: tuple[tuple[int, float], ...]


SAMPLES_MAX = 500
SAMPLE_S_MIN = 5.0
_HALF = SAMPLES_MAX // 2


@dataclass(frozen=True, slots=True)
class Sample:
    """Progress of a job at `at_s`. None means that workers did not report the value."""

    at_s: float
    steps: float
    loss: float | None = None
    samples_per_s: float | None = None
    peak_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class SlottedSample:
    """A sample for one slot of the job's series, 0 to SAMPLES_MAX - 1. It replaces the slot's previous sample."""

    job_id: str
    slot: int
    sample: Sample


@dataclass(frozen=True, slots=True)
class SampleSeries:
    """Times of the first and the last sample of a job's series."""

    first_at_s: float
    last_at_s: float

    def accepts(self, at_s: float) -> bool:
        """Return whether a sample at `at_s` is at least SAMPLE_S_MIN newer than the last one."""
        return at_s - self.last_at_s >= SAMPLE_S_MIN


def compute_sample_slot(elapsed_s: float) -> int:
    """Return the slot of a sample `elapsed_s` seconds after the first one.

    A series has SAMPLES_MAX slots. Time is divided into cells of SAMPLE_S_MIN. When all slots are full, cells become
    twice as wide, and each new cell overwrites every second old one, oldest first. The series thus stays evenly spread
    without deletions. A cell holds its newest sample.
    """
    cell, stride = int(elapsed_s // SAMPLE_S_MIN), 1
    while cell >= SAMPLES_MAX * stride:
        stride *= 2
    while stride > 1:
        if cell >= _HALF * stride:
            # Cell j of the second half overwrites the j-th odd cell of the previous cells, which were half as wide.
            cell = (2 * (cell // stride - _HALF) + 1) * (stride // 2)
        stride //= 2
    return cell


CORRECTIONS_MAX = 6


@dataclass(frozen=True, slots=True)
class Progress:
    """Work done as of `at_s`. Between observations it is extrapolated, and before the first report it is an estimate.

    `checkpoint_steps` are the steps that survive a failure. `correction` scales the curve's step times to those
    measured for this job. `samples_per_s` and `peak_bytes` (largest of all ranks) are those of the current workers, or
    else of the last ones.

    For a job without a model, `corrections` holds the last CORRECTIONS_MAX pairs of GPU count and measured GPU-seconds
    per step on GPUs of model `measured_gpu`, and `other_gpus` those of models before it. An empty `measured_gpu` comes
    from an older version, which did not distinguish models.
    """

    at_s: float
    steps: float = 0.0
    checkpoint_steps: float = 0.0
    checkpoint_at_s: float = 0.0
    correction: float = 1.0
    loss: float | None = None
    corrections: tuple[tuple[int, float], ...] = ()
    samples_per_s: float | None = None
    peak_bytes: int | None = None
    measured_gpu: str = ""
    other_gpus: tuple[GpuMeasurements, ...] = ()
    is_reported: bool = False

    def measured_gpu_s(self, gpu: str) -> tuple[tuple[int, float], ...]:
        """Return the pairs of GPU count and measured GPU-seconds per step on a GPU model, the newest last."""
        if self.measured_gpu in ("", gpu):
            return self.corrections
        return next((known.gpu_s for known in self.other_gpus if known.gpu == gpu), ())

    def without_measured_gpu_s(self) -> Progress:
        return replace(self, corrections=(), measured_gpu="", other_gpus=())

    def with_measured_gpu_s(self, gpu: str, gpus: int, gpu_s: float) -> Progress:
        """Return the progress with GPU-seconds per step on `gpus` GPUs of a model, which becomes `measured_gpu`."""
        pairs = tuple(known for known in self.measured_gpu_s(gpu) if known[0] != gpus)
        others = self.other_gpus
        if self.measured_gpu not in ("", gpu):
            before = GpuMeasurements(self.measured_gpu, self.corrections)
            others = (*(known for known in others if known.gpu != gpu), before)
        corrections = (*pairs[1 - CORRECTIONS_MAX :], (gpus, gpu_s))
        return replace(self, corrections=corrections, measured_gpu=gpu, other_gpus=others)
