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

from scheduler.cli.failure import Failed, refuse
from scheduler.cli.humanise import counted, number
from scheduler.cli.simulation_plot import EVERY, Picture, pictures, styles
from scheduler.cli.simulation_view import (
    EXACT,
    FIGURES,
    GROUPS,
    Document,
    Figure,
    cells,
    jobs,
    markdown,
    policies,
    seconds,
    seeds,
    value_of,
)

if TYPE_CHECKING:
    from scheduler.simulator.series import PolicySeries

_SHORT = (
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
            raise Failed("--report needs matplotlib; install it: pip install 'ebbtide[plot]'")
        self._folder = Path(folder)
        there = next(path for path in (self._folder, *self._folder.absolute().parents) if path.exists())
        if not (there.is_dir() and os.access(there, os.W_OK)):
            refuse(f"--report: {folder} cannot be made: {there} is no folder that can be written into")

    def write(self, document: Document, setting: str, series: Sequence[PolicySeries]) -> None:
        """`setting` says what was simulated; `series` are those of the first seed."""
        drawn = {picture: picture.drawn(series) for picture in pictures(series)}
        texts = {"report.json": json.dumps(document, indent=2), "report.md": markdown(document)}
        texts["report.html"] = page(document, setting, {picture: forms["svg"] for picture, forms in drawn.items()})
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for name, text in texts.items():
                (self._folder / name).write_text(text, encoding="utf-8")
            for picture, forms in drawn.items():
                (self._folder / f"{picture.name}.png").write_bytes(forms["png"])
            for picture in EVERY - drawn.keys():  # an earlier report's, which would be taken for this one's
                (self._folder / f"{picture.name}.png").unlink(missing_ok=True)
        except OSError as wrong:
            refuse(f"--report: {wrong.filename} cannot be written: {wrong.strerror or wrong}")


def page(document: Document, setting: str, drawn: Mapping[Picture, bytes]) -> str:
    """The HTML page; it needs nothing but itself. The pictures are SVG."""
    template = Template(files("scheduler.cli").joinpath("data/simulation.html").read_text(encoding="utf-8"))
    swept = "seeds" in document
    return template.substitute(
        names=escape(", ".join(policies(document))),
        setting=escape(f"{setting}; {seeds(document)}"),
        findings="".join(f'<p class="warning">{escape(text)}</p>' for text in warnings(document)),
        summary=_table(document, {"": {name: FIGURES[name] for name in _SHORT}})
        + "".join(f"<p>{escape(text)}</p>" for text in comparisons(document)),
        plots="".join(map(_figure, drawn, drawn.values())),
        figures=_table(document, GROUPS),
        spread=_SWEPT if swept else _ONE_SEED,
    )


_ONE_SEED = (
    "This is one seed of it: nothing here says how far the figures would move under another. "
    "<code>--seeds 5</code> does."
)
_SWEPT = (
    "The half widths (±) are 95% confidence intervals of the mean over these seeds (Student's t): they cover what the "
    "seed changes, not what another trace would. Pictures show the first seed."
)


def warnings(document: Document) -> Iterator[str]:
    """What a reader has to know before any figure is compared."""
    total = jobs(document)
    for report in document["policies"]:
        completed = value_of(report, FIGURES["jobs completed"]) or 0.0
        late = value_of(report, FIGURES["recalls that came late"])
        if completed < total:
            missing = counted(total - completed, "job")
            yield f"Under {report['policy']} {missing} of {number(total)} did not complete; times are of the others."
        if illegal := value_of(report, FIGURES["illegal decisions, dropped"]):
            laws = dict.fromkeys(told for run in _runs(document, report["policy"]) for told in run["violated"])
            yield f"Policy {report['policy']}: {counted(illegal, 'illegal decision')}. {'; '.join(laws)}."
        if late:
            yield f"Under {report['policy']} {counted(late, 'recalled node')} came home late."
    swept = [report["figures"] for report in document["policies"] if "figures" in report]
    told = [entry for figures in swept for name, entry in figures.items() if not name.startswith(("tick", "wall"))]
    if swept and all(entry["low"] == entry["high"] for entry in told):
        yield "Every seed gave the same figures: no demand was repeated and nothing hidden, which seeds could change."


def _runs(document: Document, policy: str) -> Iterator[Document]:
    """The reports of one policy set under every seed."""
    for run in document.get("runs", (document,)):
        yield from (report for report in run["policies"] if report["policy"] == policy)


def comparisons(document: Document) -> Iterator[str]:
    """Each policy set's mean completion time against that of the first."""
    first, *others = document["policies"]
    base = value_of(first, FIGURES["completion time, mean"]) or 0.0
    bound = value_of(first, FIGURES["bound: no waiting, all GPUs, mean"]) or 0.0
    for other in others:
        own = value_of(other, FIGURES["completion time, mean"]) or 0.0
        if own and base:
            times = f"{base / own:.2f} times shorter" if own <= base else f"{own / base:.2f} times longer"
            yield (
                f"Under {other['policy']} jobs complete in {seconds(own)} on average, against {seconds(base)} under "
                f"{first['policy']}: {times}."
            )
    if others and base and bound:
        yield f"The bound of this trace, with no waiting and all GPUs, is {base / bound:.2f} times shorter."


def _table(document: Document, groups: Mapping[str, Mapping[str, Figure]]) -> str:
    looks = styles(policies(document))
    heads = (
        f'<th scope="col"><span class="key" style="border-color:{looks[name]["color"]}; '
        f'border-top-style:{"solid" if looks[name]["linestyle"] == "-" else "dashed"}"></span>{escape(name)}</th>'
        for name in policies(document)
    )
    lines = [f"<thead><tr><th></th>{''.join(heads)}</tr></thead><tbody>"]
    for group, figures in groups.items():
        rows = [row for name, figure in figures.items() for row in _row(document, name, figure)]
        if group and rows:
            lines.append(f'<tr><th colspan="{len(document["policies"]) + 1}" scope="colgroup">{group}</th></tr>')
        lines += rows
    return f'<div class="wide"><table>{"".join(lines)}</tbody></table></div>'


def _row(document: Document, name: str, figure: Figure) -> Iterator[str]:
    """The row of a figure, unless no policy set has it. The best of one seed's are marked, where they differ."""
    values = [value_of(report, figure) for report in document["policies"]]
    if all(value is None for value in values):
        return
    texts = list(cells(document, figure, EXACT))
    ranks = [-math.inf if value is None else value * figure.better for value in values]
    best = texts[ranks.index(max(ranks))]
    marked = figure.better and len(set(texts)) > 1 and "seeds" not in document
    marks = (' class="best"' if marked and text == best else "" for text in texts)
    told = "".join(f"<td{mark}>{escape(text)}</td>" for mark, text in zip(marks, texts, strict=True))
    yield f'<tr><th scope="row">{escape(name)}</th>{told}</tr>'


def _figure(picture: Picture, svg: bytes) -> str:
    source = f"data:image/svg+xml;base64,{b64encode(svg).decode()}"
    return (
        f'<section><h2>{escape(picture.title)}</h2><figure><img src="{source}" alt="{escape(picture.title)}">'
        f"<figcaption>{escape(picture.caption)}</figcaption></figure></section>"
    )
