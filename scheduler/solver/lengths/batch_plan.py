"""BatchPlan: the micro-batches and sequence-parallel groups of one training step over sequences of unlike lengths."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SequenceGroup:
    """A group of `degree` GPUs and the sequences that it computes, as positions in the batch."""

    degree: int
    sequences: tuple[int, ...]
    time_s: float


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Groups that run at the same time, in descending order of degree. Their degrees add up to all GPUs."""

    groups: tuple[SequenceGroup, ...]
    time_s: float


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """A step as consecutive micro-batches.

    Attributes:
        time_s: predicted seconds of the step.
        bound_s: proven lower bound on the seconds of every plan whose micro-batches are ranges of the sequences sorted
            by length.
    """

    micro_batches: tuple[MicroBatch, ...]
    time_s: float
    bound_s: float

    @property
    def optimality_gap(self) -> float:
        """Time above the lower bound, relative to the bound."""
        return self.time_s / self.bound_s - 1
