"""Loans page: past loans and loading of older loans."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from playwright.sync_api import expect

from scheduler.domain.fleet import LoanState
from scheduler.store.protocol import Commit
from tests.builders import a_loan

if TYPE_CHECKING:
    from tests.console.conftest import Opener
    from tests.console.console_site import ConsoleSite


def test_past_loan_shows_its_lending_and_recall_times(fleet: ConsoleSite, opened: Opener) -> None:
    fleet.demand("inference", 20.0)
    fleet.ticks(4, every_s=100.0)
    fleet.demand("inference", 78.0)
    fleet.ticks(12, every_s=60.0)
    page = opened(f"{fleet.url}/#/loans")
    expect(page.locator(".track [data-state=active]").first).to_be_visible()
    expect(page.locator(".track [data-state=recalled]").first).to_be_visible()
    row = page.get_by_role("region", name="Loans").get_by_role("row").nth(1)
    expect(row).to_contain_text("returned")
    expect(row.locator("time")).to_have_count(4)
    page.get_by_label("Last").select_option("24 h")
    expect(page.get_by_text("in the last 1 d")).to_be_visible()
    assert page.evaluate("location.hash") == "#/loans?last=86400"


def test_older_loans_can_be_loaded(fleet: ConsoleSite, opened: Opener) -> None:
    before, now_s = fleet.store.load().snapshot, fleet.clock.now_s()
    after = replace(before, generation=before.generation + 1)
    ended = tuple(
        replace(
            a_loan("i0", LoanState.RETURNED),
            id=f"i0-{at}",
            offered_at_s=now_s - 30.0 * at - 60.0,
            state_since_s=now_s - 30.0 * at - 40.0,
        )
        for at in range(600)
    )
    fleet.store.commit(Commit(before, after, fleet.lead().epoch, ended_loans=ended))
    page = opened(f"{fleet.url}/#/loans")
    expect(page.get_by_text("500 loans loaded. Ended loans offered before")).to_be_visible()
    page.get_by_role("button", name="Load 500 more").click()
    expect(page.get_by_role("button", name="Load 500 more")).to_be_hidden()
    expect(page.get_by_text("600 loans in the last")).to_be_visible()
