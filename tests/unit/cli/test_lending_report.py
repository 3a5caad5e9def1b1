"""`ebbtide lending receipts` and `ebbtide lending report`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cli.safety_report import render_report_html, render_report_markdown
from scheduler.domain.commands import Command, ForecastMade
from scheduler.domain.fleet import Forecast
from tests.unit.cli.conftest import Page, Run, needs_charts

Ask = Any


@pytest.fixture
def recalled(fleet: Any) -> Any:
    """A service on which all loans were recalled and returned."""
    client = fleet.client()
    client.submit(
        {"name": "big", "gpus": {"min": 6, "max": 6}, "command": ["true"], "steps": 1000, "onResize": "checkpoint"}
    )
    client.report_demand("serving", gpus=0)
    for _ in range(3):
        quiet = Forecast(fleet.clock.now_s(), 600.0, (0.5, 0.999), (0.0, 0.0), "test")
        fleet.tick(400.0, learned=(Command(f"f{fleet.clock.now_s()}", 0.0, ForecastMade("serving", quiet)),))
        client.report_demand("serving", gpus=0)
    client.recall_all()
    for _ in range(3):
        fleet.tick()
    return fleet


def test_receipts_are_listed(ask: Ask, recalled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cli.commands.lending.time.time", recalled.clock.now_s)
    receipts = ask("lending", "receipts")
    assert receipts
    assert {receipt["outcome"] for receipt in receipts} == {"in_time"}
    assert ask("lending", "receipts", "--pool", "training") == []


def test_table_of_receipts_has_a_row_each(run: Run, recalled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cli.commands.lending.time.time", recalled.clock.now_s)
    lines = run("lending", "receipts").stdout.splitlines()
    assert lines[0].split()[:4] == ["node", "pool", "recalled", "outcome"]
    assert any("in time" in line for line in lines[1:])


@needs_charts
def test_report_is_the_service_s_in_every_form(run: Run, recalled: Any, tmp_path: Path) -> None:
    document = json.loads(run("lending", "report", "serving", "--format", "json").stdout)
    assert document == recalled.client().safety_report("serving")
    assert document["outcomes"]["in_time"] == document["recalls"] > 0
    assert run("lending", "report", "serving").stdout.split("\n")[0].startswith(document["summary"][:60])
    assert run("lending", "report", "serving", "--format", "markdown").stdout == render_report_markdown(document)
    file = tmp_path / "report.html"
    assert run("lending", "report", "serving", "--format", "html", "--out", str(file)).stdout == ""
    assert file.read_text(encoding="utf-8") == render_report_html(document)


@needs_charts
def test_page_is_self_contained_and_complete(recalled: Any) -> None:
    document = recalled.client().safety_report("serving")
    page = Page(render_report_html(document))
    assert page.loaded == []
    shown = " ".join(page.texts)
    assert document["summary"] in shown
    assert document["longest"]["node"] in shown


@needs_charts
def test_text_of_users_is_escaped(recalled: Any) -> None:
    report = recalled.client().safety_report("serving")
    html = render_report_html({**report, "pool": "<script>", "summary": "a < b"})
    assert html.count("<script>") == render_report_html(report).count("<script>")
    assert "a &lt; b" in html


@needs_charts
def test_report_without_returns_has_no_longest_recall(fleet: Any) -> None:
    document = fleet.client().safety_report("serving")
    assert document["verdict"] == "no_data"
    assert document["longest"] is None
    Page(render_report_html(document))
    assert "No node was returned" in render_report_markdown(document)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("--out", "report.txt"), 2),
        (("--month", "2026-13"), 2),
        (("--format", "html", "--out", "no/such/folder/report.html"), 2),
    ],
    ids=["file without a form", "no month", "no folder"],
)
def test_refused_reports(run: Run, fleet: Any, words: tuple[str, ...], code: int) -> None:
    result = run("lending", "report", "serving", *words)
    assert result.exit_code == code
    assert result.stdout == ""
