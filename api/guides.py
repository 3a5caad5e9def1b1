"""The runbook as a page of the service, to which alerts link. It is public, as the console's files are."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from functools import cache
from html import escape
from itertools import pairwise
from pathlib import Path

from fastapi import APIRouter, Request, Response
from markdown_it import MarkdownIt
from markdown_it.token import Token

from api.identity.authorization import PUBLIC, requires
from api.web_console import REVALIDATE, file_response, load_console_files

_RUNBOOK = Path(__file__).parent / "console" / "guides" / "runbook.md"
router = APIRouter(include_in_schema=False)


@router.get("/docs/runbook")
@requires(PUBLIC)
async def runbook_page(request: Request) -> Response:  # async: serves from memory without a thread
    """The runbook. Each alert has an anchor: its name in lower case."""
    body, digest = load_runbook()
    return file_response(request, body, "text/html; charset=utf-8", f'"{digest}"', REVALIDATE)


@cache
def load_runbook() -> tuple[bytes, str]:
    """Return the page and its digest."""
    contents, body = render_markdown(_RUNBOOK.read_text(encoding="utf-8"))
    page = load_console_files().render_guide("Runbook", contents, body)
    return page, hashlib.sha256(page).hexdigest()[:16]


def render_markdown(text: str) -> tuple[str, str]:
    """Return the table of contents and the body of a page as HTML. Raw HTML in the text is escaped."""
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = parser.parse(text)
    headings = list(_name_headings(tokens))
    for token in tokens:
        if token.children:
            token.children = list(_drop_links_to_other_pages(token.children))
    return _render_contents(headings), parser.renderer.render(tokens, parser.options, {})


def _name_headings(tokens: Sequence[Token]) -> Iterator[tuple[str, str, str]]:
    """Give each heading its anchor, and yield its tag, its anchor and its text."""
    for opening, inline in pairwise(tokens):
        if opening.type == "heading_open":
            anchor = re.sub(r"[^\w-]", "", inline.content.lower().replace(" ", "-"))
            opening.attrSet("id", anchor)
            yield opening.tag, anchor, inline.content


def _drop_links_to_other_pages(tokens: Sequence[Token]) -> Iterator[Token]:
    """Yield the tokens without links to pages that the service does not serve. Their texts stay."""
    is_dropping = False
    for token in tokens:
        if token.type == "link_open":
            is_dropping = not str(token.attrGet("href")).startswith(("#", "https://", "http://"))
        if not (is_dropping and token.type in ("link_open", "link_close")):
            yield token


def _render_contents(headings: Sequence[tuple[str, str, str]]) -> str:
    """Return a list of links for each section."""
    parts: list[str] = []
    for tag, anchor, text in headings:
        if tag == "h2":
            parts.append(f"{'</ul>' if parts else ''}<h2>{escape(text)}</h2><ul>")
        elif tag == "h3" and parts:
            parts.append(f'<li><a href="#{anchor}">{escape(text)}</a></li>')
    return "\n".join(parts) + ("</ul>" if parts else "")
