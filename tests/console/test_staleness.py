"""Open pages over time: added nodes, new tokens, lost connections, temporary failures and deleted events."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import Page, Route, expect

from api.identity.principals import Grant, generate_token
from scheduler.domain.fleet import LoanState
from scheduler.domain.snapshot import Snapshot
from scheduler.store.api_protocol import AuditEntry, HistoryLog
from scheduler.store.protocol import Commit
from scheduler.store.sql_store import SqlStore
from tests.builders import GPU, a_loan
from tests.console.fleets import create_fleet, small_site
from tests.console.test_access import sign_in

if TYPE_CHECKING:
    from tests.console.conftest import Opener
    from tests.console.console_site import ConsoleSite

UNAVAILABLE = '{"type": "urn:ebbtide:problem:unavailable", "title": "Away", "detail": "the database is away"}'
ALERTS = """() => {
    window.alerts = 0;
    const text = (node) => node.nodeType === 1 && (node.matches("[role=alert]") || node.querySelector("[role=alert]"));
    const count = (each) => { window.alerts += [...each.addedNodes].filter(text).length; };
    new MutationObserver((all) => all.forEach(count)).observe(document.body, { subtree: true, childList: true });
}"""


def test_empty_pool_shows_nodes_added_later(site: ConsoleSite, opened: Opener) -> None:
    with site.client() as client:
        client.create_pool({"name": "training", "kind": "training"})
        site.tick()
        page = opened(site.url)
        expect(page.get_by_text("No nodes yet")).to_be_visible()
        client.add_node({"name": "t0", "pool": "training", "gpu": GPU, "gpus": 8})
        site.tick()
    expect(page.get_by_role("listbox", name="Nodes of pool training").get_by_role("option")).to_have_count(1)
    expect(page.get_by_text("No nodes yet")).to_be_hidden()


def test_node_that_changes_pools_is_shown_once(fleet: ConsoleSite, opened: Opener) -> None:
    page = opened(fleet.url)
    training = page.get_by_role("listbox", name="Nodes of pool training").get_by_role("option")
    inference = page.get_by_role("listbox", name="Nodes of pool inference").get_by_role("option")
    expect(inference).to_have_count(10)
    _commit(fleet, lambda now: replace(now, nodes={**now.nodes, "i9": replace(now.nodes["i9"], pool="training")}))
    expect(training).to_have_count(7)
    expect(inference).to_have_count(9)


@pytest.mark.full
def test_actions_follow_a_new_token_after_expiry(tmp_path: Path, opened: Opener) -> None:
    site = small_site(tmp_path, auth="on", hours=0.1)
    try:
        root, guest = _token(site, "root", "admin", None), _token(site, "guest", "viewer", site.clock.now_s() + 100.0)
        jobs = create_fleet(site, root)
        site.ticks(3)
        for path, action in (
            ("", "Pause lending"),
            ("loans", "Pause lending"),
            (f"jobs/{jobs['embedder']}", "Suspend"),
        ):
            page = opened(f"{site.url}/#/{path}", expects=("401",))
            sign_in(page, guest)
            button = page.get_by_role("button", name=action)
            expect(button).to_be_disabled()
            page.evaluate("localStorage.setItem('ebbtide.session-key', 'ended')")
            sign_in(page, root)
            expect(button).to_be_enabled()
            page.close()  # before the site, or its event stream reports a refused connection
    finally:
        site.close()


def test_session_that_ends_during_a_confirmation_opens_the_sign_in_dialog(tmp_path: Path, opened: Opener) -> None:
    site = small_site(tmp_path, auth="on", hours=0.1)
    try:
        root = _token(site, "root", "admin", None)
        create_fleet(site, root)
        site.ticks(3)
        page = opened(site.url, expects=("401",))
        sign_in(page, root)
        page.get_by_role("button", name="Pause lending").click()
        page.evaluate("localStorage.setItem('ebbtide.session-key', 'ended')")
        expect(page.get_by_role("dialog", name="Sign in")).to_be_visible()
    finally:
        site.close()


def test_silent_connection_is_shown_as_lost(fleet: ConsoleSite, opened: Opener) -> None:
    page = opened("about:blank", expects=("ERR_",))
    page.clock.install()
    page.goto(fleet.url)
    connection = page.locator("#connection")
    expect(connection).to_have_text("Live")
    expect(page.locator(".tile")).to_have_count(16)
    page.route("**/v1/**", lambda _: None)  # no answer, as from behind a link that was cut
    page.clock.fast_forward(50_000)  # the stream has said nothing for so long
    expect(connection).to_have_text("Connection lost, reconnecting")
    page.clock.run_for(50_000)
    page.unroute("**/v1/**")
    _commit(fleet, lambda now: replace(now, nodes={k: v for k, v in now.nodes.items() if k != "i9"}))
    for _ in range(10):
        page.clock.run_for(7_000)
        time.sleep(0.2)
    expect(connection).to_have_text("Live")
    expect(page.locator(".tile")).to_have_count(15)


@pytest.mark.full
def test_temporary_failure_is_shown_once_and_cleared(fleet: ConsoleSite, opened: Opener) -> None:
    page = opened(fleet.url, expects=("503", "ERR_FAILED"))
    expect(page.locator(".tile")).to_have_count(16)
    page.evaluate(ALERTS)
    answers: list[str] = []

    def fail(route: Route) -> None:
        answers.append(route.request.url)
        if len(answers) == 3:
            route.abort()
        else:
            route.fulfill(status=503, content_type="application/problem+json", body=UNAVAILABLE)

    page.route("**/v1/overview*", fail)
    alert = page.get_by_role("alert")
    expect(alert).to_contain_text("the database is away")
    _wait_for_requests(page, "/v1/overview", 3)
    assert page.evaluate("alerts") == 1
    page.unroute("**/v1/overview*")
    expect(alert).to_have_count(0)


@pytest.mark.full
def test_unavailable_reasons_are_reported_once(fleet: ConsoleSite, opened: Opener) -> None:
    with fleet.client() as client:
        client.submit({"name": "huge", "gpus": {"min": 96, "max": 96}, "steps": 10, "command": ["true"]})
    fleet.tick()
    page = opened("about:blank", expects=("503",))
    answer = {"status": 503, "content_type": "application/problem+json", "body": UNAVAILABLE}
    page.route("**/v1/waiting*", lambda route: route.fulfill(**answer))
    page.goto(fleet.url)
    expect(page.get_by_role("alert")).to_contain_text("the database is away")
    page.evaluate(ALERTS)
    _wait_for_requests(page, "/v1/waiting", 3)
    assert page.evaluate("alerts") == 0


@pytest.mark.full
def test_page_works_after_old_events_are_deleted(fleet: ConsoleSite, opened: Opener) -> None:
    job_id = fleet.jobs["embedder"]
    gone = ("410",)
    job, overview = opened(f"{fleet.url}/#/jobs/{job_id}", expects=gone), opened(fleet.url, expects=gone)
    expect(job.locator(".steps")).to_contain_text("Started")
    assert isinstance(fleet.store, SqlStore)
    epoch = fleet.lead().epoch
    fleet.store.retention.delete_old_rows(
        HistoryLog.EVENTS, before_s=fleet.clock.now_s() + 1, rows_max=10**6, epoch=epoch
    )
    fresh = opened(fleet.url, expects=gone)
    for page, path in ((fresh, "/v1/overview"), (job, "/explanation"), (overview, "/v1/overview")):
        _wait_for_requests(page, path, 2)
        expect(page.get_by_role("alert")).to_have_count(0)


def test_loans_page_and_overview_count_the_same_gpus(fleet: ConsoleSite, opened: Opener) -> None:
    def lend(now: Snapshot) -> Snapshot:
        small = {name: replace(now.nodes[name], gpus=1) for name in ("i8", "i9")}
        loan = replace(a_loan("i9", LoanState.ACTIVE), offered_at_s=now.now_s - 60.0)
        return replace(now, nodes={**now.nodes, **small}, loans={"i9": loan})

    _commit(fleet, lend)
    for path in ("", "loans"):
        page = opened(f"{fleet.url}/#/{path}")
        page.get_by_role("button", name="Recall all").click()
        expect(page.get_by_role("dialog")).to_contain_text("1 loan with 1 GPU is recalled")


def test_axis_of_several_days_has_round_times(fleet: ConsoleSite, opened: Opener) -> None:
    loan = replace(a_loan("i9", LoanState.ACTIVE), offered_at_s=fleet.clock.now_s() - 60.0)
    _commit(fleet, lambda now: replace(now, loans={"i9": loan}))
    page = opened(f"{fleet.url}/#/loans?last=604800")
    ticks = page.locator(".timeline .axis span")
    expect(ticks).to_have_count(5)
    for text in ticks.all_inner_texts()[:-1]:
        assert text[-3] == ":", text


def test_empty_rank_means_rank_zero(fleet: ConsoleSite, opened: Opener) -> None:
    job_id = fleet.jobs["vision-sweep"]
    fleet.train(job_id, [10])
    page = opened(f"{fleet.url}/#/jobs/{job_id}")
    expect(page.locator(".log")).to_contain_text("step 10")
    page.get_by_label("Rank").fill("")
    page.get_by_label("Rank").press("Tab")
    page.wait_for_timeout(1000)
    fleet.train(job_id, [20])
    expect(page.locator(".log")).to_contain_text("step 20")


def _wait_for_requests(page: Page, path: str, count: int) -> None:
    for _ in range(count):
        with page.expect_request(lambda request: path in request.url):
            pass


def _commit(site: ConsoleSite, change: Callable[[Snapshot], Snapshot]) -> None:
    before = site.store.load().snapshot
    after = replace(change(before), generation=before.generation + 1)
    site.store.commit(Commit(before, after, site.lead().epoch))


def _token(site: ConsoleSite, name: str, grant: str, expires_at_s: float | None) -> str:
    now_s = site.clock.now_s()
    token, secret = generate_token(
        name, [Grant.parse(grant)], created_by="tests", now_s=now_s, expires_at_s=expires_at_s
    )
    site.store.tokens.add(token, AuditEntry(now_s, "tests", "", "CreateToken", "", None, None, ""))
    return secret
