"""CurveBook: the solver at a simulation's side. Every point is solved once, whoever asks for it."""

from __future__ import annotations

from scheduler.domain.command import CurveSolved
from scheduler.domain.gpu_shape import GpuShape
from scheduler.domain.job import JobSpec
from scheduler.domain.scaling_curve import CurveRequest
from scheduler.domain.tick_report import WantedShape
from scheduler.solver.curve import curve_solved, solve_point


class CurveBook:
    """Points by curve key and shape. A curve key has to be made known before its points can be asked for."""

    def __init__(self) -> None:
        self._requests: dict[str, CurveRequest] = {}
        self._points: dict[WantedShape, CurveSolved] = {}

    def register(self, spec: JobSpec) -> None:
        """Make the curve of a job with a model known; any other job has the linear one."""
        request = spec.curve_request
        if request is not None:
            self._requests[request.key] = request

    def point(self, spec: JobSpec, shape: GpuShape) -> CurveSolved:
        """The solved point of a job with a model."""
        self.register(spec)
        return self.solved(WantedShape(spec.curve_key, shape))

    def solved(self, wanted: WantedShape) -> CurveSolved:
        """A plan, or why none can work on that shape.

        Raises:
            KeyError: the curve was never made known.
        """
        if wanted not in self._points:
            point = solve_point(self._requests[wanted.curve_key], wanted.shape)
            self._points[wanted] = curve_solved(wanted.curve_key, wanted.shape, point)
        return self._points[wanted]
