"""Gantt page: boxes of jobs, marks, filters in the address, keys, pages of nodes, and 5,000 allocations at once."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from playwright.sync_api import Route, expect

from scheduler.domain.allocation_span import AllocationSpan, SpanEnd
from scheduler.store.allocation_history import SpanQuery
from scheduler.store.protocol import Commit
from tests.console.fleets import LARGE_NODES

if TYPE_CHECKING:
    from tests.console.conftest import Opener
    from tests.console.console_site import ConsoleSite

SPANS = 5000
DAY_S = 86_400.0


def test_boxes_lead_to_jobs_and_filters_stay_in_the_address(fleet: ConsoleSite, opened: Opener) -> None:
    fleet.ticks(3, every_s=300.0)
    page = opened(f"{fleet.url}/#/gantt?last=3600")
    box = page.locator(f'.gantt-track a[href="#/jobs/{fleet.jobs["llama-pretrain"]}"]').first
    expect(box).to_be_visible()
    expect(page.locator(".gantt-lane:not(.gantt-times)")).to_have_count(16)
    page.get_by_label("Queue").fill("products")
    page.get_by_role("button", name="Filter").click()
    expect(box).to_have_count(0)
    expect(page.locator(".gantt-track a").first).to_be_visible()
    assert "queue=products" in page.url
    page.reload()
    expect(page.get_by_label("Queue")).to_have_value("products")
    page.get_by_label("Queue").fill("")
    page.get_by_role("button", name="Filter").click()
    box.click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("llama-pretrain")


def test_what_was_typed_stays_when_the_pools_arrive(fleet: ConsoleSite, opened: Opener) -> None:
    fleet.ticks(1)
    page = opened(f"{fleet.url}/#/settings")
    expect(page.get_by_role("heading", level=1)).to_be_visible()
    held: list[Route] = []
    page.route("**/v1/overview*", lambda route: held.append(route))
    page.evaluate("location.hash = '#/gantt?queue=products'")
    queue = page.get_by_label("Queue")
    queue.fill("research")
    page.wait_for_timeout(200)
    assert held, "the page asked for no pools"
    while held:
        held.pop().continue_()
    expect(page.get_by_label("Pool").locator("option")).to_have_count(3)
    expect(queue).to_have_value("research")


def test_numbers_of_the_table_are_those_of_the_api(fleet: ConsoleSite, opened: Opener) -> None:
    fleet.ticks(3, every_s=300.0)
    page = opened(f"{fleet.url}/#/gantt?last=86400")
    page.get_by_text("Allocations as a table").click()
    now_s = fleet.clock.now_s()
    spans = fleet.store.allocations.find_spans(SpanQuery(now_s - DAY_S, now_s), before=None, limit=999)
    expect(page.get_by_role("region", name="Allocations").locator("tbody tr")).to_have_count(len(spans))
    jobs = page.get_by_role("region", name="Jobs in this time")
    expect(jobs.locator("tbody tr")).to_have_count(len({each.span.job_id for each in spans}))


def test_keys_zoom_and_move_the_visible_time(fleet: ConsoleSite, opened: Opener) -> None:
    page = opened(f"{fleet.url}/#/gantt?last=3600")
    chart = page.locator(".gantt")
    expect(chart).to_be_visible()
    chart.focus()
    page.keyboard.press("-")
    page.wait_for_function("location.hash.includes('last=7200')")
    page.keyboard.press("ArrowLeft")
    page.wait_for_function("location.hash.includes('until=')")
    expect(page.locator(".gantt")).to_be_focused()
    page.keyboard.press("0")
    page.wait_for_function("!location.hash.includes('until=')")
    page.get_by_role("button", name="Zoom in").click()
    page.wait_for_function("location.hash.includes('last=3600')")


def test_a_large_fleet_is_drawn_within_two_seconds(large: ConsoleSite, opened: Opener) -> None:
    before = large.store.load().snapshot
    now_s = before.now_s
    nodes = sorted(before.nodes.values(), key=lambda node: node.name)
    ends = tuple(SpanEnd)
    spans = []
    for at in range(SPANS):
        node, begin_s = nodes[at % len(nodes)], now_s - DAY_S + (at // len(nodes)) * 15_000.0 + at % 997
        spans.append(
            AllocationSpan(
                f"job-{at % 700:04d}", f"train-{at % 700}", "team-1", "ada", "name:ada", 1, node.name, node.pool,
                node.gpu, tuple(range(1 + at % node.gpus)), False, begin_s, begin_s + 12_000.0, ends[at % len(ends)],
            )
        )  # fmt: skip
    assert large.leader is not None
    snapshot = replace(before, generation=before.generation + 1)
    large.store.commit(Commit(before, snapshot, large.leader.epoch, begun_spans=tuple(spans)))
    page = opened(large.url)
    expect(page.locator(".cell").first).to_be_visible()
    started_s = time.monotonic()
    page.evaluate("location.hash = '#/gantt?last=86400'")
    expect(page.locator(".gantt-box").first).to_be_visible()
    shown_s = time.monotonic() - started_s
    expect(page.locator(".gantt-lane:not(.gantt-times)")).to_have_count(100)
    expect(page.get_by_text(f"Page 1 of {LARGE_NODES // 100}")).to_be_visible()
    assert page.evaluate("document.querySelectorAll('*').length") < 12_000
    assert shown_s < 6.0, f"the page took {shown_s:.1f} s; 2 s on an idle machine"
    print(f"drawn after {shown_s:.2f} s")
    page.get_by_role("button", name="Next nodes").click()
    expect(page.get_by_text(f"Page 2 of {LARGE_NODES // 100}")).to_be_visible()
