"""KnownEvent: a time for which the owner of an inference pool expects unusual demand."""

from __future__ import annotations

import math
from dataclasses import dataclass

FACTOR_MAX = 1_000.0


@dataclass(frozen=True, slots=True)
class KnownEvent:
    """A time of unusual demand, such as a product launch, from `start_s` (seconds since 1970) for `duration_s`.

    With `gpus`, demand is at least that number. With `factor`, it is the forecast times the factor. One of them is set.
    """

    name: str
    start_s: float
    duration_s: float
    gpus: float | None = None
    factor: float | None = None

    def __post_init__(self) -> None:
        if (self.gpus is None) == (self.factor is None):
            given = "neither" if self.gpus is None else "both"
            raise ValueError(
                f"lending.known_events: event {self.name!r} has {given} of gpus and factor. Set one of them"
            )
        if self.gpus is not None and not 0 <= self.gpus < math.inf:
            raise ValueError(f"lending.known_events: gpus of event {self.name!r} must be at least 0, got {self.gpus}")
        if self.factor is not None and not 1 <= self.factor <= FACTOR_MAX:
            limits = f"1 to {FACTOR_MAX:g}"
            raise ValueError(f"lending.known_events: factor of event {self.name!r} must be {limits}, got {self.factor}")
        if not self.duration_s > 0:
            raise ValueError(
                f"lending.known_events: duration_s of event {self.name!r} must be above 0, got {self.duration_s}"
            )

    def overlaps(self, start_s: float, end_s: float) -> bool:
        """Return whether the event lasts at some moment from `start_s` to `end_s`."""
        return self.start_s <= end_s and start_s < self.start_s + self.duration_s

    def raise_demand(self, gpus: float) -> float:
        """Return the demand during the event, in GPUs, from the demand that is forecast without it."""
        if self.factor is not None:
            return gpus * self.factor
        assert self.gpus is not None
        return max(gpus, self.gpus)
