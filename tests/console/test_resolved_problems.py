"""Resolved problems: the card of the alerts page, and the marks of the capacity timeline."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from playwright.sync_api import expect

from scheduler.domain.problems import ProblemCode, ProblemEpisode, Severity, SubjectKind
from tests.console.past_use import add_past_use
from tests.console.test_accessibility import find_serious_violations

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.console.conftest import Opener
    from tests.console.console_site import ConsoleSite

ENTRIES = "[aria-label='Resolved problems'] > li"


def build_episodes(now_s: float) -> Iterator[ProblemEpisode]:
    """Yield problems of the last hours and one of five days ago."""
    node, pool, job = SubjectKind.NODE, SubjectKind.POOL, SubjectKind.JOB
    warning, critical = Severity.WARNING, Severity.CRITICAL
    for hours, minutes, times, code, severity, kind, subject, cause, of_pool, ending in (
        (0.1, 2, 1, ProblemCode.RECALL_AT_RISK, warning, node, "i3", "Jobs still hold 4 of the 8 GPUs of node i3, 60 s "
         "before its deadline.", "inference", "The node was returned."),
        (1.5, 33, 4, ProblemCode.NODE_DOWN, warning, node, "i1", "Node i1 of pool inference is down with 8 GPUs; the "
         "agent of machine i1 is silent.", "inference", "The node is up again."),
        (3.0, 12, 1, ProblemCode.INFERENCE_SHORT, critical, pool, "inference", "Pool inference needs 70 GPUs and has "
         "64; 16 GPUs are lent.", "inference", "The pool has the GPUs that inference needs."),
        (4.0, 1, 1, ProblemCode.JOB_THRASHING, warning, job, "llama-x", "Job llama of queue research was resized 24 "
         "times in the last hour.", "", "The job succeeded."),
        (120.0, 90, 1, ProblemCode.CONTROLLER_MISSING, critical, SubjectKind.SERVICE, "", "No controller led: nothing "
         "was started, lent or recalled, and requests waited.", "", "A controller leads again."),
    ):  # fmt: skip
        end_s = now_s - 3600.0 * hours
        yield ProblemEpisode(
            f"{code}/{subject}", code, severity, kind, subject, cause, "", of_pool, end_s - 60.0 * minutes, times,
            end_s, ending, is_closed=hours > 1.0,
        )  # fmt: skip


def test_resolved_problems_are_listed_and_marked(fleet: ConsoleSite, opened: Opener) -> None:
    now_s = fleet.clock.now_s()
    epoch = fleet.lead().epoch
    add_past_use(fleet.store, now_s, days=9.0, nodes=8, epoch=epoch)
    fleet.store.problems.put_episodes(tuple(build_episodes(now_s)), epoch=epoch)
    page = opened(f"{fleet.url}/#/alerts", width=1440)
    expect(page.locator(ENTRIES)).to_have_count(4)
    flapping = page.locator(f"{ENTRIES}[data-code=NodeDown]")
    expect(flapping).to_contain_text("33 min, 4 times")
    expect(flapping).to_contain_text("The node is up again.")
    expect(flapping.get_by_role("link")).to_have_attribute("href", "#/nodes/i1")
    assert find_serious_violations(page) == []
    page.get_by_role("radio", name="7 d").check()
    expect(page.locator(ENTRIES)).to_have_count(5)
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.set_viewport_size({"width": 1440, "height": 900})
    page.goto(f"{fleet.url}/#/")
    marks = page.locator(".timeline-key", has_text=re.compile("problem"))
    expect(marks.first.get_by_role("link")).to_have_text("3 problems")
    expect(marks.first.get_by_role("link")).to_have_attribute("href", "#/alerts")
