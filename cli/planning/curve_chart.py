"""Chart of a scaling curve: throughput, linear scaling, wasted GPUs and the plan of each point.

A picture is drawn with matplotlib. An HTML page has the chart and the table of the console's plan page.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from math import log2
from pathlib import Path
from typing import TYPE_CHECKING

from cli.exit_codes import CommandError
from cli.inputs import raise_input_error
from cli.output import format_number
from cli.planning.plan_tables import PlanJson, summarize_plan
from cli.report_page import CHARTS_PLACE, ChartsData, render_report_page, require_report_assets

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_FILE_SUFFIXES = (".html", ".png", ".svg", ".pdf")
_TEXT_COLOR, _MUTED_COLOR, _LINE_COLOR, _WASTED_COLOR = "#1f2933", "#7b8794", "#1769aa", "#d64545"
_LABEL_GAP_MIN = 0.031
"""Minimum distance between two labels, as a share of the axis. Labels that are closer are omitted."""


class CurveChart:
    """A chart to save in `file`. Checks its preconditions on creation, before the curve is solved.

    Raises:
        InputError: the file's suffix is not supported.
        CommandError: matplotlib, or the chart library of HTML pages, is not installed.
    """

    def __init__(self, file: str, title: str) -> None:
        suffix = Path(file).suffix.lower()
        if suffix not in _FILE_SUFFIXES:
            raise_input_error(f"--plot: {file} must end in {', '.join(_FILE_SUFFIXES)}")
        self._is_page = suffix == ".html"
        if self._is_page:
            require_report_assets()
        elif find_spec("matplotlib") is None:
            raise CommandError(
                "--plot needs matplotlib for pictures; install it: pip install 'ebbtide-server[plot]', or use a file "
                "that ends in .html"
            )
        self._file = file
        self._title = title

    def draw(self, points: Sequence[PlanJson]) -> None:
        """Draw the points, at least one of which has a plan, and save the chart.

        Raises:
            InputError: the file cannot be written.
        """
        try:
            if self._is_page:
                Path(self._file).write_text(self._render_page(points), encoding="utf-8")
            else:
                self._save_picture(points)
        except OSError as error:
            raise_input_error(f"--plot {self._file}: cannot be written: {error.strerror or error}")

    def _render_page(self, points: Sequence[PlanJson]) -> str:
        return render_report_page(
            CHARTS_PLACE,
            ChartsData("curve", {"points": list(points)}),
            title=self._title,
            subtitle="Throughput of the fastest plan for each number of GPUs",
            generator="ebbtide plan",
        )

    def _save_picture(self, points: Sequence[PlanJson]) -> None:
        from matplotlib import rc_context
        from matplotlib.figure import Figure

        with rc_context(
            {"font.size": 10, "svg.hashsalt": "ebbtide", "axes.edgecolor": _MUTED_COLOR, "text.color": _TEXT_COLOR}
        ):
            figure = Figure(figsize=(11, 7.2), layout="constrained", facecolor="white")
            above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3.4, 1])
            _draw_throughput(above, points)
            _draw_plan_labels(below, points)
            figure.supxlabel("GPUs, with the best plan for each number", fontsize=10)
            above.set_title(self._title, loc="left", fontsize=14, fontweight="bold", pad=14)
            figure.savefig(self._file, dpi=160, metadata={"Date": None} if self._file.endswith(".svg") else None)


def _draw_throughput(axes: Axes, points: Sequence[PlanJson]) -> None:
    solved = [point for point in points if "infeasible" not in point]
    wasted = [point for point in solved if point["better_gpus"]]
    gpus, speed = _split_coordinates(solved)
    first = solved[0]["samples_per_s"] / solved[0]["gpus"]
    axes.plot(gpus, [first * count for count in gpus], "--", color=_MUTED_COLOR, linewidth=1.2, label="linear scaling")
    axes.plot(gpus, speed, "-o", color=_LINE_COLOR, linewidth=2.2, markersize=6, label="best plan", zorder=3)
    if wasted:
        axes.plot(
            *_split_coordinates(wasted), "o", markersize=9, color="white", markeredgecolor=_WASTED_COLOR,
            markeredgewidth=2.2, label="fewer GPUs are at least as fast", zorder=4,
        )  # fmt: skip
    for point, above in ((solved[0], False), (solved[-1], True)):
        axes.annotate(
            f"{point['samples_per_s']:,.1f}", (point["gpus"], point["samples_per_s"]), xytext=(0, 10 if above else -18),
            textcoords="offset points", ha="center", color=_LINE_COLOR, fontweight="bold",
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(lambda value, _: format_number(value, 2))
    axes.set_ylabel("samples/s")
    axes.grid(True, color="#e4e7eb", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left")
    axes.margins(y=0.12)


def _draw_plan_labels(axes: Axes, points: Sequence[PlanJson]) -> None:
    """Write each point's plan below it, and mark the points without a feasible plan."""
    axes.set_yticks([])
    axes.set_ylim(0, 1)
    axes.spines[["left", "right", "bottom"]].set_visible(False)
    axes.tick_params(axis="x", top=True, bottom=False, labeltop=False, labelbottom=False, which="both")
    labelled = _select_labelled_points(points)
    for point in labelled:
        axes.text(
            point["gpus"], 0.96, _format_plan_label(point), rotation=90, ha="center", va="top", multialignment="right",
            fontsize=8, linespacing=1.1,
            color=_WASTED_COLOR if point.get("better_gpus") else _MUTED_COLOR if "infeasible" in point else _TEXT_COLOR,
        )  # fmt: skip
    ticks = [point["gpus"] for point in labelled]
    axes.set_xticks(ticks, labels=[str(gpus) for gpus in ticks])
    axes.minorticks_off()
    axes.tick_params(axis="x", labeltop=True, length=3)
    margin = 1.2 ** max(0.2, log2(points[-1]["gpus"] / points[0]["gpus"]) / 6)
    axes.set_xlim(points[0]["gpus"] / margin, points[-1]["gpus"] * margin)


def _split_coordinates(points: Sequence[PlanJson]) -> tuple[list[int], list[float]]:
    return [point["gpus"] for point in points], [point["samples_per_s"] for point in points]


def _select_labelled_points(points: Sequence[PlanJson]) -> list[PlanJson]:
    """Select points whose labels do not overlap. Prefers the last point, then powers of two, then wasted points."""
    span = log2(points[-1]["gpus"] / points[0]["gpus"]) or 1.0
    kept: list[PlanJson] = []
    for point in sorted(points, key=lambda point: _label_priority(point, points[-1])):
        if all(abs(log2(point["gpus"] / other["gpus"])) >= _LABEL_GAP_MIN * span for other in kept):
            kept.append(point)
    return sorted(kept, key=lambda point: int(point["gpus"]))


def _label_priority(point: PlanJson, last: PlanJson) -> tuple[bool, bool, bool]:
    gpus = point["gpus"]
    return point is not last, gpus & (gpus - 1) != 0, not point.get("better_gpus")


def _format_plan_label(point: PlanJson) -> str:
    """Format a plan on two lines."""
    if "infeasible" in point:
        return "does not fit" if point["constraint"] == "memory" else "cannot be split"
    *spread, batches = summarize_plan(point).split(" · ")
    return f"{' '.join(spread)}\n{batches}"
