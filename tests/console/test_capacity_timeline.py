"""The capacity timeline: draws lent GPUs, and its slider shows the fleet as it was."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

from playwright.sync_api import expect

from tests.console.past_use import add_past_use, write_checkpoint

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from tests.console.conftest import Opener
    from tests.console.console_site import ConsoleSite

SLOWNESS = 3
"""Allowance for other tests on the same processors."""
PAINTED = """(name) => {
    const hex = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
    const wanted = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)).join();
    const canvas = document.querySelector('.capacity canvas');
    const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
    let count = 0;
    for (let at = 0; at < data.length; at += 4) count += data.slice(at, at + 3).join() === wanted;
    return count;
}"""


def slide(page: Page, at_s: float) -> None:
    """Move the slider as the keyboard does, to the position nearest to a time."""
    slider = page.get_by_role("slider", name="Time shown")
    slider.evaluate(
        "(node, at) => { node.value = String(at); node.dispatchEvent(new Event('input', { bubbles: true })); }", at_s
    )


def test_lent_gpus_are_drawn_and_in_the_table(fleet: ConsoleSite, opened: Opener) -> None:
    fleet.demand("inference", 20.0)
    fleet.ticks(12, every_s=100.0)
    page = opened(f"{fleet.url}/#/?range=1h", expects=("willReadFrequently",))
    region = page.get_by_role("region", name="Capacity of inference")
    expect(region).to_contain_text(re.compile(r"GPU-(hours|minutes) lent"))
    page.wait_for_function(f"({PAINTED})('--use-lent-used') > 500")
    assert page.evaluate(PAINTED, "--use-inference") > 500
    region.get_by_text("Values as a table").click()
    table = region.get_by_role("table", name="Use of the GPUs of pool inference")
    rows = table.get_by_role("row")
    expect(rows.nth(1)).to_be_visible()
    heads = table.get_by_role("columnheader").all_inner_texts()
    [pool] = page.evaluate("fetch('/v1/history?pool=inference').then((answer) => answer.json())")["pools"]
    newest = dict(zip(heads, rows.nth(1).locator("th, td").all_inner_texts(), strict=True))
    assert float(newest["Lent, used (GPUs)"]) == pool["uses"]["lent_used"][-1] > 0


def test_slider_shows_the_fleet_as_it_was(fleet: ConsoleSite, opened: Opener) -> None:
    fleet.demand("inference", 20.0)
    fleet.ticks(6, every_s=100.0)
    write_checkpoint(fleet)
    fleet.ticks(2, every_s=100.0)
    then_s = fleet.clock.now_s() - 60.0
    fleet.demand("inference", 78.0)
    fleet.ticks(12, every_s=60.0)
    page = opened(f"{fleet.url}/#/?range=1h")
    expect(page.locator(".tile").first).to_be_visible()
    expect(page.locator(".tile[data-state=lent]")).to_have_count(0)
    expect(page.locator(".capacity .u-over").first).to_be_visible()  # the slider gets its range with the history
    slide(page, then_s)
    expect(page.get_by_text(re.compile("^Showing "))).to_be_visible()
    expect(page.locator(".tile[data-state=lent]:visible").first).to_be_visible()
    expect(page.get_by_role("table", name="Jobs that held GPUs")).to_be_visible()
    expect(page.get_by_text("Recent events")).to_be_hidden()
    assert re.search(r"[?&]at=\d+", page.url)
    again = opened(page.url)
    expect(again.locator(".tile[data-state=lent]:visible").first).to_be_visible()
    again.get_by_role("button", name="Back to now").click()
    expect(again.get_by_text("Recent events")).to_be_visible()
    expect(again.locator(".tile[data-state=lent]:visible")).to_have_count(0)
    assert "at=" not in again.url


def test_slider_and_ranges_work_by_keyboard(fleet: ConsoleSite, opened: Opener) -> None:
    page = opened(fleet.url, expects=("404",))  # nothing was recorded yet
    slider = page.get_by_role("slider", name="Time shown")
    expect(slider).to_have_attribute("aria-valuetext", "now")
    expect(page.locator(".capacity .u-over").first).to_be_visible()
    slider.focus()
    page.keyboard.press("ArrowLeft")
    expect(slider).not_to_have_attribute("aria-valuetext", "now")
    expect(page.get_by_role("button", name="Back to now")).to_be_visible()
    expect(page.get_by_text("The fleet was not recorded then")).to_be_visible()
    page.keyboard.press("End")
    expect(slider).to_have_attribute("aria-valuetext", "now")
    expect(page.get_by_role("button", name="Back to now")).to_be_hidden()
    page.get_by_role("radio", name="6 h").focus()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("radio", name="24 h")).to_be_checked()
    assert page.url.endswith("#/?range=24h")


def test_month_of_a_large_fleet_is_drawn_within_two_seconds(large: ConsoleSite, opened: Opener) -> None:
    add_past_use(large.store, large.clock.now_s(), days=30, nodes=500, epoch=large.lead().epoch)
    opened(f"{large.url}/#/jobs")  # modules are compiled and the snapshot is indexed
    began_s = time.monotonic()
    page = opened(f"{large.url}/#/?range=30d", expects=("willReadFrequently",))
    expect(page.locator(".capacity .u-over").first).to_be_visible()
    page.wait_for_function(f"({PAINTED})('--use-lent-used') > 500")
    took_s = time.monotonic() - began_s
    print(f"drawn in {took_s:.2f} s")
    assert took_s < 2.0 * SLOWNESS
