"""Tools of the jobs page and of the job page: order, search, several jobs at once, comparison, timeline, runs, logs."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
from playwright.sync_api import Page, Route, expect

from scheduler.executors.log_files import LogLimits
from scheduler.executors.stored_logs import LogRoot

if TYPE_CHECKING:
    from tests.console.conftest import Opener
    from tests.console.console_site import ConsoleSite


def test_list_is_searched_sorted_and_saved_in_its_address(fleet: ConsoleSite, opened: Opener) -> None:
    page = opened(f"{fleet.url}/#/jobs")
    rows = page.locator("tbody tr")
    expect(rows).to_have_count(5)
    page.get_by_role("link", name="Job", exact=True).click()
    expect(page.locator("th[aria-sort=ascending]")).to_have_text("Job")
    expect(rows.first).to_contain_text("embedder")
    expect(page.get_by_role("link", name="Job", exact=True)).to_be_focused()
    page.get_by_role("link", name="Job", exact=True).click()
    expect(rows.first).to_contain_text("vision-sweep")
    page.get_by_label("Search", exact=True).fill("TUNE")
    page.keyboard.press("Enter")
    expect(rows).to_have_count(1)
    assert re.search(r"#/jobs\?search=TUNE&sort=-name$", page.url)
    page.get_by_label("Name of this view").fill("Tuning")
    page.get_by_role("button", name="Save view").click()
    page.goto(f"{fleet.url}/#/jobs")
    expect(rows).to_have_count(5)
    page.get_by_role("link", name="Tuning").click()
    expect(rows).to_have_count(1)
    page.get_by_role("button", name="Delete view Tuning").click()
    expect(page.get_by_role("link", name="Tuning")).to_have_count(0)


def test_pending_job_shows_its_reason_in_the_list(fleet: ConsoleSite, opened: Opener) -> None:
    with fleet.client() as client:
        client.submit({"name": "huge", "gpus": {"min": 96, "max": 96}, "steps": 10, "command": ["true"]})
    fleet.tick()
    page = opened(f"{fleet.url}/#/jobs?search=huge")
    expect(page.locator("tbody tr")).to_contain_text("needs 96 GPUs")


def test_several_jobs_are_cancelled_and_each_failure_is_reported(fleet: ConsoleSite, opened: Opener) -> None:
    page = opened(f"{fleet.url}/#/jobs?sort=name", expects=("409",))

    def refuse(route: Route) -> None:
        if route.request.method == "DELETE":
            route.fulfill(status=409, json={"detail": "the job is locked", "title": "Conflict"})
        else:
            route.continue_()

    page.route(re.compile(f"/v1/jobs/{fleet.jobs['embedder']}"), refuse)
    for name in ("embedder", "speech-tune", "vision-sweep"):
        page.get_by_label(f"Select {name}").check()
    page.get_by_role("button", name="Cancel selected").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_role("listitem")).to_have_count(3)
    expect(dialog).to_contain_text("speech-tune, running")
    dialog.get_by_role("button", name="Cancel 3 jobs").click()
    expect(page.get_by_text("2 jobs are being cancelled. 1 job not changed:")).to_be_visible()
    expect(page.get_by_role("main")).to_contain_text("embedder: the job is locked")
    fleet.ticks(2, every_s=30.0)
    cancelled = {job.spec.name for job in fleet.store.list_ended_jobs(limit=9)}
    assert cancelled == {"speech-tune", "vision-sweep"}


def test_jobs_are_compared_over_their_steps(fleet: ConsoleSite, opened: Opener) -> None:
    for name in ("vision-sweep", "embedder"):
        fleet.train(fleet.jobs[name], range(10, 60, 10))
    page = opened(f"{fleet.url}/#/jobs")
    page.get_by_label("Select embedder").check()
    page.get_by_role("button", name="Compare").click(force=True)  # it says why it is disabled
    expect(page.get_by_role("alert")).to_contain_text("2 to 4 jobs")
    page.get_by_label("Select vision-sweep").check()
    page.get_by_role("button", name="Compare").click()
    loss = page.get_by_role("region", name="Loss over steps")
    expect(loss.locator(".u-legend")).to_contain_text("embedder")
    loss.get_by_text("Values as a table").click()
    expect(loss.locator("details tbody tr")).to_have_count(5)
    with fleet.client() as client:
        shown = client.job(fleet.jobs["embedder"])
    table = page.get_by_role("region", name="Jobs side by side").first
    expect(table.get_by_role("row", name="State")).to_contain_text(str(shown["state"]))
    expect(table.get_by_role("row", name="Plan", exact=False).first).to_contain_text("dp")


def test_csv_has_all_matching_jobs(fleet: ConsoleSite, opened: Opener, tmp_path: Path) -> None:
    page = opened(f"{fleet.url}/#/jobs?queue=research")
    expect(page.locator("tbody tr")).to_have_count(2)
    with page.expect_download() as downloading:
        page.get_by_role("button", name="Download CSV").click()
    path = tmp_path / "jobs.csv"
    downloading.value.save_as(path)
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["name"] for row in rows} == {"llama-pretrain", "speech-tune"}
    assert {row["id"] for row in rows} <= set(fleet.jobs.values())


def test_timeline_and_step_time_of_a_training_job(fleet: ConsoleSite, opened: Opener) -> None:
    job_id = fleet.jobs["llama-pretrain"]
    fleet.train(job_id, range(10, 60, 10))
    page = opened(f"{fleet.url}/#/jobs/{job_id}")
    timeline = page.get_by_role("region", name="Timeline")
    expect(timeline.get_by_role("img", name=re.compile("^State: .*running"))).to_be_visible()
    expect(timeline.get_by_role("img", name=re.compile("^GPUs: .*8 GPUs"))).to_be_visible()
    step = httpx.get(f"{fleet.url}/v1/jobs/{job_id}/plan").raise_for_status().json()["step"]
    shown = page.get_by_role("region", name="Step time")
    expect(shown).to_contain_text("80% of cases" if step["interval_s"] else "Predicted")


def _add_log(site: ConsoleSite, job_id: str, generation: int, lines: list[str]) -> None:
    path = LogRoot(site.folder, limits=LogLimits()).folder(job_id, generation).log_path(0)
    path.parent.mkdir(parents=True)
    path.write_text("".join(f"{line}\n" for line in lines))


def test_log_is_searched_and_downloaded_over_all_runs(fleet: ConsoleSite, opened: Opener, tmp_path: Path) -> None:
    job_id = fleet.jobs["vision-sweep"]
    fleet.train(job_id, range(10, 40, 10))
    newest = fleet.store.load().snapshot.jobs[job_id].allocation.generation
    _add_log(fleet, job_id, newest - 1, ["an early line", "WARNING disk is slow"])
    page = opened(f"{fleet.url}/#/jobs/{job_id}")
    log = page.get_by_role("region", name="Log lines")
    expect(log).to_contain_text("step 30")
    expect(log).not_to_contain_text("early line")
    page.get_by_role("searchbox", name="Search the log").fill("warning")
    page.keyboard.press("Enter")
    expect(log).to_contain_text("WARNING disk is slow")
    expect(log.locator("mark")).to_have_text("WARNING")
    page.get_by_role("searchbox", name="Search the log").fill("")
    page.locator("#run").select_option(str(newest - 1))
    expect(log).to_contain_text("an early line")
    expect(log).not_to_contain_text("step 30")
    page.locator("#run").select_option("")
    with page.expect_download() as downloading:
        page.get_by_role("region", name="Log", exact=True).get_by_role("button", name="Download").click()
    path = tmp_path / "job.log"
    downloading.value.save_as(path)
    text = path.read_text()
    assert text.index("early line") < text.index("step 30")


def test_failed_runs_are_listed_with_their_last_lines(fleet: ConsoleSite, opened: Opener) -> None:
    job_id = fleet.jobs["embedder"]
    page = opened("about:blank")
    _serve_failed_run(page)
    page.goto(f"{fleet.url}/#/jobs/{job_id}")
    failed = page.get_by_role("region", name="Failed runs")
    expect(failed).to_contain_text("rank 3 exited with code 1")
    expect(failed.locator("pre")).to_contain_text("RuntimeError: no space left")
    expect(failed).to_contain_text("after 4 min")


def _serve_failed_run(page: Page) -> None:
    def change(route: Route) -> None:
        response = route.fetch()
        body = response.json()
        start_s = body["states"][-1]["at_s"]
        message = "rank 3 exited with code 1 | Traceback (most recent call last): | RuntimeError: no space left"
        body["states"] += [{"at_s": start_s + 240, "state": "queued", "message": message}]
        route.fulfill(response=response, json=body)

    page.route(re.compile(r"/v1/jobs/[^/]+/history"), change)
