"""PNG charts of a simulation, for documents and slides. A policy set has the same style as in the HTML report.

The HTML report draws its own charts, those of the console (`api/console/static/simulation_charts.js`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from io import BytesIO
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from cli.output import DAY_S, HOUR_S, MINUTE_S, format_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from scheduler.simulator.report import FloatArray, PolicySeries

    Series = Sequence[PolicySeries]
    LineStyles = Mapping[str, Mapping[str, Any]]
    Window = tuple[float, float]

_TEXT_COLOR, _MUTED_COLOR, _GRID_COLOR, _AREA_COLOR = "#1f2933", "#616e7c", "#e4e7eb", "#e4e7eb"
_PALETTE = ("#1d63a8", "#bd3d21", "#2a9d7e", "#d18b00", "#7b6aa6")
"""Colors of the console's light theme: training, recalled, inference, lent, cordoned."""
_DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.5)), (0, (6, 1.5, 1.5, 1.5)))
_RC_PARAMS: Any = {
    "font.size": 10, "text.color": _TEXT_COLOR, "axes.edgecolor": _MUTED_COLOR,
    "axes.labelcolor": _TEXT_COLOR, "xtick.color": _MUTED_COLOR, "ytick.color": _MUTED_COLOR,
    "axes.spines.top": False, "axes.spines.right": False,
}  # fmt: skip
_WIDTH, _WEEK_S = 10.0, 7 * DAY_S
_TIME_UNITS = (("days", DAY_S), ("hours", HOUR_S), ("minutes", MINUTE_S), ("seconds", 1))
_TIME_TICKS = {
    "1 s": 1, "10 s": 10, "1 min": MINUTE_S, "10 min": 600, "1 h": HOUR_S, "6 h": 6 * HOUR_S, "1 day": DAY_S,
    "1 week": _WEEK_S, "30 days": 30 * DAY_S, "180 days": 180 * DAY_S,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart of a simulation report. `name` is the file name without suffix."""

    name: str
    title: str
    draw: Callable[[Figure, Series, LineStyles], None]

    def render_png(self, series: Series) -> bytes:
        """Return the chart with its title as a PNG picture."""
        from matplotlib import rc_context
        from matplotlib.figure import Figure

        with rc_context(_RC_PARAMS):
            figure = Figure(figsize=(_WIDTH, 3.8), layout="constrained", facecolor="white")
            self.draw(figure, series, assign_line_styles([policy_series.policy for policy_series in series]))
            parts = [part for axes in figure.axes for part in axes.get_legend_handles_labels()[0]]
            named = {str(part.get_label()): part for part in parts}
            figure.legend(list(named.values()), list(named), loc="outside lower left", ncols=7, frameon=False)
            figure.axes[0].set_title(self.title, loc="left", fontsize=13, fontweight="bold", pad=12)
            file = BytesIO()
            figure.savefig(file, format="png", dpi=160)
            return file.getvalue()


def has_matplotlib() -> bool:
    return find_spec("matplotlib") is not None


def select_charts(series: Series) -> Iterator[Chart]:
    """Yield the charts that have data."""
    yield QUEUE_CHART
    yield USAGE_CHART
    if any(any(policy_series.lent_nodes) for policy_series in series):
        yield LENDING_CHART
    if any(policy_series.jct_s for policy_series in series):
        yield COMPLETION_CHART


def assign_line_styles(policies: Sequence[str]) -> LineStyles:
    """Return color and dashes per policy set."""
    styles = [{"color": color, "linestyle": dash} for dash, color in product(_DASHES, _PALETTE)]
    return {policy: styles[at % len(styles)] | {"label": policy} for at, policy in enumerate(policies)}


def _draw_queue(figure: Figure, series: Series, styles: LineStyles) -> None:
    axes, step_s = figure.subplots(), _choose_step_s(series, 360)
    for policy_series in series:
        _plot_line(axes, policy_series, policy_series.queued_jobs, step_s, styles)
    longest = max(max(policy_series.queued_jobs) for policy_series in series)
    if longest > 50:
        axes.set_yscale("symlog", linthresh=10, linscale=0.7)
        axes.set_yticks([0, 2, 5, *(mantissa * 10**power for power in range(1, 7) for mantissa in (1, 2, 5))])
        axes.minorticks_off()
    axes.set_ylim(0, max(1, 1.1 * longest))
    axes.yaxis.set_major_formatter(lambda value, _: format_number(value))
    _format_time_axis(axes, series, "jobs", step_s=step_s)


def _draw_usage(figure: Figure, series: Series, styles: LineStyles) -> None:
    usage_by_pools = {"training pools": [policy_series.training_usage_ratio for policy_series in series]}
    if any(policy_series.inference_nodes for policy_series in series):
        usage_by_pools["inference pools"] = [policy_series.inference_usage_ratio for policy_series in series]
    figure.set_figheight(1.0 + 2.4 * len(usage_by_pools))
    step_s = _choose_daily_step_s(series)
    panels = figure.subplots(len(usage_by_pools), sharex=True, squeeze=False).flat
    for axes, (pools, usage) in zip(panels, usage_by_pools.items(), strict=True):
        for policy_series, ratios in zip(series, usage, strict=True):
            _plot_line(axes, policy_series, ratios, step_s, styles)
        axes.set_ylim(0, 1.02)
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f}%")
        _format_time_axis(axes, series, pools, step_s=step_s, last=pools == list(usage_by_pools)[-1])


def _draw_lending(figure: Figure, series: Series, styles: LineStyles) -> None:
    lenders = [policy_series for policy_series in series if any(policy_series.lent_nodes)]
    longest = max(lenders, key=_series_length_s)
    length_s, nodes = min(_time_axis_end_s(series), _series_length_s(longest)), longest.inference_nodes
    windows: list[tuple[Window, float]] = [((0.0, length_s), _choose_daily_step_s(lenders))]
    if length_s > 1.5 * _WEEK_S:
        windows.append((_find_peak_lending_week(longest, length_s), longest.step_s))
    idle, forecast_idle = (
        [nodes * (1 - needed / longest.inference_gpus) for needed in gpus]
        for gpus in (longest.demand_gpus, longest.forecast_gpus)
    )
    figure.set_figheight(1.0 + 2.9 * len(windows))
    panels = figure.subplots(len(windows), squeeze=False).flat
    for axes, (window, step_s) in zip(panels, windows, strict=True):
        _plot_stairs(axes, longest, idle, step_s, fill=True, color=_AREA_COLOR, label="idle by demand")
        _plot_stairs(axes, longest, forecast_idle, step_s, color=_TEXT_COLOR, linewidth=0.7, label="idle by forecast")
        for behind, policy_series in enumerate(reversed(lenders)):
            # Lines often coincide here. Lines further back are wider, so that they stay visible.
            width = 1.4 + 1.1 * min(behind, 4)
            _plot_stairs(
                axes,
                policy_series,
                policy_series.lent_nodes,
                step_s,
                linewidth=width,
                zorder=3 - behind / 100,
                **styles[policy_series.policy],
            )
        axes.set_ylim(0, 1.03 * nodes)
        _format_time_axis(axes, lenders, "nodes", step_s=step_s, window=window)


def _draw_completion(figure: Figure, series: Series, styles: LineStyles) -> None:
    axes = figure.subplots()
    completed = [policy_series for policy_series in series if policy_series.jct_s]
    for policy_series in completed:
        axes.plot(
            policy_series.jct_s,
            np.linspace(0, 1, len(policy_series.jct_s)),
            **styles[policy_series.policy],
            linewidth=1.8,
        )
    axes.set_xscale("log")
    axes.set_xticks(list(_TIME_TICKS.values()), labels=list(_TIME_TICKS))
    axes.minorticks_off()
    min_s = max(1.0, min(policy_series.jct_s[len(policy_series.jct_s) // 200] for policy_series in completed))
    axes.set_xlim(min_s, max(1.01 * min_s, *(policy_series.jct_s[-1] for policy_series in completed)))
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f}%")
    axes.set_xlabel("from submission to completion")
    axes.set_ylabel("completed jobs")
    axes.grid(True, color=_GRID_COLOR, linewidth=0.8)


def _format_time_axis(
    axes: Axes, series: Series, y_label: str, *, step_s: float, window: Window | None = None, last: bool = True
) -> None:
    """Format a time axis: units, grid and the time of the last submission."""
    begin_s, end_s = window or (0.0, _time_axis_end_s(series))
    unit, unit_s = next(each for each in _TIME_UNITS if end_s - begin_s >= 3 * each[1] or each is _TIME_UNITS[-1])
    axes.set_xlim(begin_s, end_s)
    from matplotlib.ticker import MaxNLocator

    ticks = MaxNLocator(nbins=10, steps=[1, 2, 5, 10]).tick_values(begin_s / unit_s, end_s / unit_s)
    axes.set_xticks([tick * unit_s for tick in ticks], labels=[format_number(tick) for tick in ticks])
    axes.set_xlim(begin_s, end_s)
    if begin_s < series[0].submitting_s < end_s:
        style: Any = {"color": _MUTED_COLOR, "linewidth": 0.8, "linestyle": (0, (2, 2))}
        axes.axvline(series[0].submitting_s, label="last submission", **style)
    axes.set_ylabel(y_label)
    axes.grid(True, color=_GRID_COLOR, linewidth=0.8)
    axes.set_axisbelow(True)
    if last:
        axes.set_xlabel(f"{unit} since the first submission; mean over {_format_step_length(step_s)}")


def _plot_line(
    axes: Axes, policy_series: PolicySeries, values: Sequence[float], step_s: float, styles: LineStyles
) -> None:
    begins_s, means = _resample_means(policy_series, values, step_s)
    axes.plot(begins_s + step_s / 2, means, **styles[policy_series.policy], linewidth=1.6)


def _plot_stairs(axes: Axes, policy_series: PolicySeries, values: Sequence[float], step_s: float, **style: Any) -> None:
    begins_s, means = _resample_means(policy_series, values, step_s)
    axes.stairs(means, np.append(begins_s, begins_s[-1] + step_s), baseline=0 if style.get("fill") else None, **style)


def _resample_means(
    policy_series: PolicySeries, values: Sequence[float], step_s: float
) -> tuple[FloatArray, FloatArray]:
    """Return start and mean of each step of `step_s` seconds, a multiple of the series' own step."""
    group_size = round(step_s / policy_series.step_s)
    begins = np.arange(0, len(values), group_size)
    means = np.add.reduceat(np.array(values), begins) / np.diff([*begins, len(values)])
    return begins * policy_series.step_s, means


def _choose_step_s(series: Series, points: int) -> float:
    """Return a round step that gives at most `points` points. More points are not distinguishable in print."""
    from scheduler.simulator.report import round_up_length

    return max(round_up_length(_time_axis_end_s(series) / points), *(policy_series.step_s for policy_series in series))


def _choose_daily_step_s(series: Series) -> float:
    """Return the step for daily patterns: whole days if the trace is too long to show single days."""
    return float(DAY_S) if _time_axis_end_s(series) > 3 * _WEEK_S else _choose_step_s(series, 240)


def _format_step_length(length_s: float) -> str:
    unit, unit_s = next(
        (unit, unit_s) for unit, unit_s in (("h", HOUR_S), ("min", MINUTE_S), ("s", 1)) if length_s >= unit_s
    )
    return f"{format_number(length_s / unit_s)} {unit}"


def _time_axis_end_s(series: Series) -> float:
    """Return the end of the time axis in seconds: just after the last submission, or when the queue is empty.

    The last long jobs finish after that. This tail is omitted, because it can double the length of the axis.
    """
    longest_s, submitting_s = max(map(_series_length_s, series)), series[0].submitting_s
    waits_s = [
        policy_series.step_s * (1 + at)
        for policy_series in series
        for at, jobs in enumerate(policy_series.queued_jobs)
        if jobs
    ]
    return min(longest_s, max(1.03 * submitting_s, *waits_s, 0.0)) if submitting_s else longest_s


def _series_length_s(policy_series: PolicySeries) -> float:
    return policy_series.step_s * len(policy_series.queued_jobs)


def _find_peak_lending_week(policy_series: PolicySeries, length_s: float) -> Window:
    """Return the week, counted from the start, with the most lent nodes."""
    weeks = range(int(length_s // _WEEK_S))
    lent, at_s = np.array(policy_series.lent_nodes), policy_series.step_s * np.arange(len(policy_series.lent_nodes))
    peak_week = max(weeks, key=lambda week: float(lent[at_s // _WEEK_S == week].sum()))
    return peak_week * _WEEK_S, (peak_week + 1) * _WEEK_S


QUEUE_CHART = Chart("queue", "Pending jobs", _draw_queue)
USAGE_CHART = Chart("usage", "GPUs doing useful work", _draw_usage)
LENDING_CHART = Chart("lending", "Lent nodes against demand and forecast", _draw_lending)
COMPLETION_CHART = Chart("completion", "Completion times", _draw_completion)
ALL_CHARTS = frozenset((QUEUE_CHART, USAGE_CHART, LENDING_CHART, COMPLETION_CHART))
