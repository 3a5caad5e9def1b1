"""Scatter chart of predicted against measured step times and memory."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from math import ceil, floor, log10
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from cli.exit_codes import CommandError
from cli.inputs import raise_input_error
from scheduler.domain.parallel_plan import Recompute

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from scheduler.profiling.measurement_log import DeviceFacts
    from scheduler.profiling.validation import ComparedStep, Validation

_FILE_SUFFIXES = (".png", ".svg", ".pdf")
_TEXT_COLOR, _MUTED_COLOR, _BAND_COLOR = "#1f2933", "#7b8794", "#e4e7eb"
_MARKS = {
    Recompute.NONE: ("o", "#1769aa", "without recompute"),
    Recompute.SELECTIVE: ("s", "#2e7d32", "selective recompute"),
    Recompute.FULL: ("^", "#c2571a", "with recompute"),
}
_TICK_FACTORS = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)
_TICKS_MAX = 6
_BAND = 0.1


class ValidationChart:
    """A chart to save in `file`. Checks its preconditions on creation, before anything is measured.

    Raises:
        InputError: the file's suffix is not supported.
        CommandError: matplotlib is not installed.
    """

    def __init__(self, file: Path) -> None:
        if file.suffix.lower() not in _FILE_SUFFIXES:
            raise_input_error(f"--plot: {file} must end in {', '.join(_FILE_SUFFIXES)}")
        if find_spec("matplotlib") is None:
            raise CommandError("--plot needs matplotlib; install it: pip install 'ebbtide-server[plot]'")
        self._file = file

    def draw(self, validation: Validation, title: str) -> None:
        """Draw time on the left and memory on the right, and save the chart.

        Raises:
            InputError: the file cannot be written.
        """
        from matplotlib import rc_context
        from matplotlib.figure import Figure

        with rc_context({"font.size": 10, "axes.edgecolor": _MUTED_COLOR, "text.color": _TEXT_COLOR}):
            figure = Figure(figsize=(11, 5.6), layout="constrained", facecolor="white")
            times, memory = figure.subplots(1, 2)
            points = [_Point(each, each.measured_s, each.predicted_s) for each in validation.steps]
            _draw(times, points, "step time in s")
            points = [
                _Point(each, each.measured_bytes / 1e9, each.predicted_bytes / 1e9)
                for each in validation.steps
                if each.measured_bytes
            ]
            _draw(memory, points, "memory of a device in GB")
            figure.suptitle(title, fontsize=13, fontweight="bold")
            try:
                figure.savefig(self._file, dpi=160)
            except OSError as error:
                raise_input_error(f"--plot {self._file}: cannot be written: {error.strerror or error}")


class _Point(NamedTuple):
    step: ComparedStep
    measured: float
    predicted: float

    @property
    def recompute(self) -> Recompute:
        return self.step.task.plan.stages[0].strategies[0].recompute


def format_chart_title(validation: Validation, device: DeviceFacts) -> str:
    """Return the title: the model by layers and width, and the device."""
    shape = validation.steps[0].task.shape
    devices = device.name if device.ranks == 1 else f"{device.ranks} x {device.name}"
    return f"GPT of {shape.layers} layers, hidden size {shape.hidden}, {device.precision}, on {devices}"


def _draw(axes: Axes, points: Sequence[_Point], name: str) -> None:
    """Draw the points as open marks, so that those on the same place show."""
    if not points:
        axes.set_title(f"{name}: not measured", fontsize=10)
        return
    values = [value for point in points for value in (point.measured, point.predicted)]
    low, high = 0.9 * min(values), 1.1 * max(values)
    line = [low, high]
    above, below = ([(1 + sign * _BAND) * each for each in line] for sign in (1, -1))
    axes.fill_between(line, below, above, color=_BAND_COLOR, label=f"within {_BAND:.0%}", linewidth=0)
    axes.plot(line, line, "--", color=_MUTED_COLOR, linewidth=1.2, label="predicted = measured")
    for recompute, (mark, color, label) in _MARKS.items():
        drawn = [(each.measured, each.predicted) for each in points if each.recompute is recompute]
        if drawn:
            measured, predicted = zip(*drawn, strict=True)
            axes.plot(measured, predicted, mark, color=color, markersize=7, fillstyle="none", label=label)
    ticks = select_ticks(low, high)
    for axis, set_scale in ((axes.xaxis, axes.set_xscale), (axes.yaxis, axes.set_yscale)):
        set_scale("log")
        axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.set_ticks([], minor=True)
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    axes.set_xlabel(f"measured {name}")
    axes.set_ylabel(f"predicted {name}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left")


def select_ticks(low: float, high: float) -> list[float]:
    """Return at most six round values between both ends of a logarithmic axis."""
    decades = range(floor(log10(low)), floor(log10(high)) + 1)
    ticks = [float(f"{factor}e{decade}") for decade in decades for factor in _TICK_FACTORS]
    inside = [tick for tick in ticks if low <= tick <= high]
    return inside[:: ceil(len(inside) / _TICKS_MAX) or 1]
