"""Accessibility: axe finds no serious violation on any page, at three widths and in both themes.

The long variant saves screenshots.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from playwright.sync_api import Page, expect

from tests.console.conftest import AXE
from tests.console.past_use import write_checkpoint

if TYPE_CHECKING:
    from tests.console.conftest import Opener
    from tests.console.console_site import ConsoleSite

Picture = Callable[[Page, str], None]
WIDTHS, SCHEMES = (1440, 800, 390), ("light", "dark")
HEIGHT = 900
PICTURED = {(1440, "light"), (390, "dark")}
COLOUR_RULES = "{ runOnly: ['color-contrast', 'link-in-text-block'], resultTypes: ['violations'] }"
ALL_RULES = "{ resultTypes: ['violations'] }"
_SETTLE = """async () => {
    await document.fonts.ready;
    await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
    for (const each of document.getAnimations()) if (each.effect.getComputedTiming().endTime < Infinity) each.finish();
}"""
"""Wait until the page is drawn in its new size and theme. Transitions of colours would change the contrast."""


class Reviewer:
    """Runs axe on the pages of one tab, in all widths and themes, without loading a page again.

    A page has the same elements in both themes. So the dark theme is checked for the rules about colours only.
    """

    def __init__(self, page: Page, picture: Picture) -> None:
        self.page, self._picture = page, picture
        self.faults: dict[str, list[str]] = {}

    def review(self, name: str) -> None:
        """Check the shown page in each width and theme, also for a horizontal scroll bar."""
        for width in WIDTHS:
            self.page.set_viewport_size({"width": width, "height": HEIGHT})
            for scheme in SCHEMES:
                self._set_scheme(scheme)
                self._note(f"{name}, {width} px, {scheme}", ALL_RULES if scheme == "light" else COLOUR_RULES)
                if (width, scheme) in PICTURED:
                    self._picture(self.page, f"{name}-{scheme}-{width}")
            if self.page.evaluate("document.documentElement.scrollWidth") > width:
                self.faults[f"{name}, {width} px"] = ["it is wider than the window"]

    def review_as_is(self, name: str) -> None:
        """Check the shown page in its present width, in both themes."""
        for scheme in SCHEMES:
            self._set_scheme(scheme)
            self._note(f"{name}, {scheme}", ALL_RULES)

    def _set_scheme(self, scheme: str) -> None:
        self.page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
        expect(self.page.locator("html")).to_have_attribute("data-theme", scheme)
        self.page.evaluate(_SETTLE)

    def _note(self, name: str, rules: str) -> None:
        if found := find_serious_violations(self.page, rules):
            self.faults[name] = found


def test_pages_have_no_serious_accessibility_violation(fleet: ConsoleSite, opened: Opener, picture: Picture) -> None:
    with fleet.client() as client:
        job = {"name": "huge", "gpus": {"min": 96, "max": 96}, "steps": 10, "command": ["true"]}
        waiting = client.submit(job)["id"]
    fleet.demand("inference", 20.0)
    fleet.ticks(4, every_s=100.0)
    fleet.demand("inference", 50.0)
    fleet.tick()
    running = fleet.jobs["llama-pretrain"]
    fleet.train(running, range(10, 400, 30))
    pages = {
        "overview": ("", ".tile"),
        "jobs": ("jobs", "tbody tr"),
        "compare": (f"compare?jobs={running},{fleet.jobs['embedder']}", ".uplot"),
        "running-job": (f"jobs/{running}", ".stage"),
        "waiting-job": (f"jobs/{waiting}", ".steps li"),
        "submit": ("submit", "form"),
        "loans": ("loans", ".track"),
        "alerts": ("alerts", ".rules li"),
        "gantt": ("gantt", ".gantt-box"),
        "savings": ("savings", ".savings-chart"),
        "plans": ("plans", "form"),
        "solved-plan": ("plans?model=gpt2&gpu=a100-80g&gpus=4&globalBatch=8", ".stage"),
        "simulate": ("simulate", ".empty"),
    }
    write_checkpoint(fleet)
    pages["past"] = (f"?range=1h&at={int(fleet.clock.now_s()) + 1}", "[aria-label='Jobs that held GPUs']")
    fleet.tick(after_s=60.0)
    reviewer = Reviewer(opened(fleet.url), picture)
    for name, (path, mark) in pages.items():
        reviewer.page.goto(f"{fleet.url}/#/{path}")
        expect(reviewer.page.locator(mark).first).to_be_visible()
        reviewer.review(name)
    reviewer.page.goto(f"{fleet.url}/#/")
    reviewer.page.get_by_role("button", name="Recall all").click()
    expect(reviewer.page.get_by_role("dialog")).to_be_visible()
    reviewer.review_as_is("dialog")
    assert reviewer.faults == {}


OPERATOR_PAGES = {
    "nodes": "tbody tr",
    "nodes/i9": ".slots li",
    "nodes/t0": ".slots li",
    "queues": "tbody tr",
    "queues/research": ".facts",
    "pools": "tbody tr",
    "pools/inference": ".facts",
    "pools/training": ".facts",
    "decisions": ".record li",
    "audit": ".record li",
    "webhooks": "tbody tr",
    "webhooks/{webhook}": ".record li",
    "tokens": "tbody tr",
    "secrets?queue=research": "tbody tr",
    "settings": "tbody tr",
}
"""Pages for operators, and what is visible once a page is drawn."""


def test_operator_pages_have_no_serious_accessibility_violation(
    fleet: ConsoleSite, opened: Opener, picture: Picture
) -> None:
    fleet.demand("inference", 20.0)
    fleet.ticks(4, every_s=100.0)
    with fleet.client() as client:
        webhook = client.create_webhook({"url": "https://hooks.example.com/ebbtide"})["id"]
        client.test_webhook(webhook)
        client.create_token("ci", ["submitter:research"])
        client.set_secret("research", "hf-token", b"hf_1234567")
    reviewer = Reviewer(opened(fleet.url), picture)
    for path, mark in OPERATOR_PAGES.items():
        reviewer.page.goto(f"{fleet.url}/#/{path.format(webhook=webhook)}")
        expect(reviewer.page.locator(mark).first).to_be_visible()
        reviewer.review(path.partition("?")[0].replace("/", "-").partition("-{")[0])
    reviewer.page.get_by_role("button", name="Menu").click()
    reviewer.review_as_is("menu")
    assert reviewer.faults == {}


def test_the_runbook_has_no_serious_accessibility_violation(
    fleet: ConsoleSite, opened: Opener, picture: Picture
) -> None:
    page = opened(f"{fleet.url}/docs/runbook#ebbtidethrashing")
    expect(page.get_by_role("heading", name="EbbtideThrashing")).to_be_in_viewport()
    reviewer = Reviewer(page, picture)
    reviewer.review("runbook")
    assert reviewer.faults == {}


def test_large_fleet_has_no_serious_accessibility_violation(
    large: ConsoleSite, opened: Opener, picture: Picture
) -> None:
    page = opened(large.url, width=1440)
    expect(page.locator(".cell").first).to_be_visible()
    picture(page, "large")
    reviewer = Reviewer(page, picture)
    reviewer.review_as_is("large")
    assert reviewer.faults == {}


def find_serious_violations(page: Page, rules: str = ALL_RULES) -> list[str]:
    """Return the serious violations that axe finds on the shown page. A document loads axe once."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(AXE.read_text(encoding="utf-8"))
    answer: dict[str, Any] = page.evaluate(f"axe.run(document, {rules})")
    serious = (each for each in answer["violations"] if each["impact"] in ("serious", "critical"))
    return [f"{each['id']}: {node['html'][:160]}" for each in serious for node in each["nodes"][:3]]
