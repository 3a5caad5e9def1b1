"""A fleet of 1,000 nodes and 5,000 jobs: complete, and an update redraws changed nodes only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from playwright.sync_api import expect

from scheduler.domain.fleet import NodeState
from tests.console.fleets import LARGE_JOBS, LARGE_NODES, commit_nodes

if TYPE_CHECKING:
    from tests.console.conftest import Opener
    from tests.console.console_site import ConsoleSite


def test_changed_node_redraws_only_itself(large: ConsoleSite, opened: Opener) -> None:
    page = opened(large.url)
    expect(page.locator(".cell")).to_have_count(LARGE_NODES)
    expect(page.locator("#connection")).to_have_text("Live")
    page.evaluate(
        """() => {
            window.touched = new Set();
            const note = (changes) => changes.forEach(({ target }) => touched.add(target.dataset.name));
            const watch = new MutationObserver(note);
            const all = { subtree: true, attributes: true, childList: true };
            for (const list of document.querySelectorAll(".nodes")) watch.observe(list, all);
        }"""
    )
    commit_nodes(large, {"t17": NodeState.DOWN})
    expect(page.locator("[data-name=t17]")).to_have_attribute("data-state", "down")
    assert page.evaluate("[...touched]") == ["t17"]


def test_job_list_pages_through_all_jobs(large: ConsoleSite, opened: Opener) -> None:
    page = opened(f"{large.url}/#/jobs")
    expect(page.locator("tbody tr")).to_have_count(100)
    expect(page.locator("tbody tr").first).to_contain_text("job-0000")
    page.get_by_role("button", name="Older").click()
    expect(page.locator("tbody tr").first).to_contain_text("job-0100")
    page.get_by_role("button", name="Newer").click()
    expect(page.locator("tbody tr").first).to_contain_text("job-0000")
    page.get_by_role("textbox", name="Labels").fill("team=team-1,example.com/stage!=pretrain,number in (13,14,25)")
    page.get_by_role("button", name="Filter").click()
    expect(page.locator("tbody tr")).to_have_count(2)
    page.get_by_role("textbox", name="Labels").fill("")
    page.get_by_label("Search", exact=True).fill(f"job-{LARGE_JOBS - 1}")
    page.get_by_role("button", name="Filter").click()
    expect(page.locator("tbody tr")).to_have_count(1)
