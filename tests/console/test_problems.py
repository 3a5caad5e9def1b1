"""The strip of problems, the alerts page and the badge: absent when all is well, and still while they are read."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import Page, expect

from api.problems import ProblemCache
from tests.console.fleets import LARGE_NODES
from tests.console.planting import FAILED_JOBS, PLANTED_CODES, clear_problems, plant_problems
from tests.console.test_accessibility import find_serious_violations

if TYPE_CHECKING:
    from tests.console.conftest import Opener
    from tests.console.console_site import ConsoleSite

STRIP = ".problems"


@pytest.fixture
def site_of_problems(fleet: ConsoleSite) -> ConsoleSite:
    """A fleet that finds its problems again with each request for a new state."""
    fleet.app.state.problems = ProblemCache(clock_s=lambda: 0.0)
    return fleet


def entries(page: Page) -> list[str]:
    return [str(each.get_attribute("data-code")) for each in page.locator(".problem-list > li").all()]


def test_strip_is_absent_on_a_healthy_fleet(fleet: ConsoleSite, opened: Opener) -> None:
    page = opened(fleet.url)
    with page.expect_response(re.compile("/v1/problems")):
        page.reload()
    expect(page.locator(".tile")).to_have_count(16)
    expect(page.locator(STRIP)).to_have_count(0)
    expect(page.locator("#nav .tally")).to_have_count(0)
    page.goto(f"{fleet.url}/#/alerts")
    expect(page.get_by_text("There are no problems")).to_be_visible()
    expect(page.get_by_text("All is well.")).to_be_visible()


def test_planted_problems_are_named_with_what_helps(site_of_problems: ConsoleSite, opened: Opener) -> None:
    site = site_of_problems
    page = opened(site.url)
    expect(page.locator(".tile")).to_have_count(16)
    plant_problems(site)
    expect(page.locator(f"{STRIP} .problem-list > li")).to_have_count(len(PLANTED_CODES))
    assert entries(page) == list(PLANTED_CODES)
    with site.client() as client:
        answer = client.problems()
    for item in answer["items"]:
        if item["code"] != "JobFailed":
            entry = page.locator(f"li[data-code={item['code']}]")
            expect(entry.locator(".cause")).to_have_text(item["cause"])
            expect(entry.locator("code")).to_have_text(item["command"])
    failed = page.locator("li[data-code=JobFailed]")
    expect(failed.locator("summary")).to_have_text(f"{FAILED_JOBS} jobs failed in the last 24 hours")
    failed.locator("summary").click()
    expect(failed.locator("details li")).to_have_count(FAILED_JOBS)
    expect(page.locator("#nav .tally")).to_have_text(re.compile(rf"^{len(answer['items'])} problems$"))
    expect(page.locator("#news")).to_contain_text("Node i0 of pool inference is past its deadline")
    failed.locator("details a").first.click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("failed-0")


def test_strip_waits_while_it_is_read(site_of_problems: ConsoleSite, opened: Opener) -> None:
    site = site_of_problems
    plant_problems(site)
    page = opened(site.url)
    expect(page.locator(f"{STRIP} .problem-list > li")).to_have_count(len(PLANTED_CODES))
    page.locator("li[data-code=NodeDown]").hover()
    with page.expect_response(re.compile("/v1/problems")):
        clear_problems(site)
    expect(page.locator("#nav .tally")).to_have_text(re.compile(r"^8 problems$"))
    assert entries(page) == list(PLANTED_CODES)
    page.mouse.move(700, 5)
    expect(page.locator(f"{STRIP} .problem-list > li")).to_have_count(2)
    assert entries(page) == ["JobLosesWork", "JobFailed"]


def test_alerts_page_lists_problems_by_severity_and_the_rules(site_of_problems: ConsoleSite, opened: Opener) -> None:
    site = site_of_problems
    plant_problems(site)
    page = opened(f"{site.url}/#/alerts")
    expect(page.get_by_role("region", name="Critical").locator("li[data-code=RecallLate]")).to_be_visible()
    expect(page.get_by_role("region", name="Warning").locator("li[data-code=NodeDown] time")).to_have_text(
        re.compile(r"^3\d min")
    )
    with site.client() as client:
        rules = client.alert_rules()["items"]
    rows = page.get_by_role("list", name="Alert rules").get_by_role("listitem")
    expect(rows).to_have_count(len(rules))
    expect(rows.first.locator("a")).to_have_attribute("href", rules[0]["runbook"])


@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.full)])
def test_problems_are_accessible(site_of_problems: ConsoleSite, opened: Opener, scheme: str, width: int) -> None:
    plant_problems(site_of_problems)
    page = opened(site_of_problems.url, scheme=scheme, width=width)
    for path in ("", "alerts"):
        page.goto(f"{site_of_problems.url}/#/{path}")
        expect(page.locator("li[data-code=NodeDown]")).to_be_visible()
        assert find_serious_violations(page) == []
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), path


def test_large_fleet_shows_its_problems_soon(large: ConsoleSite, opened: Opener) -> None:
    page = opened(large.url)
    expect(page.locator(".cell")).to_have_count(LARGE_NODES)
    expect(page.locator(f"{STRIP} .problem-list > li").first).to_be_visible()
