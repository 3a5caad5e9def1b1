"""Job pages: plan, pending reason, submission, actions and list."""

from __future__ import annotations

from typing import TYPE_CHECKING

from playwright.sync_api import Page, expect

if TYPE_CHECKING:
    from tests.console.conftest import Opener
    from tests.console.console_site import ConsoleSite


def test_running_job_shows_each_stage_of_its_plan(fleet: ConsoleSite, opened: Opener) -> None:
    job = fleet.store.load().snapshot.jobs[fleet.jobs["llama-pretrain"]]
    assert job.allocation.plan is not None
    page = _job_page(fleet, opened, job.id)
    expect(page.locator("section.stage")).to_have_count(job.allocation.plan.pipeline_devices)
    stage = page.locator("section.stage").first
    expect(stage).to_contain_text("Memory:")
    expect(stage).to_contain_text("bound by")
    ranks = job.allocation.plan.stages[0].gpus
    expect(stage.locator(".rank")).to_have_count(ranks)
    expect(page.locator(".steps")).to_contain_text("Started")


def test_pending_job_shows_its_reason(fleet: ConsoleSite, opened: Opener) -> None:
    with fleet.client() as client:
        waiting = str(
            client.submit({"name": "huge", "gpus": {"min": 96, "max": 96}, "steps": 10, "command": ["true"]})["id"]
        )
    fleet.tick()
    page = _job_page(fleet, opened, waiting)
    why = page.get_by_role("region", name="Why it is pending")
    expect(why).to_contain_text("Needs 96 GPUs")
    expect(why).to_contain_text("Unblocked by")
    expect(why).to_contain_text("unknown")


def test_job_is_submitted_after_an_invalid_field_is_fixed(fleet: ConsoleSite, opened: Opener) -> None:
    page = opened(f"{fleet.url}/#/submit", expects=("422",))
    page.get_by_label("Name", exact=True).fill("No Such Name")
    page.get_by_label("Maximum GPUs").fill("4")
    page.get_by_role("button", name="Submit", exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name="Submit job").click()
    name = page.get_by_label("Name", exact=True)
    expect(name).to_have_attribute("aria-invalid", "true")
    expect(name).to_be_focused()
    name.fill("from-the-browser")
    page.get_by_role("button", name="Dry run").click()
    expect(page.get_by_role("region", name="Dry run")).to_be_visible()
    for command in ("", "python train.py"):  # a dry run needs no command, a submission does
        page.get_by_label("Command").fill(command)
        page.get_by_role("button", name="Submit", exact=True).click()
        page.get_by_role("dialog").get_by_role("button", name="Submit job").click()
        if not command:
            expect(page.get_by_label("Command")).to_have_attribute("aria-invalid", "true")
    expect(page.get_by_role("heading", name="from-the-browser")).to_be_visible()
    fleet.tick()
    submitted = [job for job in fleet.store.load().snapshot.jobs.values() if job.spec.name == "from-the-browser"]
    assert [(job.spec.min_gpus, job.spec.max_gpus) for job in submitted] == [(1, 4)]


def test_command_is_split_like_a_shell_and_an_unclosed_quote_is_an_error(fleet: ConsoleSite, opened: Opener) -> None:
    page = opened(f"{fleet.url}/#/submit")
    page.get_by_label("Name", exact=True).fill("quoted")
    command = page.get_by_label("Command")
    command.fill('sh -c \'echo "one two" | cat')
    page.get_by_role("button", name="Submit", exact=True).click()
    expect(page.get_by_text("the ' at character 7 is not closed")).to_have_count(2)
    expect(command).to_be_focused()
    command.fill('python -c \'print("one two")\' a\\ b "it\'s" | tee')
    argv = page.locator("#argv code")
    expect(argv).to_have_text(["python", "-c", 'print("one two")', "a b", "it's", "|", "tee"])
    expect(page.locator("#argv")).to_contain_text("The command runs without a shell: | is passed literally")
    command.fill("python -c 'print(\"one two\")' a\\ b ''")
    page.get_by_role("button", name="Submit", exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name="Submit job").click()
    expect(page.get_by_role("heading", name="quoted")).to_be_visible()
    fleet.tick()
    [submitted] = [job for job in fleet.store.load().snapshot.jobs.values() if job.spec.name == "quoted"]
    assert submitted.spec.command == ("python", "-c", 'print("one two")', "a b", "")


def test_job_page_scales_suspends_and_cancels(fleet: ConsoleSite, opened: Opener) -> None:
    job_id = fleet.jobs["vision-sweep"]
    page = _job_page(fleet, opened, job_id, expects=("422",))
    page.get_by_role("button", name="Scale").click()
    page.get_by_label("Maximum").fill("1")
    page.get_by_role("dialog").get_by_role("button", name="Scale").click()
    expect(page.get_by_role("alert")).to_contain_text("min <= max")
    _confirm_action(page, "Suspend")
    fleet.tick()
    expect(page.get_by_role("button", name="Resume")).to_be_visible()
    _confirm_action(page, "Cancel job")
    fleet.ticks(3, every_s=30.0)
    expect(page.locator("main .badge").first).to_have_text("cancelled")
    expect(page.get_by_role("button", name="Cancel job")).to_be_hidden()


def test_job_list_filters_and_updates_live(fleet: ConsoleSite, opened: Opener) -> None:
    page = opened(f"{fleet.url}/#/jobs")
    rows = page.locator("tbody tr")
    expect(rows).to_have_count(5)
    page.get_by_label("Queue").fill("products")
    page.get_by_role("button", name="Filter").click()
    expect(rows).to_have_count(2)
    with fleet.client() as client:
        client.submit({"name": "late", "queue": "products", "gpus": {"min": 1, "max": 1}, "command": ["true"]})
    fleet.tick()
    expect(rows).to_have_count(3)
    page.get_by_label("State").select_option("failed")
    expect(page.get_by_text("No matching jobs")).to_be_visible()


def _job_page(site: ConsoleSite, opened: Opener, job_id: str, *, expects: tuple[str, ...] = ()) -> Page:
    return opened(f"{site.url}/#/jobs/{job_id}", expects=expects)


def _confirm_action(page: Page, action: str) -> None:
    page.get_by_role("button", name=action).click()
    with page.expect_response(lambda answer: answer.request.method != "GET"):
        page.get_by_role("dialog").get_by_role("button", name=action).click()
