"""Sample: what a job's workers told of their work at one moment; of each job a series that stays bounded is kept.

A series has `SAMPLES_MAX` places. Time since its first sample is cut into cells of `SAMPLE_S_MIN`; whenever as many as
there are places have passed, cells become twice as wide, and those that follow take the places of every second one that
was before, from the oldest on: a series is halved by and by, evenly, without a delete. A cell keeps its newest.
"""

from __future__ import annotations

from dataclasses import dataclass

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
class PlacedSample:
    """Takes the place, from 0 up to `SAMPLES_MAX`, of whatever is in it of the job's series."""

    job_id: str
    place: int
    sample: Sample


@dataclass(frozen=True, slots=True)
class Sampled:
    """When the first and the last sample of a job's series were reported."""

    first_at_s: float
    last_at_s: float

    def takes(self, at_s: float) -> bool:
        """Samples of a series ascend in time, at least `SAMPLE_S_MIN` apart."""
        return at_s - self.last_at_s >= SAMPLE_S_MIN


def sample_place(elapsed_s: float) -> int:
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
