"""When a machine that its agent has only for a time, such as one of a Slurm allocation, must leave for good."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class DepartureNotice:
    """Request to leave: the reason, and the time in which ranks have to save and exit."""

    reason: str
    within_s: float


class Departure(Protocol):
    """Source of the request to leave. The agent asks at every step, so the answer must be at hand."""

    def find_notice(self, *, has_ranks: bool) -> DepartureNotice | None:
        """Return the request to leave, None while the machine may stay.

        Args:
            has_ranks: whether ranks run on the machine, or are about to start.
        """
