"""Scatter chart of predicted against measured step times and memory."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from cli.exit_codes import CommandError
from cli.inputs import raise_input_error

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from scheduler.profiling.validation import Validation

_FILE_SUFFIXES = (".png", ".svg", ".pdf")
_TEXT_COLOR, _MUTED_COLOR, _POINT_COLOR, _BAND_COLOR = "#1f2933", "#7b8794", "#1769aa", "#e4e7eb"
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
            steps = validation.steps
            _draw(times, [each.measured_s for each in steps], [each.predicted_s for each in steps], "step time, s")
            held = [each for each in steps if each.measured_bytes]
            _draw(
                memory,
                [each.measured_bytes / 1e9 for each in held],
                [each.predicted_bytes / 1e9 for each in held],
                "memory of a device, GB",
            )
            figure.suptitle(title, fontsize=13, fontweight="bold")
            try:
                figure.savefig(self._file, dpi=160)
            except OSError as error:
                raise_input_error(f"--plot {self._file}: cannot be written: {error.strerror or error}")


def _draw(axes: Axes, measured: Sequence[float], predicted: Sequence[float], name: str) -> None:
    if not measured:
        axes.set_title(f"{name}: not measured", fontsize=10)
        return
    low, high = 0.85 * min(*measured, *predicted), 1.15 * max(*measured, *predicted)
    line = [low, high]
    above, below = ([(1 + sign * _BAND) * each for each in line] for sign in (1, -1))
    axes.fill_between(line, below, above, color=_BAND_COLOR, label=f"within {_BAND:.0%}", linewidth=0)
    axes.plot(line, line, "--", color=_MUTED_COLOR, linewidth=1.2, label="predicted = measured")
    axes.plot(measured, predicted, "o", color=_POINT_COLOR, markersize=6, alpha=0.8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    axes.set_xlabel(f"measured {name}")
    axes.set_ylabel(f"predicted {name}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left")
