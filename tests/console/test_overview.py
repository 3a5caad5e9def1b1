"""The overview in a real browser: the tide comes and goes live, levers ask first, a lost connection comes back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from playwright.sync_api import expect

from tests.console.fleets import furnish

if TYPE_CHECKING:
    from tests.console.conftest import Opener
    from tests.console.console_site import ConsoleSite


def test_a_lend_and_a_recall_are_seen_as_they_happen(fleet: ConsoleSite, opened: Opener) -> None:
    page = opened(fleet.url)
    tiles = page.get_by_role("listbox", name="Nodes of pool inference")
    expect(tiles.get_by_role("option")).to_have_count(10)
    expect(page.locator("#connection")).to_have_text("Live")
    page.evaluate("window.isSamePage = true")
    fleet.demand("inference", 20.0)
    fleet.ticks(4, every_s=100.0)
    expect(tiles.locator("[data-state=lent]").first).to_be_visible()
    expect(page.get_by_text("The tide is in")).to_be_visible()
    fleet.demand("inference", 78.0)
    fleet.tick()
    expect(tiles.locator("[data-state=recalled]").first).to_be_visible()
    expect(page.locator("#news")).to_contain_text("has to be home")
    fleet.ticks(10, every_s=60.0)
    expect(page.get_by_text("Nothing is lent now.")).to_be_visible()
    assert page.evaluate("window.isSamePage"), "it was never loaded anew"


def test_levers_ask_before_they_are_pulled(fleet: ConsoleSite, opened: Opener) -> None:
    fleet.demand("inference", 20.0)
    fleet.ticks(4, every_s=100.0)
    page = opened(fleet.url)
    page.get_by_role("button", name="Recall all").click()
    dialog = page.get_by_role("dialog", name="Recall every loan?")
    expect(dialog).to_contain_text("are called home")
    dialog.get_by_role("button", name="Leave it").click()
    expect(dialog).to_be_hidden()
    assert fleet.store.count_pending_commands() == 0
    page.get_by_role("button", name="Pause lending").click()
    page.get_by_role("dialog").get_by_role("button", name="Pause lending").click()
    expect(page.get_by_text("Lending is paused; what is lent stays lent.")).to_be_visible()
    page.get_by_role("button", name="Recall all").click()
    page.get_by_role("dialog").get_by_role("button", name="Recall all").click()
    expect(page.get_by_role("button", name="Recall all")).to_be_hidden()
    fleet.tick()
    states = {loan.state.value for loan in fleet.store.load().snapshot.loans.values() if loan.is_live}
    assert states == {"recalled"}
    page.get_by_role("button", name="Resume lending").click()
    page.get_by_role("dialog").get_by_role("button", name="Resume lending").click()
    expect(page.get_by_role("button", name="Pause lending")).to_be_visible()


def test_a_lost_connection_is_told_and_comes_back_with_what_was_missed(fleet: ConsoleSite, opened: Opener) -> None:
    page = opened(fleet.url, expects=("ERR_CONNECTION_REFUSED", "ERR_INCOMPLETE_CHUNKED", "ERR_CONNECTION_RESET"))
    connection = page.locator("#connection")
    expect(connection).to_have_text("Live")
    expect(page.locator(".tile")).to_have_count(16)
    fleet.close()
    expect(connection).to_have_text("Connection lost, trying again")
    fleet.open()
    fleet.demand("inference", 20.0)
    fleet.ticks(4, every_s=100.0)
    expect(connection).to_have_text("Live")
    expect(page.locator(".tile[data-state=lent]").first).to_be_visible()


def test_an_empty_service_says_what_to_do_next(site: ConsoleSite, opened: Opener) -> None:
    page = opened(site.url)
    expect(page.get_by_text("There are no pools yet")).to_be_visible()
    furnish(site)
    site.tick()
    expect(page.get_by_role("listbox", name="Nodes of pool training")).to_be_visible()


def test_nodes_are_reached_by_keys_and_tell_of_their_jobs(fleet: ConsoleSite, opened: Opener) -> None:
    page = opened(fleet.url)
    nodes = page.get_by_role("listbox", name="Nodes of pool training").get_by_role("option")
    nodes.first.focus()
    page.keyboard.press("ArrowRight")
    expect(nodes.nth(1)).to_be_focused()
    page.keyboard.press("End")
    expect(nodes.last).to_be_focused()
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog", name="Node t5")
    expect(dialog).to_contain_text("8 × a100-80g")
    page.keyboard.press("Escape")
    expect(nodes.last).to_be_focused()
