"""The report of a simulation as files: JSON, Markdown, one HTML page with everything in it, and its pictures."""

from __future__ import annotations

import json
import math
import os
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from cli.inputs import CommandError, raise_input_error
from cli.output import format_count, format_number
from cli.simulation.charts import ALL_CHARTS, Chart, assign_line_styles, select_charts
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
    "jobs completed", "waiting, mean", "completion time, mean", "completion time, p95", "useful work, overall",
    "preemptions", "resizes", "recalls that came late", "inference short, all",
)  # fmt: skip


class ReportFolder:
    """Where a report goes. That it can be written is known before the simulation begins.

    Raises:
        BadInput: the folder is none, or cannot be made.
        Failed: matplotlib is not installed.
    """

    def __init__(self, folder: str) -> None:
        if find_spec("matplotlib") is None:
            raise CommandError("--report needs matplotlib; install it: pip install 'ebbtide[plot]'")
        self._folder = Path(folder)
        there = next(path for path in (self._folder, *self._folder.absolute().parents) if path.exists())
        if not (there.is_dir() and os.access(there, os.W_OK)):
            raise_input_error(f"--report: {folder} cannot be made: {there} is no folder that can be written into")

    def write(self, document: Document, setting: str, series: Sequence[PolicySeries]) -> None:
        """`setting` says what was simulated; `series` are those of the first seed."""
        drawn = {picture: picture.render(series) for picture in select_charts(series)}
        texts = {"report.json": json.dumps(document, indent=2), "report.md": render_markdown(document)}
        texts["report.html"] = render_page(
            document, setting, {picture: forms["svg"] for picture, forms in drawn.items()}
        )
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for name, text in texts.items():
                (self._folder / name).write_text(text, encoding="utf-8")
            for picture, forms in drawn.items():
                (self._folder / f"{picture.name}.png").write_bytes(forms["png"])
            for picture in ALL_CHARTS - drawn.keys():  # an earlier report's, which would be taken for this one's
                (self._folder / f"{picture.name}.png").unlink(missing_ok=True)
        except OSError as wrong:
            raise_input_error(f"--report: {wrong.filename} cannot be written: {wrong.strerror or wrong}")


def render_page(document: Document, setting: str, charts: Mapping[Chart, bytes]) -> str:
    """The HTML page; it needs nothing but itself. The pictures are SVG."""
    template = Template(files("cli.simulation").joinpath("data/simulation.html").read_text(encoding="utf-8"))
    swept = "seeds" in document
    return template.substitute(
        names=escape(", ".join(list_policies(document))),
        setting=escape(f"{setting}; {format_seeds(document)}"),
        findings="".join(f'<p class="warning">{escape(text)}</p>' for text in find_warnings(document)),
        summary=_render_table(document, {"": {name: METRICS[name] for name in _SUMMARY_METRICS}})
        + "".join(f"<p>{escape(text)}</p>" for text in describe_comparisons(document)),
        plots="".join(map(_render_figure, charts, charts.values())),
        figures=_render_table(document, METRIC_GROUPS),
        spread=_SWEEP_NOTE if swept else _SINGLE_SEED_NOTE,
    )


_SINGLE_SEED_NOTE = (
    "This is one seed of it: nothing here says how far the figures would move under another. "
    "<code>--seeds 5</code> does."
)
_SWEEP_NOTE = (
    "The half widths (±) are 95% confidence intervals of the mean over these seeds (Student's t): they cover what the "
    "seed changes, not what another trace would. Pictures show the first seed."
)


def find_warnings(document: Document) -> Iterator[str]:
    """What a reader has to know before any figure is compared."""
    total = count_jobs(document)
    for report in document["policies"]:
        completed = get_metric_value(report, METRICS["jobs completed"]) or 0.0
        late = get_metric_value(report, METRICS["recalls that came late"])
        if completed < total:
            missing = format_count(total - completed, "job")
            yield f"Under {report['policy']} {missing} of {format_number(total)} did not complete; times are of the others."
        if illegal := get_metric_value(report, METRICS["illegal decisions, dropped"]):
            laws = dict.fromkeys(
                told for run in _iter_policy_reports(document, report["policy"]) for told in run["violated"]
            )
            yield f"Policy {report['policy']}: {format_count(illegal, 'illegal decision')}. {'; '.join(laws)}."
        if late:
            yield f"Under {report['policy']} {format_count(late, 'recalled node')} came home late."
    swept = [report["figures"] for report in document["policies"] if "figures" in report]
    told = [entry for figures in swept for name, entry in figures.items() if not name.startswith(("tick", "wall"))]
    if swept and all(entry["low"] == entry["high"] for entry in told):
        yield "Every seed gave the same figures: no demand was repeated and nothing hidden, which seeds could change."


def _iter_policy_reports(document: Document, policy: str) -> Iterator[Document]:
    """The reports of one policy set under every seed."""
    for run in document.get("runs", (document,)):
        yield from (report for report in run["policies"] if report["policy"] == policy)


def describe_comparisons(document: Document) -> Iterator[str]:
    """Each policy set's mean completion time against that of the first."""
    first, *others = document["policies"]
    base = get_metric_value(first, METRICS["completion time, mean"]) or 0.0
    bound = get_metric_value(first, METRICS["bound: no waiting, all GPUs, mean"]) or 0.0
    for other in others:
        own = get_metric_value(other, METRICS["completion time, mean"]) or 0.0
        if own and base:
            times = f"{base / own:.2f} times shorter" if own <= base else f"{own / base:.2f} times longer"
            yield (
                f"Under {other['policy']} jobs complete in {format_seconds(own)} on average, against {format_seconds(base)} under "
                f"{first['policy']}: {times}."
            )
    if others and base and bound:
        yield f"The bound of this trace, with no waiting and all GPUs, is {base / bound:.2f} times shorter."


def _render_table(document: Document, groups: Mapping[str, Mapping[str, Metric]]) -> str:
    looks = assign_line_styles(list_policies(document))
    heads = (
        f'<th scope="col"><span class="key" style="border-color:{looks[name]["color"]}; '
        f'border-top-style:{"solid" if looks[name]["linestyle"] == "-" else "dashed"}"></span>{escape(name)}</th>'
        for name in list_policies(document)
    )
    lines = [f"<thead><tr><th></th>{''.join(heads)}</tr></thead><tbody>"]
    for group, figures in groups.items():
        rows = [row for name, figure in figures.items() for row in _render_row(document, name, figure)]
        if group and rows:
            lines.append(f'<tr><th colspan="{len(document["policies"]) + 1}" scope="colgroup">{group}</th></tr>')
        lines += rows
    return f'<div class="wide"><table>{"".join(lines)}</tbody></table></div>'


def _render_row(document: Document, name: str, metric: Metric) -> Iterator[str]:
    """The row of a figure, unless no policy set has it. The best of one seed's are marked, where they differ."""
    values = [get_metric_value(report, metric) for report in document["policies"]]
    if all(value is None for value in values):
        return
    texts = list(format_cells(document, metric, REPORT_FORMATS))
    ranks = [-math.inf if value is None else value * metric.direction for value in values]
    best = texts[ranks.index(max(ranks))]
    marked = metric.direction and len(set(texts)) > 1 and "seeds" not in document
    marks = (' class="best"' if marked and text == best else "" for text in texts)
    told = "".join(f"<td{mark}>{escape(text)}</td>" for mark, text in zip(marks, texts, strict=True))
    yield f'<tr><th scope="row">{escape(name)}</th>{told}</tr>'


def _render_figure(chart: Chart, svg: bytes) -> str:
    source = f"data:image/svg+xml;base64,{b64encode(svg).decode()}"
    return (
        f'<section><h2>{escape(chart.title)}</h2><figure><img src="{source}" alt="{escape(chart.title)}">'
        f"<figcaption>{escape(chart.caption)}</figcaption></figure></section>"
    )
