"""Savings page: figures equal the API's, choices in the address, files, and the comparisons."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
from playwright.sync_api import expect

from scheduler.domain.savings_comparison import (
    DAY_S,
    POLICY_BY_VARIANT,
    ComparedOutcome,
    ComparisonState,
    DailyComparison,
    Variant,
    find_day,
)
from scheduler.store.sql_store import SqlStore
from tests.console.console_site import ConsoleSite
from tests.console.fleets import create_fleet, small_site
from tests.console.test_accessibility import find_serious_violations

if TYPE_CHECKING:
    from tests.console.conftest import Opener

HOUR_S = 3600.0


@pytest.fixture
def priced(tmp_path: Path) -> Iterator[ConsoleSite]:
    """A service with prices whose jobs have run for an hour, while one waits."""
    site = small_site(tmp_path, hours=1.5, settings={"gpu_prices": {"a100-80g": 1.5}, "currency": "EUR"})
    site.jobs = create_fleet(site)
    with site.client() as client:
        client.submit({"name": "huge", "gpus": {"min": 96, "max": 96}, "steps": 10, "command": ["true"]})
    site.demand("inference", 70.0)
    for _ in range(6):
        site.solve_requested_points(site.tick(after_s=600.0))
    yield site
    site.close()


def read_report(site: ConsoleSite, by: str = "queue") -> dict[str, float]:
    answer = httpx.get(f"{site.url}/v1/savings?by={by}").raise_for_status().json()
    return {**answer["total"], **answer["total"]["amounts"]}


def test_figures_and_rows_are_those_of_the_api(priced: ConsoleSite, opened: Opener) -> None:
    page = opened(f"{priced.url}/#/savings?days=30&by=queue")
    total = read_report(priced)
    figures = page.locator(".savings-figures .figure")
    expect(figures).to_have_count(5)
    used_hours = total["gpu_s"] / HOUR_S
    expect(figures.nth(2)).to_contain_text(f"{used_hours:.3g}".rstrip("."))
    expect(figures.nth(2)).to_contain_text(f"€{total['used']:.0f}" if total["used"] >= 100 else f"€{total['used']:.2f}")
    idle_hours = total["idle_waiting_gpu_s"] / HOUR_S
    expect(figures.nth(4)).to_contain_text(f"{idle_hours:.3g}".rstrip("0").rstrip("."))
    expect(page.locator("tbody tr", has_text="research")).to_be_visible()
    page.locator("#by").select_option("gpu")
    expect(page.locator("tbody tr", has_text="a100-80g")).to_be_visible()
    page.wait_for_function("location.hash.includes('by=gpu')")
    page.reload()
    expect(page.locator("#by")).to_have_value("gpu")


def test_table_and_chart_are_saved_as_files(priced: ConsoleSite, opened: Opener) -> None:
    page = opened(f"{priced.url}/#/savings?days=7&by=queue")
    with page.expect_download() as table:
        page.get_by_role("button", name="Save as CSV").click()
    rows = list(csv.DictReader(io.StringIO(Path(table.value.path()).read_text(encoding="utf-8"))))
    assert sum(float(row["gpu_s"]) for row in rows) == pytest.approx(read_report(priced)["gpu_s"], abs=0.01)
    assert float(rows[0]["used_EUR"]) > 0.0
    with page.expect_download() as picture:
        page.get_by_role("button", name="Save as PNG").click()
    content = Path(picture.value.path()).read_bytes()
    assert content.startswith(b"\x89PNG")
    assert len(content) > 10_000


def test_comparison_is_started_and_shown(priced: ConsoleSite, opened: Opener) -> None:
    page = opened(f"{priced.url}/#/savings")
    page.get_by_role("button", name="Compare now").click()
    page.get_by_role("dialog").get_by_role("button", name="Compare now").click()
    expect(page.get_by_text("A comparison waits for its turn.")).to_be_visible()
    store = priced.store
    assert isinstance(store, SqlStore)
    task = store.simulations.claim("runner", now_s=priced.clock.now_s(), until_s=1e12)
    assert task is not None
    hours = dict.fromkeys(("loaned_gpu_hours", "idle_while_waiting_gpu_hours", "lost_gpu_hours"), 1.0)
    policies = [
        {
            "policy": policy, "jobs": 5, "completed": 5, "jct_s": {"mean": mean_s, "p95": 2 * mean_s},
            "queueing_s": {"mean": 60.0}, "makespan_s": 9000.0, "inference_short_intervals_ratio": {"first_pass": 0.0},
            **hours,
        }
        for policy, mean_s in zip(task.policies, (3000.0, 4000.0, 6000.0), strict=True)
    ]  # fmt: skip
    report = {"seed": 0, "policies": policies}
    store.simulations.finish(task.id, "runner", report, now_s=priced.clock.now_s())
    page.reload()
    expect(page.get_by_text("25% shorter")).to_be_visible()
    expect(page.get_by_text("50% shorter")).to_be_visible()
    expect(page.get_by_role("region", name="Comparison of variants")).to_contain_text("50 min")


def store_comparisons(site: ConsoleSite) -> None:
    """Store comparisons of four days: one succeeded, one is missing, one was skipped, and the last one failed."""
    store, today_s = site.store, find_day(site.clock.now_s())
    assert isinstance(store, SqlStore)
    hours = {Variant.TODAY: 2.0, Variant.NO_LENDING: 3.0, Variant.NO_ELASTICITY: 5.0}
    outcomes = tuple(
        ComparedOutcome(variant, policy, 9, 9, HOUR_S * hours[variant], 9.0, 60.0, 9.0, 4.0, 2.0, 1.0, 0.0)
        for variant, policy in POLICY_BY_VARIANT.items()
    )
    for days_ago, state, reason in ((3, "succeeded", ""), (1, "skipped", "no job has run"), (0, "failed", "no memory")):
        day_s = today_s - days_ago * DAY_S
        found = outcomes if state == "succeeded" else ()
        day = DailyComparison(day_s, day_s + 600.0, ComparisonState(state), "sim-a", reason, day_s + 900.0, (), found)
        store.comparisons.put(day, epoch=site.lead().epoch)


def test_daily_comparisons_are_drawn_with_their_states_and_saved(priced: ConsoleSite, opened: Opener) -> None:
    store_comparisons(priced)
    page = opened(f"{priced.url}/#/savings?days=7")
    region = page.get_by_role("region", name="Compared day by day")
    expect(region).to_contain_text("failed: no memory")
    region.get_by_text("Values as a table").click()
    table = region.get_by_role("table", name="Mean completion time by day, in hours")
    rows = table.locator("tbody tr")
    expect(rows).to_have_count(4)
    expect(rows.nth(3).locator("td")).to_have_text(["2", "3", "5", "succeeded"])
    expect(rows.nth(0).locator("td")).to_have_text(["–", "–", "–", "failed: no memory"])
    expect(rows.nth(1)).to_contain_text("skipped: no job has run")
    expect(rows.nth(2)).to_contain_text("not made")
    assert find_serious_violations(page) == []
    region.get_by_label("Show").select_option(label="Idle while jobs waited, in GPU-hours")
    expect(region.get_by_role("table", name="Idle while jobs waited by day, in GPU-hours")).to_be_visible()
    with page.expect_download() as saved:
        region.get_by_role("button", name="Save as CSV").click()
    found = list(csv.DictReader(io.StringIO(Path(saved.value.path()).read_text(encoding="utf-8"))))
    assert [row["state"] for row in found] == [*["succeeded"] * 3, "missing", "skipped", "failed"]
    with page.expect_download() as picture:
        region.get_by_role("button", name="Save as PNG").click()
    assert Path(picture.value.path()).read_bytes().startswith(b"\x89PNG")


def test_page_says_that_daily_comparisons_are_off(tmp_path: Path, opened: Opener) -> None:
    site = small_site(tmp_path, hours=0.1, settings={"daily_comparison": False})
    try:
        page = opened(f"{site.url}/#/savings")
        expect(page.get_by_role("region", name="Compared day by day")).to_contain_text("EBBTIDE_DAILY_COMPARISON")
    finally:
        site.close()
