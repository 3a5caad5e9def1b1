"""Freezing: how many of a job's layers are not trained any more, and what its curve and its speed know of that."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Freezing:
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
    def is_on_curve(self) -> bool:
        """The job's curve counts on all frozen layers."""
        return self.curve_layers == self.layers

    @property
    def awaits_plan(self) -> bool:
        """The present plan does not count on all frozen layers."""
        return self.correction is not None

    def told(self, layers: int, now_s: float, *, correction: float | None) -> Freezing:
        """With more layers frozen; `correction` is the job's, None for one without a curve of its own to wait for."""
        if correction is None:
            return Freezing(layers, layers, now_s)
        known = correction if self.correction is None else self.correction
        return Freezing(layers, self.curve_layers, now_s, known)

    def on_curve(self) -> Freezing:
        """With the curve of all frozen layers."""
        return replace(self, curve_layers=self.layers)

    def planned(self) -> Freezing:
        """Under a new plan from the job's curve."""
        return replace(self, correction=None) if self.is_on_curve else self


UNFROZEN = Freezing()
