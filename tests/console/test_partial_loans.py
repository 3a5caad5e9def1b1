"""Loans of a part of a node: the lever of the node page, and where the loan is shown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from playwright.sync_api import Page, expect

if TYPE_CHECKING:
    from tests.console.conftest import Opener
    from tests.console.console_site import ConsoleSite

NODE = "i8"


def lend_part(site: ConsoleSite) -> None:
    """Lend GPUs 4 to 7 of node i8, while inference uses its other four."""
    with site.client() as client:
        client.change_node(NODE, lendable_gpus=[4, 5, 6, 7])
    site.demand("inference", 67.5)
    site.ticks(12, every_s=100.0)
    loan = site.store.load().snapshot.loans[NODE]
    assert (loan.state, loan.gpus) == ("active", 4)


def slot_states(page: Page) -> list[str]:
    slots = page.get_by_role("list", name="GPUs and the jobs that hold them").get_by_role("listitem")
    expect(slots).to_have_count(8)
    return [slots.nth(index).get_attribute("data-state") or "" for index in range(8)]


def test_lendable_gpus_are_set_on_the_node_page(fleet: ConsoleSite, opened: Opener) -> None:
    page = opened(f"{fleet.url}/#/nodes/{NODE}", expects=("422",))
    page.get_by_role("button", name="Set lendable GPUs").click()
    dialog = page.get_by_role("dialog")
    field = dialog.get_by_label("Lendable GPUs", exact=True)
    expect(field).to_have_value("")
    for wrong in ("7-4", "4-9"):
        field.fill(wrong)
        dialog.get_by_role("button", name="Set lendable GPUs").click()
        expect(field).to_have_attribute("aria-invalid", "true")
        expect(dialog.locator(".wrong")).to_contain_text("Accepted:")
        expect(field).to_have_value(wrong)
    field.fill("4-7")
    dialog.get_by_role("button", name="Set lendable GPUs").click()
    expect(dialog).to_be_hidden()
    expect(page.get_by_text("4 of 8 GPUs: 4–7")).to_be_visible()
    fleet.ticks(1, every_s=1.0)
    assert fleet.store.load().snapshot.nodes[NODE].lendable_gpus == (4, 5, 6, 7)


def test_partial_loan_is_shown_with_its_gpus(fleet: ConsoleSite, opened: Opener) -> None:
    lend_part(fleet)
    page = opened(f"{fleet.url}/#/nodes/{NODE}")
    expect(page.locator(".figures").get_by_text("On loan")).to_be_visible()
    states = slot_states(page)
    assert states[:4] == ["inference"] * 4
    assert "inference" not in states[4:]
    expect(page.get_by_role("region", name="State").get_by_text("4 of 8 GPUs, since")).to_be_visible()
    page.goto(f"{fleet.url}/#/loans")
    row = page.get_by_role("row").filter(has=page.get_by_role("link", name=NODE, exact=True))
    expect(row.get_by_role("cell", name="4 of 8 GPUs")).to_be_visible()
    page.goto(f"{fleet.url}/#/pools/inference")
    with fleet.client() as client:
        lent = client.pool("inference")["lent_gpus"]
    assert lent % 8 == 4
    expect(page.locator(".figures").get_by_text(f"{lent} GPUs;")).to_be_visible()
