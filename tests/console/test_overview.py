"""Overview page: live loans, confirmed actions, reconnection and keyboard navigation."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from playwright.sync_api import expect

from scheduler.domain.prefetch import PrefetchPurpose, PrefetchResult
from scheduler.domain.standby import StandbyPhase, StandbyState
from scheduler.store.protocol import Commit
from tests.console.fleets import create_fleet

if TYPE_CHECKING:
    from tests.console.conftest import Opener
    from tests.console.console_site import ConsoleSite


def test_loan_and_recall_appear_live(fleet: ConsoleSite, opened: Opener) -> None:
    page = opened(fleet.url)
    tiles = page.get_by_role("listbox", name="Nodes of pool inference")
    expect(tiles.get_by_role("option")).to_have_count(10)
    expect(page.locator("#connection")).to_have_text("Live")
    page.evaluate("window.isSamePage = true")
    fleet.demand("inference", 20.0)
    fleet.ticks(4, every_s=100.0)
    expect(tiles.locator("[data-state=lent]").first).to_be_visible()
    expect(page.get_by_text(re.compile(r"inference nodes? lent to training"))).to_be_visible()
    fleet.demand("inference", 78.0)
    fleet.tick()
    expect(tiles.locator("[data-state=recalled]").first).to_be_visible()
    expect(page.locator("#news")).to_contain_text(re.compile(r"\bi\d\b"))
    fleet.ticks(10, every_s=60.0)
    expect(page.get_by_text("No node is lent now.")).to_be_visible()
    assert page.evaluate("window.isSamePage"), "it was never loaded anew"


def test_actions_require_confirmation(fleet: ConsoleSite, opened: Opener) -> None:
    fleet.demand("inference", 20.0)
    fleet.ticks(4, every_s=100.0)
    page = opened(fleet.url)
    page.get_by_role("button", name="Recall all").click()
    dialog = page.get_by_role("dialog", name="Recall all loans?")
    expect(dialog).to_contain_text("are recalled")
    dialog.get_by_role("button", name="Go back").click()
    expect(dialog).to_be_hidden()
    assert fleet.store.count_pending_commands() == 0
    page.get_by_role("button", name="Pause lending").click()
    page.get_by_role("dialog").get_by_role("button", name="Pause lending").click()
    expect(page.get_by_text("Lending is paused. Current loans continue.")).to_be_visible()
    page.get_by_role("button", name="Recall all").click()
    page.get_by_role("dialog").get_by_role("button", name="Recall all").click()
    expect(page.get_by_role("button", name="Recall all")).to_be_hidden()
    fleet.tick()
    states = {loan.state.value for loan in fleet.store.load().snapshot.loans.values() if loan.is_live}
    assert states == {"recalled"}
    page.get_by_role("button", name="Resume lending").click()
    page.get_by_role("dialog").get_by_role("button", name="Resume lending").click()
    expect(page.get_by_role("button", name="Pause lending")).to_be_visible()


def test_lost_connection_is_shown_and_missed_changes_appear_after_reconnect(fleet: ConsoleSite, opened: Opener) -> None:
    page = opened(fleet.url, expects=("ERR_CONNECTION_REFUSED", "ERR_INCOMPLETE_CHUNKED", "ERR_CONNECTION_RESET"))
    connection = page.locator("#connection")
    expect(connection).to_have_text("Live")
    expect(page.locator(".tile")).to_have_count(16)
    fleet.close()
    expect(connection).to_have_text("Connection lost, reconnecting")
    fleet.open()
    fleet.demand("inference", 20.0)
    fleet.ticks(4, every_s=100.0)
    expect(connection).to_have_text("Live")
    expect(page.locator(".tile[data-state=lent]").first).to_be_visible()


def test_empty_service_shows_next_steps(site: ConsoleSite, opened: Opener) -> None:
    page = opened(site.url)
    expect(page.get_by_text("There are no pools yet")).to_be_visible()
    create_fleet(site)
    site.tick()
    expect(page.get_by_role("listbox", name="Nodes of pool training")).to_be_visible()


def test_node_grid_is_navigable_by_keyboard(fleet: ConsoleSite, opened: Opener) -> None:
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


def test_node_shows_its_standby_replicas_and_why_they_failed(fleet: ConsoleSite, opened: Opener) -> None:
    before = fleet.store.load().snapshot
    detail = "pod chat/llm-0: it accepted the order, but is still awake after 60 s"
    standby = StandbyState(StandbyPhase.SLEEP_FAILED, fleet.clock.now_s() - 90.0, detail, detail)
    pull = PrefetchResult("uid", PrefetchPurpose.SERVING, fleet.clock.now_s(), 41.0, "ErrImagePull: llm:1: denied")
    nodes = {**before.nodes, "i0": replace(before.nodes["i0"], standby=standby, prefetches=(pull,))}
    after = replace(before, generation=before.generation + 1, nodes=nodes)
    fleet.store.commit(Commit(before, after, fleet.lead().epoch))
    page = opened(fleet.url)
    page.get_by_role("listbox", name="Nodes of pool inference").get_by_role("option").first.click()
    dialog = page.get_by_role("dialog", name="Node i0")
    expect(dialog).to_contain_text("did not become idle")
    expect(dialog).to_contain_text("after 41 s: ErrImagePull: llm:1: denied")
    expect(dialog).to_contain_text("still awake after 60 s")
