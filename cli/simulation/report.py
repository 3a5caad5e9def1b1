"""Report files of a simulation: JSON, Markdown, a self-contained HTML page, and charts."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from cli.inputs import raise_input_error
from cli.output import format_count, format_number, print_message
from cli.report_page import (
    CHARTS_PLACE,
    ChartsData,
    render_html_scroll,
    render_report_page,
    require_report_assets,
)
from cli.simulation.charts import ALL_CHARTS, has_matplotlib, select_charts
from cli.simulation.comparison_table import (
    METRIC_GROUPS,
    METRICS,
    REPORT_FORMATS,
    Document,
    Metric,
    count_jobs,
    format_cells,
    format_seconds,
    format_seeds,
    get_metric_value,
    list_policies,
    render_markdown,
)

if TYPE_CHECKING:
    from scheduler.simulator.report import PolicySeries


_SUMMARY_METRICS = (
    "jobs completed", "queueing time, mean", "completion time, mean", "completion time, p95", "useful work, overall",
    "preemptions", "resizes", "late returns", "inference shortage, first pass",
)  # fmt: skip

_POINTS_MAX, _ALL_POINTS_MAX = 1_000, 4_800
"""Points of a series, and of the series of all policy sets, so that the page stays below 400 KB."""


class ReportFolder:
    """The folder of a report. Checks its preconditions on creation, before the simulation starts.

    Raises:
        InputError: the folder cannot be created or written.
        CommandError: the chart library of the page is not installed.
    """

    def __init__(self, folder: str) -> None:
        require_report_assets()
        self._folder = Path(folder)
        existing = next(path for path in (self._folder, *self._folder.absolute().parents) if path.exists())
        if not (existing.is_dir() and os.access(existing, os.W_OK)):
            raise_input_error(f"--report: {folder} cannot be created: {existing} is not a writable directory")

    def write(self, document: Document, setting: str, series: Sequence[PolicySeries]) -> None:
        """Write all files. `setting` is one line on the inputs; `series` holds the time series of the first seed."""
        texts = {
            "report.json": json.dumps(document, indent=2),
            "report.md": render_markdown(document),
            "report.html": render_page(document, setting, series),
        }
        pictures = {chart: chart.render_png(series) for chart in select_charts(series)} if has_matplotlib() else {}
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for name, text in texts.items():
                (self._folder / name).write_text(text, encoding="utf-8")
            for chart, picture in pictures.items():
                (self._folder / f"{chart.name}.png").write_bytes(picture)
            for chart in ALL_CHARTS - pictures.keys():  # remove charts of an earlier report
                (self._folder / f"{chart.name}.png").unlink(missing_ok=True)
        except OSError as error:
            raise_input_error(f"--report: {error.filename} cannot be written: {error.strerror or error}")
        if not pictures:
            print_message("PNG charts need matplotlib and are left out; install it: pip install 'ebbtide-server[plot]'")


def render_page(document: Document, setting: str, series: Sequence[PolicySeries]) -> str:
    """Return the HTML page with its charts."""
    template = Template(files("cli.simulation").joinpath("data/simulation.html").read_text(encoding="utf-8"))
    swept = "seeds" in document
    warnings = "".join(f"<p>{escape(text)}</p>" for text in find_warnings(document))
    main = template.substitute(
        findings=f'<div class="note warn">{warnings}</div>' if warnings else "",
        summary=_render_table(document, {"": {name: METRICS[name] for name in _SUMMARY_METRICS}}, "Summary")
        + "".join(f"<p>{escape(text)}</p>" for text in describe_comparisons(document)),
        charts=CHARTS_PLACE,
        figures=_render_table(document, METRIC_GROUPS, "All metrics"),
        spread=_SWEEP_NOTE if swept else _SINGLE_SEED_NOTE,
    )
    points = min(_POINTS_MAX, _ALL_POINTS_MAX // len(series))
    return render_report_page(
        main,
        ChartsData("simulation", {"series": [each.to_chart(points) for each in series]}),
        title=", ".join(list_policies(document)),
        subtitle=f"{setting}; {format_seeds(document)}",
        generator="ebbtide simulate",
    )


_SINGLE_SEED_NOTE = (
    "This report covers one seed. Use <code>--seeds 5</code> to see how much the values vary between seeds."
)
_SWEEP_NOTE = (
    "Half-widths (±) are 95% confidence intervals of the mean over these seeds (Student's t). They cover variation "
    "between seeds, not between traces. Charts show the first seed."
)


def find_warnings(document: Document) -> Iterator[str]:
    """Yield caveats that a reader must know before comparing values."""
    total = count_jobs(document)
    for report in document["policies"]:
        completed = get_metric_value(report, METRICS["jobs completed"]) or 0.0
        late = get_metric_value(report, METRICS["late returns"])
        if completed < total:
            missing = format_count(total - completed, "job")
            policy = report["policy"]
            yield f"{policy}: {missing} of {format_number(total)} did not complete. Times cover the others only."
        if illegal := get_metric_value(report, METRICS["illegal decisions, dropped"]):
            laws = dict.fromkeys(
                law for run in _iter_policy_reports(document, report["policy"]) for law in run["violated"]
            )
            yield f"{report['policy']}: {format_count(illegal, 'illegal decision')}. {'; '.join(laws)}."
        if late:
            yield f"{report['policy']}: {format_count(late, 'recalled node')} returned late."
    swept = [report["figures"] for report in document["policies"] if "figures" in report]
    entries = [entry for metrics in swept for name, entry in metrics.items() if not name.startswith(("tick", "wall"))]
    if swept and all(entry["low"] == entry["high"] for entry in entries):
        yield "All seeds gave the same values. Seeds matter only if demand repeats or facts are hidden from policies."


def _iter_policy_reports(document: Document, policy: str) -> Iterator[Document]:
    """Yield the reports of one policy set, one per seed."""
    for run in document.get("runs", (document,)):
        yield from (report for report in run["policies"] if report["policy"] == policy)


def describe_comparisons(document: Document) -> Iterator[str]:
    """Yield a sentence per policy set that compares its mean completion time with the first policy set's."""
    first, *others = document["policies"]
    base = get_metric_value(first, METRICS["completion time, mean"]) or 0.0
    bound = get_metric_value(first, METRICS["completion time, lower bound"]) or 0.0
    for other in others:
        own = get_metric_value(other, METRICS["completion time, mean"]) or 0.0
        if own and base:
            times = f"{base / own:.2f} times shorter" if own <= base else f"{own / base:.2f} times longer"
            yield (
                f"{other['policy']}: mean completion time {format_seconds(own)}, {times} than with {first['policy']} "
                f"({format_seconds(base)})."
            )
    if others and base and bound:
        yield f"The lower bound of this trace (no queueing, all GPUs) is {base / bound:.2f} times shorter."


def _render_table(document: Document, groups: Mapping[str, Mapping[str, Metric]], label: str) -> str:
    policies = list_policies(document)
    heads = "".join(
        f'<th scope="col" class="number"><span class="key" data-line="{at}"></span>{escape(name)}</th>'
        for at, name in enumerate(policies)
    )
    lines = [f'<thead><tr><th scope="col">Metric</th>{heads}</tr></thead><tbody>']
    for group, metrics in groups.items():
        rows = [row for name, metric in metrics.items() for row in _render_row(document, name, metric)]
        if group and rows:
            lines.append(f'<tr><th colspan="{len(policies) + 1}" scope="colgroup">{group}</th></tr>')
        lines += rows
    return render_html_scroll(f"{''.join(lines)}</tbody>", label)


def _render_row(document: Document, name: str, metric: Metric) -> Iterator[str]:
    """Yield a metric's row unless no policy set has a value. Marks the best value of a single-seed report."""
    values = [get_metric_value(report, metric) for report in document["policies"]]
    if all(value is None for value in values):
        return
    texts = list(format_cells(document, metric, REPORT_FORMATS))
    ranks = [-math.inf if value is None else value * metric.direction for value in values]
    best = texts[ranks.index(max(ranks))]
    marked = metric.direction and len(set(texts)) > 1 and "seeds" not in document
    marks = (" best" if marked and text == best else "" for text in texts)
    row_cells = "".join(
        f'<td class="number{mark}">{escape(text)}</td>' for mark, text in zip(marks, texts, strict=True)
    )
    yield f'<tr><th scope="row">{escape(name)}</th>{row_cells}</tr>'
