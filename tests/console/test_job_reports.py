"""Job page: charts, log, figures and copied plan of a training job."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from playwright.sync_api import Page, Route, expect

if TYPE_CHECKING:
    from tests.console.conftest import Opener
    from tests.console.console_site import ConsoleSite


def test_loss_throughput_and_log_update_live(fleet: ConsoleSite, opened: Opener) -> None:
    job_id = fleet.jobs["vision-sweep"]
    fleet.train(job_id, range(10, 60, 10))
    page = opened(f"{fleet.url}/#/jobs/{job_id}")
    expect(page).to_have_title("vision-sweep, running · Ebbtide")
    loss = page.get_by_role("region", name="Loss", exact=True)
    expect(loss.locator("canvas")).to_be_visible()
    loss.get_by_text("Values as a table").click()
    rows = loss.locator("details tbody tr")
    expect(rows).to_have_count(5)
    expect(rows.first).to_contain_text("3.5")
    expect(page.get_by_role("region", name="Throughput", exact=True).locator(".u-legend")).to_contain_text("samples/s")
    log = page.get_by_role("region", name="Log lines")
    expect(log).to_contain_text("step 50: loss 3.5000")
    fleet.train(job_id, [60])
    expect(log).to_contain_text("step 60")
    expect(rows).to_have_count(6)
    expect(rows.first).to_contain_text("3.32")
    expect(page.locator(".figures")).to_contain_text("last loss 3.32")


def test_plan_and_job_id_can_be_copied(fleet: ConsoleSite, opened: Opener) -> None:
    job_id = fleet.jobs["llama-pretrain"]
    page = opened(f"{fleet.url}/#/jobs/{job_id}")
    page.get_by_role("button", name="Copy the job ID").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == job_id
    plan = page.get_by_role("region", name="Parallel plan")
    plan.get_by_role("button", name="Copy the plan as text").click()
    expect(plan.get_by_role("button", name="Copied")).to_be_visible()
    text = page.evaluate("navigator.clipboard.readText()")
    assert text.startswith("llama-pretrain: ")
    assert "layers 0" in text


def test_times_show_utc_on_hover(fleet: ConsoleSite, opened: Opener) -> None:
    page = opened(f"{fleet.url}/#/jobs/{fleet.jobs['speech-tune']}")
    since = page.locator("main .head time")
    expect(since).to_be_visible()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", since.get_attribute("title") or "")


def test_unknown_job_shows_not_found(fleet: ConsoleSite, opened: Opener) -> None:
    page = opened(f"{fleet.url}/#/jobs/no-such-job", expects=("404",))
    expect(page.get_by_role("heading", name="Job not found")).to_be_visible()
    page.get_by_role("link", name="All jobs").click()
    expect(page.locator("tbody tr")).to_have_count(5)


ESTIMATE = {"steps": 120.0, "fraction": 0.25, "step_time_s": 1.5, "remaining_s": 540.0}
UNREPORTED = {"steps": None, "fraction": None, "step_time_s": None, "remaining_s": None, "estimate": ESTIMATE}


def _change_jobs(page: Page, **fields: Any) -> None:
    """Serve all jobs with these fields changed, and all plans as estimates."""

    def change(route: Route) -> None:
        response = route.fetch()
        body = response.json()
        for job in body.get("items", [body]):
            job.update(fields)
        route.fulfill(response=response, json=body)

    page.route(re.compile(r"/v1/jobs(/[^/?]+)?(/plan)?(\?|$)"), change)
    page.reload()


def test_progress_that_was_never_reported_is_marked(fleet: ConsoleSite, opened: Opener) -> None:
    job_id = fleet.jobs["vision-sweep"]
    page = opened(f"{fleet.url}/#/jobs/{job_id}")
    with fleet.client() as client:
        progress = {**client.job(job_id)["progress"], **UNREPORTED}
    _change_jobs(page, progress=progress, is_estimated=True)
    expect(page.locator(".figures")).to_contain_text("not reported")
    expect(page.locator(".figures")).to_contain_text("estimated end")
    details = page.get_by_role("region", name="Details")
    expect(details).to_contain_text("not reported; estimated 25% done")
    expect(details).to_contain_text("estimated 1.5 s")
    expect(details.locator(".bar")).to_have_count(0)
    expect(page.get_by_role("region", name="Parallel plan")).to_contain_text("estimated: the job has not reported")
    page.goto(f"{fleet.url}/#/jobs")
    expect(page.get_by_role("row").filter(has_text="vision-sweep")).to_contain_text("estimated 25%")


def test_last_failure_shows_the_lines_of_the_log(fleet: ConsoleSite, opened: Opener) -> None:
    page = opened(f"{fleet.url}/#/jobs/{fleet.jobs['embedder']}")
    reason = "rank 0 exited with code 1: Traceback | ModuleNotFoundError: No module named 'apex'"
    _change_jobs(page, failure={"code": "import-error", "reason": reason, "at_s": fleet.clock.now_s(), "ran_s": 0.5})
    details = page.get_by_role("region", name="Details")
    expect(details).to_contain_text("import-error")
    assert details.locator("pre").inner_text().splitlines()[-1] == "ModuleNotFoundError: No module named 'apex'"
