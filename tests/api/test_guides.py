"""The runbook that the service shows, to which alerts link."""

from __future__ import annotations

import re

from api.guides import render_markdown
from tests.api.conftest import ApiService, Problem
from tests.chart.test_monitoring import alerts


def test_the_runbook_has_an_anchor_for_every_alert(service: ApiService) -> None:
    page = service.http.get("/docs/runbook")
    assert page.headers["content-type"].startswith("text/html")
    anchors = re.findall(r'<h\d id="([^"]+)"', page.text)
    assert len(set(anchors)) == len(anchors)
    assert {rule["annotations"]["runbook_url"].partition("#")[2] for rule in alerts()} <= set(anchors)
    assert {link for link in re.findall(r'href="#([^"]+)"', page.text) if link != "content"} <= set(anchors)


def test_the_runbook_loads_its_own_files_only_and_is_revalidated(service: ApiService, problem: Problem) -> None:
    page = service.http.get("/docs/runbook")
    assert "default-src 'self'" in page.headers["content-security-policy"]
    assert "style=" not in page.text
    for path in re.findall(r'(?:src|href)="(/[^"]+)"', page.text):
        assert service.http.get(path).status_code == 200, path
    assert service.http.get("/docs/runbook", headers={"If-None-Match": page.headers["etag"]}).status_code == 304
    problem(service.http.get("/docs/no-such-page"), 404)


def test_markup_of_a_page_is_escaped_and_links_to_pages_that_are_not_served_are_text() -> None:
    contents, body = render_markdown("## A *b*\n\n### <C>\n\n[here](#a) [there](other.md) <script>x</script>")
    assert '<a href="#a">here</a> there' in body
    assert "<script>" not in body + contents
    assert '<h2 id="a-b">' in body
