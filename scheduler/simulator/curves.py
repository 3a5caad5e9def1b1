"""CurveBook: measured curves and the solver at a simulation's side. Every point is solved once, whoever asks for it."""

from __future__ import annotations

from collections.abc import Iterable

from scheduler.documents.throughput import Measured
from scheduler.domain.command import CurveSolved
from scheduler.domain.gpu_shape import GpuShape
from scheduler.domain.job import JobSpec
from scheduler.domain.scaling_curve import CurveRequest
from scheduler.domain.tick_report import WantedShape
from scheduler.simulator.measured import MeasuredCurves, measured_curves
from scheduler.solver.curve import curve_solved, solve_point


class CurveBook:
    """Points by curve key and shape.

    `profiles`: files of measurements. A model that they have is never solved.
    """

    def __init__(self, profiles: Iterable[Measured] = ()) -> None:
        self._measured = measured_curves(profiles)
        self._points: dict[WantedShape, CurveSolved] = {}

    def measured(self, model: str, global_batch: int) -> MeasuredCurves | None:
        """The measured curves that have the model at this batch."""
        return next((curves for curves in self._measured if curves.knows(model, global_batch)), None)

    def measures_on(self, gpu: str) -> bool:
        """Some model was measured on GPUs of this model."""
        return any(gpu in curves.gpus for curves in self._measured)

    def point(self, spec: JobSpec, shape: GpuShape) -> CurveSolved:
        """The solved point of a job with a model, as it was submitted."""
        request = spec.curve_request
        assert request is not None, "any other job has the linear curve"
        return self.solved(request, shape)

    def solved(self, request: CurveRequest, shape: GpuShape) -> CurveSolved:
        """A plan, or why none can work on that shape."""
        wanted = WantedShape(request.key, shape)
        if wanted not in self._points:
            self._points[wanted] = self._solve(request, wanted)
        return self._points[wanted]

    def _solve(self, request: CurveRequest, wanted: WantedShape) -> CurveSolved:
        if not (curves := self.measured(request.model, request.global_batch)):
            return curve_solved(wanted.curve_key, wanted.shape, solve_point(request, wanted.shape))
        point = curves.point(request.model, request.global_batch, wanted.shape)
        if isinstance(point, str):
            return CurveSolved(wanted.curve_key, wanted.shape, None, point)
        return CurveSolved(wanted.curve_key, wanted.shape, point)
