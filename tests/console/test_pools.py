"""Pools page and pool page: explanation, promise, calendar, proposals, recalls and levers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from playwright.sync_api import expect

from tests.console.test_accessibility import find_serious_violations

if TYPE_CHECKING:
    from tests.console.conftest import Opener
    from tests.console.console_site import ConsoleSite


def test_a_pool_shows_its_explanation_promise_and_recalls(fleet: ConsoleSite, opened: Opener) -> None:
    fleet.demand("inference", 20.0)
    fleet.ticks(4, every_s=100.0)
    fleet.demand("inference", 78.0)
    fleet.ticks(12, every_s=60.0)
    with fleet.client() as client:
        explanation, pool = client.pool_explanation("inference"), client.pool("inference")
        report, recalls = client.safety_report("inference"), list(client.recalls(pool="inference"))
    page = opened(f"{fleet.url}/#/pools")
    page.get_by_role("link", name="inference", exact=True).click()
    why = page.get_by_role("region", name="Why it lends no more")
    expect(why).to_contain_text(explanation["summary"])
    expect(why).to_contain_text(explanation["lever"])
    expect(page.get_by_role("region", name="Promise")).to_contain_text(report["summary"])
    assert pool["way_back"]["horizon_s"] == 600.0
    expect(page.get_by_role("region", name="Way back")).to_contain_text("10 min")
    listed = page.get_by_role("region", name="Recalls")
    expect(listed.locator(".record > li")).to_have_count(len(recalls))
    at, receipt = next((at, each) for at, each in enumerate(recalls) if each["jobs"])
    entry = listed.locator(".record > li").nth(at)
    entry.get_by_text("Receipt").click()
    expect(entry.get_by_role("region")).to_contain_text(receipt["jobs"][0]["job_id"])


def test_lending_of_the_month_is_drawn_by_day_and_kept_up(fleet: ConsoleSite, opened: Opener) -> None:
    fleet.demand("inference", 20.0)
    fleet.ticks(12, every_s=100.0)  # full passes, and an interval of demand, whenever the clock starts
    page = opened(f"{fleet.url}/#/pools/inference")
    expect(page.get_by_role("region", name="Returns against their deadline").locator(".uplot")).to_be_visible()
    lent = page.get_by_role("region", name="GPU-hours lent", exact=True).first
    lent.get_by_text("Values as a table").click()
    newest = lent.get_by_role("region", name="GPU-hours lent").locator("tbody tr").first
    expect(newest).to_be_visible()
    before = newest.inner_text()
    bars = lent.get_by_role("button", name="Lent")
    bars.press("Enter")
    fleet.tick(after_s=600.0)
    expect(newest).not_to_have_text(before)
    expect(bars).to_have_attribute("aria-pressed", "false")


def test_a_proposed_loan_is_vetoed_on_the_pools_page(fleet: ConsoleSite, opened: Opener) -> None:
    with fleet.client() as client:
        client.change_pool("inference", {"lending": {"notice_s": 600}})
    fleet.demand("inference", 20.0)
    fleet.ticks(4, every_s=100.0)
    with fleet.client() as client:
        before = len(list(client.loans(state="proposed")))
    page = opened(f"{fleet.url}/#/pools/inference")
    rows = page.get_by_role("region", name="Proposed loans", exact=True).locator("tbody tr")
    expect(rows).to_have_count(before)
    rows.first.get_by_role("button", name="Veto loan").click()
    page.get_by_role("dialog").get_by_label("Reason").fill("canary")
    page.get_by_role("dialog").get_by_role("button", name="Veto loan").click()
    expect(rows).to_have_count(before - 1)


def test_calendar_source_and_served_models(fleet: ConsoleSite, opened: Opener) -> None:
    window = {"cron": "0 8 * * 1-5", "duration_s": "10h"}
    event = {"name": "launch", "start_s": "2030-12-01T08:00", "duration_s": "3h", "factor": 2.0}
    with fleet.client() as client:
        lending = {"blackouts": [window], "known_events": [event], "time_zone": "Europe/Berlin"}
        client.change_pool("inference", {"lending": lending})
        query = {"promql": "sum(busy_gpus)", "unit": "gpus"}
        client.set_demand_source("inference", {"queries": [query], "stale_after_s": 120})
    fleet.tick()
    page = opened(f"{fleet.url}/#/pools/inference")
    calendar = page.get_by_role("region", name="Calendar")
    expect(calendar).to_contain_text("0 8 * * 1-5")
    expect(calendar).to_contain_text("10 h")
    expect(calendar).to_contain_text("Europe/Berlin")
    expect(calendar).to_contain_text("launch")
    expect(calendar).to_contain_text("2 × the forecast")
    expect(page.get_by_role("region", name="Demand source")).to_contain_text("sum(busy_gpus)")
    expect(page.get_by_role("region", name="Demand source")).to_contain_text("2 min")


def test_requests_of_served_models_show_tokens_replicas_and_latencies(fleet: ConsoleSite, opened: Opener) -> None:
    lengths = [{"prompt": 400, "output": 200, "requests": 9}, {"prompt": 4000, "output": 800}]
    objective = {"ttft": "1s", "tpot": "50ms"}
    served = {"model": "llama-3-8b", "gpu": "a100-80g", "objective": objective, "lengths": lengths}
    requests = {"model": "llama-3-8b", "preset": "vllm", "selector": {"model_name": "llama"}}
    with fleet.client() as client:
        client.set_served_models("inference", [served, {**served, "model": "llama-3.1-70b", "tensorDegree": 4}])
        client.set_demand_source("inference", {"requests": [requests, {**requests, "model": "llama-3.1-70b"}]})
    page = opened(f"{fleet.url}/#/pools/inference")
    card = page.get_by_role("region", name="Served models")
    expect(card.locator("article")).to_have_count(2)
    expect(card).to_contain_text("No requests have been read yet")
    expect(page.get_by_role("region", name="Demand source")).to_contain_text("Requests for llama-3-8b: vllm")
    with fleet.client() as client:
        client.report_requests(
            "inference", [{"model": "llama-3-8b", "rate": 30.0}, {"model": "llama-3.1-70b", "rate": 0.0}]
        )
        load = client.pool("inference")["serving"][0]["load"]
        assert load is not None
    fleet.tick()
    first = card.locator("article").first
    expect(first).to_contain_text("30/s")
    expect(first).to_contain_text("22,800 prompt and 7,800 output tokens/s")
    expect(first).to_contain_text("760 tokens on average, 95% up to 4,000")
    expect(first.locator(".served-numbers div").nth(1)).to_contain_text(f"{load['replicas']}{load['gpus']} GPUs")
    expect(first.get_by_role("img")).to_have_count(3)
    assert find_serious_violations(page) == []


def test_lending_is_stopped_and_shadow_mode_is_shown(fleet: ConsoleSite, opened: Opener) -> None:
    page = opened(f"{fleet.url}/#/pools/inference")
    page.get_by_role("button", name="Enter shadow mode").click()
    page.get_by_role("dialog").get_by_role("button", name="Enter shadow mode").click()
    expect(page.get_by_role("button", name="Leave shadow mode")).to_be_visible()
    fleet.ticks(2, every_s=200.0)
    expect(page.get_by_role("region", name="Shadow mode")).to_contain_text("No node is lent")
    page.get_by_role("button", name="Stop lending").click()
    page.get_by_role("dialog").get_by_role("button", name="Stop lending").click()
    expect(page.get_by_role("button", name="Start lending")).to_be_visible()
    fleet.tick()
    with fleet.client() as client:
        lending = client.pool("inference")["lending"]
    assert (lending["enabled"], lending["mode"]) == (False, "shadow")


def test_a_training_pool_and_no_pools(site: ConsoleSite, opened: Opener) -> None:
    page = opened(f"{site.url}/#/pools")
    expect(page.get_by_text("ebbtide pools create training")).to_be_visible()
    with site.client() as client:
        client.create_pool({"name": "training", "kind": "training"})
    site.tick()
    page.get_by_role("link", name="training", exact=True).click()
    expect(page.get_by_role("region", name="Size")).to_contain_text("0 nodes")
    expect(page.get_by_role("button", name="Stop lending")).to_have_count(0)
