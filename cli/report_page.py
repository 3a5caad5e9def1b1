"""The HTML page of a report: one self-contained file, readable on a screen and in print."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from string import Template


def render_report_page(main: str, *, title: str, subtitle: str, generator: str) -> str:
    """Return a page with the given content.

    Args:
        main: HTML of the content. The other arguments are text.
        generator: the command that wrote the page.
    """
    template = Template(files("cli").joinpath("data/report_page.html").read_text(encoding="utf-8"))
    return template.substitute(
        main=main, title=escape(title), subtitle=escape(subtitle), generator=escape(generator, quote=True)
    )


def render_html_table(rows: Iterable[Sequence[str]], *, headers: Sequence[str]) -> str:
    """Return an HTML table of texts. The first cell of each row is its header."""
    cells = "".join(f'<th scope="col">{escape(header)}</th>' for header in headers)
    return f'<div class="wide"><table><thead><tr>{cells}</tr></thead>{_render_body(rows)}</table></div>'


def render_html_facts(facts: Iterable[tuple[str, str]]) -> str:
    """Return an HTML table with a name and a value in each row."""
    return f'<div class="wide"><table class="facts">{_render_body(facts)}</table></div>'


def _render_body(rows: Iterable[Sequence[str]]) -> str:
    lines = (
        f'<tr><th scope="row">{escape(first)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in others)}</tr>'
        for first, *others in rows
    )
    return f"<tbody>{''.join(lines)}</tbody>"


def render_markdown_table(rows: Iterable[Sequence[str]], *, headers: Sequence[str]) -> str:
    """Return a Markdown table of texts, whose first column is aligned left and the others right."""
    lines = [headers, ["---", *("---:" for _ in headers[1:])], *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)
