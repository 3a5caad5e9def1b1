"""The HTML page of a report: one self-contained file with the console's charts, for a screen and for print."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any, Literal, NamedTuple

from api.console_assets import MissingChartLibraryError, ReportAssets, load_report_assets, render_data_block
from cli.exit_codes import CommandError

CHARTS_PLACE = (
    '<p class="hint small muted">Point at a chart to read its values. Select a name below it to hide the line.</p>\n'
    '<div id="charts" class="charts"><noscript>Charts need JavaScript.</noscript></div>\n'
)
"""Where the page draws its charts. Each page has it once."""


class ChartsData(NamedTuple):
    """Data of the charts, in the form that the API gives it. `kind` selects the charts in the console's `report.js`."""

    kind: Literal["simulation", "safety", "curve"]
    data: Mapping[str, Any]


def require_report_assets() -> ReportAssets:
    """Return the script and style of report pages. Call before long work, so that it fails early.

    Raises:
        CommandError: the chart library is not installed.
    """
    try:
        return load_report_assets()
    except MissingChartLibraryError as error:
        raise CommandError(str(error)) from error


def render_report_page(main: str, charts: ChartsData, *, title: str, subtitle: str, generator: str) -> str:
    """Return a page with the given content.

    Args:
        main: HTML of the content, with `CHARTS_PLACE`. The other texts are escaped.
        generator: the command that wrote the page.
    """
    assets = require_report_assets()
    template = Template(files("cli").joinpath("data/report_page.html").read_text(encoding="utf-8"))
    return template.substitute(
        main=main,
        title=escape(title),
        subtitle=escape(subtitle),
        generator=escape(generator),
        policy=escape(assets.content_security_policy, quote=False),
        style=assets.style,
        script=assets.script,
        data=render_data_block(charts._asdict()),
    )


def render_html_section(title: str, content: str) -> str:
    """Return a card. `content` is HTML."""
    name = escape(title)
    return f'<section class="card" aria-label="{name}"><header><h2>{name}</h2></header>{content}</section>\n'


def render_html_table(rows: Iterable[Sequence[str]], *, headers: Sequence[str], name: str) -> str:
    """Return an HTML table of texts. The first cell of each row is its header; the others are aligned right."""
    first, *others = headers
    heads = f'<th scope="col">{escape(first)}</th>'
    heads += "".join(f'<th scope="col" class="number">{escape(header)}</th>' for header in others)
    lines = (f'<tr><th scope="row">{escape(head)}</th>{_render_cells(cells)}</tr>' for head, *cells in rows)
    return render_html_scroll(f"<thead><tr>{heads}</tr></thead><tbody>{''.join(lines)}</tbody>", name)


def _render_cells(cells: Iterable[str]) -> str:
    return "".join(f'<td class="number">{escape(cell)}</td>' for cell in cells)


def render_html_scroll(table: str, name: str) -> str:
    """Return a table that scrolls on narrow screens. `table` is HTML of its head and body."""
    label = escape(name)
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{label}"><table>{table}</table></div>'


def render_html_facts(facts: Iterable[tuple[str, str]]) -> str:
    """Return a list of names and values."""
    lines = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts)
    return f'<dl class="facts">{lines}</dl>'


def render_markdown_table(rows: Iterable[Sequence[str]], *, headers: Sequence[str]) -> str:
    """Return a Markdown table of texts, whose first column is aligned left and the others right."""
    lines = [headers, ["---", *("---:" for _ in headers[1:])], *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)
