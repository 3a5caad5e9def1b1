"""Plan explorer and simulations page."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from playwright.sync_api import expect

from api.openapi import load_examples
from cli.composition.service import build_task_runner
from scheduler.runtime.clock import RealClock
from scheduler.settings import Settings
from scheduler.store.sql_store import SqlStore

if TYPE_CHECKING:
    from tests.console.conftest import Opener
    from tests.console.console_site import ConsoleSite


def test_explorer_draws_a_plan_and_its_scaling_curve(site: ConsoleSite, opened: Opener) -> None:
    page = opened(f"{site.url}/#/plans", expects=("422",))
    page.get_by_label("GPU model").fill("a200")
    page.get_by_role("button", name="Find the plan").click()
    expect(page.get_by_label("GPU model")).to_have_attribute("aria-invalid", "true")
    page.get_by_label("GPU model").fill("a100-80g")
    page.get_by_label("GPUs", exact=True).fill("4")
    page.get_by_role("button", name="Find the plan").click()
    expect(page.locator("section.stage").first).to_contain_text("bound by")
    curve = page.get_by_role("region", name="Scaling curve")
    expect(curve).to_contain_text("up to 4 GPUs")
    expect(curve.locator(".uplot")).to_be_visible()
    expect(curve.get_by_role("region", name="Plans by GPUs").locator("tbody tr")).to_have_count(3)


def test_plan_on_two_gpu_models_shows_its_schedule_and_the_next_best_plans(site: ConsoleSite, opened: Opener) -> None:
    page = opened(f"{site.url}/#/plans?model=gpt2&gpu=a100-80g&gpus=2&globalBatch=16")
    expect(page.get_by_role("region", name="Scaling curve")).to_contain_text("up to 2 GPUs")
    expect(page.get_by_role("region", name="Next-best plans").first.locator("tbody tr").first).to_contain_text("Best")
    page.get_by_role("button", name="Add a GPU model").click()
    expect(page.get_by_label("Further GPU model").last).to_be_focused()
    page.keyboard.type("h100-80g")
    page.get_by_label("GPUs of it").fill("2")
    page.get_by_role("button", name="Find the plan").click()
    alone = page.get_by_role("region", name="Each GPU model alone")
    expect(alone.locator("tbody tr")).to_have_count(3)
    expect(alone).to_contain_text("2 × h100-80g")
    assert "more=h100-80g%3A2" in page.url
    stage = page.locator("section.stage").first
    expect(stage.get_by_role("img", name="Memory:")).to_have_attribute("aria-label", re.compile("optimizer .* GiB"))


def test_job_is_previewed_with_its_plan_and_curve_before_it_is_submitted(fleet: ConsoleSite, opened: Opener) -> None:
    page = opened(f"{fleet.url}/#/submit")
    page.get_by_label("Name", exact=True).fill("preview")
    page.locator("#field-model").fill("gpt2")
    page.get_by_label("Global batch").fill("16")
    page.get_by_label("Maximum GPUs").fill("2")
    page.get_by_role("button", name="Dry run").click()
    expect(page.get_by_role("region", name="Dry run")).to_contain_text("Estimated start")
    expect(page.get_by_role("region", name="Plan on 2 × a100-80g").locator("section.stage").first).to_be_visible()
    expect(page.get_by_role("region", name="Scaling curve")).to_contain_text("up to 2 GPUs")
    assert "preview" not in {job.spec.name for job in fleet.store.load().snapshot.jobs.values()}


def test_simulation_is_submitted_run_and_reported(site: ConsoleSite, opened: Opener, tmp_path: Path) -> None:
    document = load_examples()["SimulationDocument"]
    page = opened(f"{site.url}/#/simulate", expects=("422",))
    page.get_by_text("Simulate files of your own").click()
    page.get_by_role("button", name="Start simulation").click()
    expect(page.get_by_text("Accepted: a file").first).to_be_visible()
    for label, name in (("Jobs", "jobs"), ("Inference demand", "demand"), ("Fleet", "cluster")):
        text = document.get(name, "")
        path = tmp_path / f"{name}.txt"
        path.write_text(text if isinstance(text, str) else json.dumps(text))
        page.get_by_role("main").get_by_label(label, exact=True).set_input_files(path)
    page.get_by_label("Policy sets", exact=True).fill("ebbtide")
    page.get_by_role("button", name="Start simulation").click()
    expect(page.get_by_role("region", name="State")).to_contain_text("queued")
    assert isinstance(site.store, SqlStore)
    runner, stop = build_task_runner(Settings(), site.store, RealClock()), threading.Event()
    playing = threading.Thread(target=runner.run, args=(stop,))
    playing.start()
    try:
        report = page.get_by_role("region", name="Report")
        expect(report).to_contain_text("Jobs completed", timeout=120_000)
        expect(report).to_contain_text("ebbtide")
    finally:
        stop.set()
        playing.join()
