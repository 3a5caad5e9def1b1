"""Keyboard use, screen readers, unknown URLs, narrow windows, and a missing chart library."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import Page, expect

from api import web_console as files
from api.web_console import load_console_files
from tests.console.console_site import ConsoleSite
from tests.console.fleets import create_fleet, small_site

if TYPE_CHECKING:
    from tests.console.conftest import Opener

FOCUS = "getComputedStyle(document.activeElement).outlineStyle"
COUNT_ANNOUNCEMENTS = """() => {
    window.announcements = 0;
    const watch = new MutationObserver((changes) => { window.announcements += changes.length; });
    const all = { subtree: true, childList: true, characterData: true };
    for (const live of document.querySelectorAll("[aria-live], [role=status], [role=log], output")) {
        watch.observe(live, all);
    }
}"""


@pytest.fixture
def plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ConsoleSite]:
    """A service without the chart library."""
    monkeypatch.setattr(files, "CHART_FILES", {"charts.js": tmp_path / "none.js"})
    load_console_files.cache_clear()
    site = small_site(tmp_path, hours=0.1)
    site.jobs = create_fleet(site)
    site.demand("inference", 70.0)
    site.ticks(3)
    yield site
    site.close()
    load_console_files.cache_clear()


def test_values_are_in_tables_when_the_chart_library_is_missing(plain: ConsoleSite, opened: Opener) -> None:
    page = opened(plain.url)
    expect(page.get_by_text("run `npm ci` in api/console").first).to_be_visible()
    figures = page.get_by_role("region", name="Use of the GPUs of pool inference")
    expect(figures.locator("tbody tr").first).to_contain_text("70")


def test_keyboard_reaches_all_controls_and_focus_is_restored(fleet: ConsoleSite, opened: Opener) -> None:
    page = opened(fleet.url)
    pause = page.get_by_role("button", name="Pause lending")
    expect(pause).to_be_visible()
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to content")).to_be_focused()
    assert page.evaluate(FOCUS) != "none"
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    expect(pause).to_be_focused()
    assert page.evaluate(FOCUS) != "none"
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog").get_by_role("button", name="Go back")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()
    expect(pause).to_be_focused()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Resume lending")).to_be_focused()


@pytest.mark.full
def test_idle_tick_is_not_announced(fleet: ConsoleSite, opened: Opener) -> None:
    page = opened(fleet.url)
    expect(page.locator("#connection")).to_have_text("Live")
    expect(page.locator(".tile").first).to_be_visible()
    page.evaluate(COUNT_ANNOUNCEMENTS)
    for _ in range(3):
        with page.expect_response(lambda answer: "/v1/overview" in answer.url):
            fleet.demand("inference", 70.5)
            fleet.tick()
    assert page.evaluate("announcements") == 0


def test_reduced_motion_disables_animations(fleet: ConsoleSite, opened: Opener) -> None:
    page = opened(fleet.url)
    page.emulate_media(reduced_motion="reduce")
    expect(page.locator(".tile").first).to_be_visible()
    assert page.locator(".tile").first.evaluate("(tile) => getComputedStyle(tile).transitionDuration") == "0s"


def test_unknown_page_links_to_the_overview(site: ConsoleSite, opened: Opener) -> None:
    page = opened(f"{site.url}/#/nowhere")
    expect(page.get_by_role("heading", name="Page not found")).to_be_visible()
    expect(page).to_have_title("Page not found · Ebbtide")
    page.get_by_role("link", name="Go to the overview").click()
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()


def test_filter_is_in_the_url_and_keeps_focus(fleet: ConsoleSite, opened: Opener) -> None:
    page = opened(f"{fleet.url}/#/jobs?state=live&queue=products")
    expect(page.locator("tbody tr")).to_have_count(2)
    name = page.get_by_role("textbox", name="Search")
    name.fill("vision")
    name.press("Enter")
    expect(page.locator("tbody tr")).to_have_count(1)
    assert "search=vision" in page.url
    expect(name).to_be_focused()


def test_plan_request_is_shared_by_url(site: ConsoleSite, opened: Opener) -> None:
    page = opened(f"{site.url}/#/plans?model=gpt2&gpu=a100-80g&gpus=1&globalBatch=4")
    expect(page.get_by_role("region", name="gpt2 on 1 GPU")).to_be_visible()


def test_overview_shows_the_reason_of_each_pending_job(fleet: ConsoleSite, opened: Opener) -> None:
    with fleet.client() as client:
        client.submit({"name": "huge", "gpus": {"min": 96, "max": 96}, "steps": 10, "command": ["true"]})
    fleet.tick()
    waiting = opened(fleet.url).get_by_role("list", name="Longest pending jobs")
    expect(waiting).to_contain_text("96 GPUs")


@pytest.mark.parametrize("width", [390, pytest.param(640, marks=pytest.mark.full)])
def test_pages_fit_narrow_and_zoomed_windows(fleet: ConsoleSite, opened: Opener, width: int) -> None:
    job_id = fleet.jobs["llama-pretrain"]
    fleet.train(job_id, [10, 20])
    page = opened(fleet.url, width=width)
    for path in ("", "jobs", f"jobs/{job_id}", "submit", "loans", "plans", "simulate", "nowhere"):
        page.goto(f"{fleet.url}/#/{path}")
        expect(page.locator(".card, .empty").first).to_be_visible()
        _assert_fits(page, width, path)


def _assert_fits(page: Page, width: int, path: str) -> None:
    assert page.evaluate("document.documentElement.scrollWidth") <= width, path
    wide = "(cards, width) => cards.filter((card) => card.getBoundingClientRect().right > width).length"
    assert page.locator(".card, .uplot").evaluate_all(wide, width) == 0, path
