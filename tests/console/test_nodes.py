"""Nodes page and node page: filters, order, pages, levers and history."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx
from playwright.sync_api import expect

from api.openapi import load_examples
from scheduler.domain.fleet import NodeState
from scheduler.package_version import get_package_version
from tests.console.fleets import LARGE_NODES, commit_nodes
from tests.console.test_access import UNAUTHORIZED, create_token, guarded, sign_in

if TYPE_CHECKING:
    from tests.console.conftest import Opener
    from tests.console.console_site import ConsoleSite

__all__ = ["guarded"]  # a fixture


def test_filters_and_order_are_in_the_address(fleet: ConsoleSite, opened: Opener) -> None:
    page = opened(f"{fleet.url}/#/nodes")
    rows = page.locator("tbody tr")
    expect(rows).to_have_count(16)
    page.get_by_label("Pool").select_option("training")
    expect(rows).to_have_count(6)
    page.get_by_label("Name contains").press_sequentially("T3")
    expect(rows).to_have_count(1)
    assert "#/nodes?name=T3&pool=training" in page.url
    page.get_by_label("Name contains").fill("")
    heading = page.get_by_role("button", name="Node")
    heading.click()
    expect(rows.first).to_contain_text("t5")
    expect(page.get_by_role("columnheader", name="Node")).to_have_attribute("aria-sort", "descending")
    expect(heading).to_be_focused()
    page.reload()
    expect(rows.first).to_contain_text("t5")
    expect(rows).to_have_count(6)


def test_every_row_equals_the_overview(fleet: ConsoleSite, opened: Opener) -> None:
    page = opened(f"{fleet.url}/#/nodes")
    expect(page.locator("tbody tr")).to_have_count(16)
    with fleet.client() as client:
        nodes = client.overview()["nodes"]
    used = {node["name"]: str(node["held"] + node["inference"]) for node in nodes}
    rows = page.locator("tbody tr").evaluate_all("(rows) => rows.map((r) => [...r.children].map((c) => c.textContent))")
    assert {row[0]: row[5] for row in rows} == used
    assert {row[0]: row[3] for row in rows} == {node["name"]: node["gpu"] for node in nodes}


def test_a_large_fleet_is_paged_and_a_change_is_shown(large: ConsoleSite, opened: Opener) -> None:
    page = opened(f"{large.url}/#/nodes?sort=-name")
    rows = page.locator("tbody tr")
    expect(rows).to_have_count(100)
    expect(page.get_by_text(f"Page 1 of {LARGE_NODES // 100}")).to_be_visible()
    page.get_by_role("button", name="Next").click()
    expect(page.get_by_text("Page 2 of")).to_be_visible()
    page.get_by_label("Name contains").fill("t17")
    expect(rows).to_have_count(11)
    commit_nodes(large, {"t17": NodeState.DOWN})
    expect(page.locator("tbody tr", has_text="down")).to_have_count(1)
    page.get_by_label("State").select_option("down")
    expect(rows).to_have_count(1)
    commit_nodes(large, {"t17": NodeState.UP})


def test_a_node_is_drained_and_uncordoned(fleet: ConsoleSite, opened: Opener) -> None:
    page = opened(f"{fleet.url}/#/nodes")
    page.get_by_role("link", name="t0").click()
    expect(page.get_by_role("heading", name="Node t0")).to_be_visible()
    holder = page.get_by_role("list", name="GPUs and the jobs that hold them")
    expect(holder.get_by_role("listitem")).to_have_count(8)
    page.get_by_role("button", name="Drain").click()
    page.get_by_role("dialog").get_by_role("button", name="Drain").click()
    expect(page.get_by_role("button", name="Uncordon")).to_be_visible()
    expect(page.get_by_role("button", name="Drain")).to_have_count(0)
    fleet.ticks(3)
    with fleet.client() as client:
        assert client.node("t0")["draining"]
    expect(page.get_by_role("region", name="History")).to_contain_text("drain")
    page.get_by_role("button", name="Uncordon").click()
    page.get_by_role("dialog").get_by_role("button", name="Uncordon").click()
    expect(page.get_by_role("button", name="Cordon", exact=True)).to_be_visible()


def test_a_node_is_excluded_from_lending(fleet: ConsoleSite, opened: Opener) -> None:
    page = opened(f"{fleet.url}/#/nodes/i0")
    page.get_by_role("button", name="Exclude from lending").click()
    page.get_by_role("dialog").get_by_role("button", name="Exclude from lending").click()
    expect(page.get_by_role("button", name="Allow lending")).to_be_visible()
    fleet.tick()
    with fleet.client() as client:
        assert client.node("i0")["lendable"] is False


def test_a_proposed_loan_is_vetoed_with_a_reason(fleet: ConsoleSite, opened: Opener) -> None:
    with fleet.client() as client:
        client.change_pool("inference", {"lending": {"notice_s": 600}})
    fleet.demand("inference", 20.0)
    fleet.ticks(4, every_s=100.0)
    with fleet.client() as client:
        proposed = [loan["node"] for loan in client.loans(state="proposed")]
    page = opened(f"{fleet.url}/#/nodes/{proposed[0]}")
    page.get_by_role("button", name="Veto loan").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Reason").fill("a release is rolling out")
    dialog.get_by_role("button", name="Veto loan").click()
    expect(page.get_by_role("button", name="Veto loan")).to_have_count(0)
    fleet.tick()
    expect(page.get_by_role("region", name="Loans", exact=True)).to_contain_text("vetoed")
    with fleet.client() as client:
        assert any("a release is rolling out" in event["message"] for event in client.events())


def test_a_machines_agent_and_hardware_are_shown(fleet: ConsoleSite, opened: Opener) -> None:
    example = load_examples()["JoinDocument"]
    with fleet.client() as client:
        token = client.create_join_token("training")["secret"]
    document = {**example, "name": "m0", "version": get_package_version(), "clock_s": fleet.clock.now_s()}
    headers = {"Authorization": f"Bearer {token}"}
    httpx.post(f"{fleet.url}/v1/machines:join", json=document, headers=headers).raise_for_status()
    fleet.tick()
    page = opened(f"{fleet.url}/#/nodes/m0")
    agent = page.get_by_role("region", name="Agent")
    expect(agent).to_contain_text(get_package_version())
    expect(agent).to_contain_text("No report yet")
    hardware = page.get_by_role("region", name="Hardware")
    expect(hardware).to_contain_text(example["inventory"]["gpus"][0]["name"])
    expect(hardware).to_contain_text(example["inventory"]["nics"][0]["name"])
    page.goto(f"{fleet.url}/#/nodes/t0")
    expect(page.get_by_role("region", name="Agent")).to_contain_text("No agent")


def test_a_viewer_sees_why_levers_are_off(guarded: ConsoleSite, opened: Opener) -> None:
    root = create_token(guarded, "root", "admin")
    with guarded.client(root) as client:
        client.create_pool({"name": "training", "kind": "training"})
        client.add_node({"name": "t0", "pool": "training", "gpu": "a100-80g", "gpus": 8})
    guarded.tick()
    page = opened(f"{guarded.url}/#/nodes/t0", expects=UNAUTHORIZED)
    sign_in(page, create_token(guarded, "guest", "viewer"))
    drain = page.get_by_role("button", name="Drain")
    expect(drain).to_be_disabled()
    drain.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("admin")
    links = page.get_by_role("navigation", name="Pages").get_by_role("link")
    expect(links.filter(has_text="Nodes")).to_be_visible()
    for hidden in ("Audit log", "API tokens", "Webhooks", "Settings", "Secrets"):
        expect(links.filter(has_text=hidden)).to_have_count(0)


def test_the_fleet_grids_dialog_links_to_the_node(fleet: ConsoleSite, opened: Opener) -> None:
    page = opened(fleet.url)
    page.get_by_role("option", name="i0").first.click()
    page.get_by_role("link", name="Open the page of the node").click()
    expect(page.get_by_role("heading", name="Node i0")).to_be_visible()
    expect(page.get_by_role("dialog")).to_have_count(0)


def test_without_nodes_the_next_step_is_shown(site: ConsoleSite, opened: Opener) -> None:
    page = opened(f"{site.url}/#/nodes")
    expect(page.get_by_text("ebbtide nodes add")).to_be_visible()


def test_the_menu_of_a_narrow_window_opens_pages(fleet: ConsoleSite, opened: Opener) -> None:
    page = opened(fleet.url, width=390)
    menu = page.get_by_role("button", name="Menu")
    expect(page.get_by_role("link", name="Nodes", exact=True)).to_be_hidden()
    menu.click()
    expect(menu).to_have_attribute("aria-expanded", "true")
    page.keyboard.press("Escape")
    expect(menu).to_be_focused()
    menu.press("Enter")
    page.get_by_role("link", name="Nodes", exact=True).click()
    expect(page.get_by_role("heading", name="Nodes")).to_be_visible()
    expect(menu).to_have_attribute("aria-expanded", "false")
