"""Decisions page and audit page: filters, pages, details and permissions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from playwright.sync_api import expect

from tests.console.test_access import UNAUTHORIZED, create_token, guarded, sign_in

if TYPE_CHECKING:
    from tests.console.conftest import Opener
    from tests.console.console_site import ConsoleSite

__all__ = ["guarded"]  # a fixture


def test_decisions_are_filtered_and_show_their_reasons(fleet: ConsoleSite, opened: Opener) -> None:
    with fleet.client() as client:
        decisions = list(client.decisions())
    page = opened(f"{fleet.url}/#/decisions")
    entries = page.locator(".record > li")
    expect(entries).to_have_count(len(decisions))
    expect(entries.first).to_contain_text(decisions[-1]["decision"]["reason"]["detail"].replace("->", "→"))
    page.get_by_label("Kind").select_option("StartJob")
    started = [each for each in decisions if each["kind"] == "StartJob"]
    expect(entries).to_have_count(len(started))
    assert page.url.endswith("#/decisions?kind=StartJob")
    subject = page.get_by_label("Job id or node")
    subject.fill(fleet.jobs["embedder"])
    subject.press("Enter")
    expect(entries).to_have_count(len([each for each in started if each["subject"] == fleet.jobs["embedder"]]))
    entries.first.get_by_text("Decision").click()
    expect(entries.first.locator("pre")).to_contain_text("iteration_time_s")
    page.goto(f"{fleet.url}/#/decisions?kind=RejectJob")
    expect(page.get_by_text("No matching decisions")).to_be_visible()


def test_pages_of_decisions(fleet: ConsoleSite, opened: Opener) -> None:
    for at in range(60):
        fleet.demand("inference", 20.0 + 50.0 * (at % 2))
        fleet.tick(after_s=310.0)
    with fleet.client() as client:
        numbers = [each["number"] for each in client.decisions()]
    page = opened(f"{fleet.url}/#/decisions")
    entries = page.locator(".record > li")
    expect(entries).to_have_count(50)
    expect(entries.first.locator("summary")).to_contain_text(f"Decision {numbers[-1]},")
    page.get_by_role("button", name="Older").click()
    expect(entries.first.locator("summary")).to_contain_text(f"Decision {numbers[-51]},")
    page.get_by_role("button", name="Newer").click()
    expect(entries.first.locator("summary")).to_contain_text(f"Decision {numbers[-1]},")


def test_the_audit_log_is_filtered_and_verified(fleet: ConsoleSite, opened: Opener) -> None:
    page = opened(f"{fleet.url}/#/audit")
    entries = page.locator(".record > li")
    expect(entries.first).to_contain_text("anybody")
    page.get_by_label("Job id, node, pool or queue").fill("research")
    page.get_by_role("button", name="Filter").click()
    expect(entries).to_have_count(1)
    assert page.url.endswith("#/audit?subject=research")
    entries.first.get_by_text("Entry").click()
    expect(entries.first.locator("pre")).to_contain_text('"guaranteed_gpus": 24')
    page.get_by_role("button", name="Verify the log").click()
    expect(page.get_by_role("region", name="Verification")).to_contain_text("EBBTIDE_AUDIT_CHAIN")
    page.goto(f"{fleet.url}/#/audit?actor=unknown")
    expect(page.get_by_text("No matching entries")).to_be_visible()


def test_a_viewer_cannot_open_the_audit_log(guarded: ConsoleSite, opened: Opener) -> None:
    page = opened(f"{guarded.url}/#/audit", expects=UNAUTHORIZED)
    sign_in(page, create_token(guarded, "guest", "viewer"))
    expect(page.get_by_role("alert")).to_be_visible()
    expect(page.locator(".record")).to_have_count(0)


def test_without_decisions_the_next_step_is_shown(site: ConsoleSite, opened: Opener) -> None:
    page = opened(f"{site.url}/#/decisions")
    expect(page.get_by_text("No decisions yet")).to_be_visible()
    expect(page.get_by_role("link", name="Submit a job")).to_be_visible()
