"""Accessibility: axe-core finds no serious violation on any page in either theme. Saves screenshots."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from playwright.sync_api import Page, expect

from tests.console.conftest import AXE
from tests.console.past_use import write_checkpoint

if TYPE_CHECKING:
    from tests.console.conftest import Opener
    from tests.console.console_site import ConsoleSite

Picture = Callable[[Page, str], None]


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.full)])
def test_pages_have_no_serious_accessibility_violation(
    fleet: ConsoleSite, opened: Opener, picture: Picture, scheme: str
) -> None:
    with fleet.client() as client:
        waiting = client.submit({"name": "huge", "gpus": {"min": 96, "max": 96}, "steps": 10, "command": ["true"]})[
            "id"
        ]
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
        "gantt": ("gantt", ".gantt-box"),
        "savings": ("savings", ".savings-chart"),
        "plans": ("plans", "form"),
        "solved-plan": ("plans?model=gpt2&gpu=a100-80g&gpus=4&globalBatch=8", ".stage"),
        "simulate": ("simulate", ".empty"),
    }
    write_checkpoint(fleet)
    pages["past"] = (f"?range=1h&at={int(fleet.clock.now_s()) + 1}", "[aria-label='Jobs that held GPUs']")
    fleet.tick(after_s=60.0)
    page = opened(fleet.url, scheme=scheme)
    faults = {}
    for name, (path, mark) in pages.items():
        page.goto(f"{fleet.url}/#/{path}")
        expect(page.locator(mark).first).to_be_visible()
        picture(page, f"{name}-{scheme}")
        if found := find_serious_violations(page):
            faults[name] = found
    page.goto(f"{fleet.url}/#/")
    page.get_by_role("button", name="Recall all").click()
    faults |= {"dialog": found} if (found := find_serious_violations(page)) else {}
    assert faults == {}


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


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, pytest.param(800, marks=pytest.mark.full), 1440])
def test_operator_pages_have_no_serious_accessibility_violation(
    fleet: ConsoleSite, opened: Opener, picture: Picture, scheme: str, width: int
) -> None:
    fleet.demand("inference", 20.0)
    fleet.ticks(4, every_s=100.0)
    with fleet.client() as client:
        webhook = client.create_webhook({"url": "https://hooks.example.com/ebbtide"})["id"]
        client.test_webhook(webhook)
        client.create_token("ci", ["submitter:research"])
        client.set_secret("research", "hf-token", b"hf_1234567")
    page = opened(fleet.url, scheme=scheme, width=width)
    faults = {}
    for path, mark in OPERATOR_PAGES.items():
        page.goto(f"{fleet.url}/#/{path.format(webhook=webhook)}")
        expect(page.locator(mark).first).to_be_visible()
        picture(page, f"{path.partition('?')[0].replace('/', '-').partition('{')[0]}-{scheme}-{width}")
        if found := find_serious_violations(page):
            faults[path] = found
        assert page.evaluate("document.documentElement.scrollWidth") <= width, path
    if width < 860:
        page.get_by_role("button", name="Menu").click()
        faults |= {"menu": found} if (found := find_serious_violations(page)) else {}
    assert faults == {}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_runbook_has_no_serious_accessibility_violation(
    fleet: ConsoleSite, opened: Opener, picture: Picture, scheme: str
) -> None:
    page = opened(fleet.url, scheme=scheme)
    page.goto(f"{fleet.url}/docs/runbook#ebbtidethrashing")
    expect(page.get_by_role("heading", name="EbbtideThrashing")).to_be_in_viewport()
    picture(page, f"runbook-{scheme}")
    assert find_serious_violations(page) == []
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.full)])
def test_large_fleet_has_no_serious_accessibility_violation(
    large: ConsoleSite, opened: Opener, picture: Picture, scheme: str
) -> None:
    page = opened(large.url, scheme=scheme)
    expect(page.locator(".cell").first).to_be_visible()
    picture(page, f"large-{scheme}")
    assert find_serious_violations(page) == []


@pytest.mark.full
def test_narrow_window_screenshots(fleet: ConsoleSite, opened: Opener, picture: Picture) -> None:
    page = opened(fleet.url, width=390)
    job = f"jobs/{fleet.jobs['llama-pretrain']}"
    for name, path in {"overview": "", "jobs": "jobs", "job": job, "loans": "loans"}.items():
        page.goto(f"{fleet.url}/#/{path}")
        expect(page.locator(".card").first).to_be_visible()
        picture(page, f"{name}-narrow")


def find_serious_violations(page: Page) -> list[str]:
    page.evaluate(AXE.read_text(encoding="utf-8"))
    answer: dict[str, Any] = page.evaluate("axe.run(document, { resultTypes: ['violations'] })")
    serious = (each for each in answer["violations"] if each["impact"] in ("serious", "critical"))
    return [f"{each['id']}: {node['html'][:160]}" for each in serious for node in each["nodes"][:3]]
