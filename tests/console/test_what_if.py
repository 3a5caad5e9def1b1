"""The form of what-if replays: changes, the report next to the one without changes, and charts."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from playwright.sync_api import expect

from cli.composition.service import build_task_runner
from scheduler.runtime.clock import RealClock
from scheduler.settings import Settings
from scheduler.store.sql_store import SqlStore

if TYPE_CHECKING:
    from tests.console.conftest import Opener
    from tests.console.console_site import ConsoleSite


def test_recorded_days_are_replayed_with_and_without_changes(site: ConsoleSite, opened: Opener) -> None:
    with site.client() as client:
        client.create_pool({"name": "training", "kind": "training"})
        client.create_pool({"name": "inference", "kind": "inference"})
        for at in range(2):
            client.add_node({"name": f"t{at}", "pool": "training", "gpu": "a100-80g", "gpus": 8})
        client.add_node({"name": "i0", "pool": "inference", "gpu": "a100-80g", "gpus": 8})
        jobs = [{"name": f"job-{at}", "gpus": {"min": 8, "max": 8}, "steps": 600} for at in range(3)]
        for job in jobs:
            client.submit({**job, "command": ["true"], "onResize": "checkpoint"})
    site.demand("inference", 4.0)
    site.ticks(6, every_s=20.0)
    page = opened(f"{site.url}/#/simulate", expects=("422",))
    page.get_by_label("Days to replay").fill("0.01")
    page.get_by_label("More nodes in training").fill("-9")
    page.get_by_role("button", name="Replay").click()
    expect(page.get_by_label("More nodes in training")).to_have_attribute("aria-invalid", "true")
    page.get_by_label("More nodes in training").fill("1")
    page.get_by_role("button", name="Replay").click()
    expect(page.get_by_role("heading", name="Replay of the last 0.01 days: +1 nodes in training")).to_be_visible()
    assert isinstance(site.store, SqlStore)
    runner, stop = build_task_runner(Settings(), site.store, RealClock()), threading.Event()
    playing = threading.Thread(target=runner.run, args=(stop,))
    playing.start()
    try:
        report = page.get_by_role("region", name="Report")
        expect(report).to_contain_text("ebbtide, +1 nodes in training", timeout=120_000)
        expect(report).to_contain_text("ebbtide, no change")
        expect(page.get_by_role("region", name="Pending jobs").locator(".uplot")).to_be_visible()
        expect(page.get_by_role("region", name="Completion times", exact=True)).to_be_visible()
    finally:
        stop.set()
        playing.join()
    simulation_id = page.url.split("/simulate/")[1].split("?")[0]
    with site.client() as client:
        (series,) = client.simulation_series(simulation_id)["series"]
    assert max(series["training_usage_ratio"]) > 0
