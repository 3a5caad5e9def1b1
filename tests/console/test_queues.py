"""Queues page and queue page: values, quota, pending jobs, members and usage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from playwright.sync_api import expect

from tests.console.test_access import UNAUTHORIZED, create_token, guarded, sign_in

if TYPE_CHECKING:
    from tests.console.conftest import Opener
    from tests.console.console_site import ConsoleSite

__all__ = ["guarded"]  # a fixture

INVALID = ("422", "404")


def test_every_row_equals_the_api(fleet: ConsoleSite, opened: Opener) -> None:
    page = opened(f"{fleet.url}/#/queues")
    rows = page.locator("tbody tr")
    expect(rows).to_have_count(3)
    cells = rows.evaluate_all("(rows) => rows.map((row) => [...row.children].map((cell) => cell.textContent))")
    shown = {row[0].removesuffix(" not declared"): row[2:] for row in cells}
    with fleet.client() as client:
        for queue in client.queues():
            limit = "none" if queue["limit_gpus"] is None else str(queue["limit_gpus"])
            quota = [str(queue["used_gpus"]), str(queue["guaranteed_gpus"]), limit, str(queue["borrowed_gpus"])]
            assert shown[queue["name"]] == [*quota, str(queue["running_jobs"]), str(queue["waiting_jobs"])]
    page.get_by_label("Name contains").fill("PROD")
    expect(rows).to_have_count(1)
    page.get_by_role("link", name="products").click()
    expect(page.get_by_role("heading", name="Queue products")).to_be_visible()


def test_a_queue_is_created_changed_and_deleted(fleet: ConsoleSite, opened: Opener) -> None:
    page = opened(f"{fleet.url}/#/queues", expects=INVALID)
    page.get_by_role("button", name="Create a queue").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Name", exact=True).fill("speech")
    dialog.get_by_label("Guaranteed GPUs").fill("8")
    dialog.get_by_label("Limit in GPUs").fill("4")
    dialog.get_by_role("button", name="Create").click()
    expect(dialog.get_by_label("Limit in GPUs")).to_have_attribute("aria-invalid", "true")
    dialog.get_by_label("Limit in GPUs").fill("32")
    dialog.get_by_role("button", name="Create").click()
    expect(dialog).to_have_count(0)
    page.get_by_role("link", name="speech").click()
    page.get_by_role("button", name="Change quota").click()
    expect(dialog.get_by_label("Guaranteed GPUs")).to_have_value("8")
    dialog.get_by_label("Limit in GPUs").fill("")
    dialog.get_by_label("Weight").fill("2")
    dialog.get_by_role("button", name="Change quota").click()
    expect(dialog).to_have_count(0)
    fleet.tick()
    with fleet.client() as client:
        queue = client.queue("speech")
    assert (queue["guaranteed_gpus"], queue["limit_gpus"], queue["weight"]) == (8, None, 2.0)
    expect(page.get_by_role("region", name="Changes")).to_contain_text("speech")
    page.get_by_role("button", name="Delete").click()
    dialog.get_by_role("button", name="Delete").click()
    expect(page.get_by_role("heading", name="Queues")).to_be_visible()
    fleet.tick()
    with fleet.client() as client:
        assert "speech" not in [queue["name"] for queue in client.queues() if queue["declared"]]


def test_pending_jobs_members_and_usage_of_a_queue(fleet: ConsoleSite, opened: Opener) -> None:
    with fleet.client() as client:
        client.submit(
            {"name": "huge", "queue": "research", "gpus": {"min": 96, "max": 96}, "steps": 10, "command": ["true"]}
        )
        client.create_token("anna", ["submitter:research"])
        client.create_token("bert", ["submitter:products"])
    fleet.ticks(3, every_s=60.0)
    page = opened(f"{fleet.url}/#/queues/research")
    pending = page.get_by_role("region", name="Pending jobs", exact=True)
    expect(pending).to_contain_text("96 GPUs; the limit of queue research is 64")
    members = page.get_by_role("region", name="Members")
    expect(members).to_contain_text("anna")
    expect(members).not_to_contain_text("bert")
    expect(page.get_by_role("img", name="GPU-hours by day")).to_be_visible()
    page.get_by_text("Values as a table").click()
    shown = page.get_by_role("region", name="GPU-hours by day").locator("tbody tr").last.locator("td").first
    with fleet.client() as client:
        report = client.usage(by=("day", "queue"))
    hours = sum(row["gpu_s"] for row in report["items"] if row["queue"] == "research") / 3600
    assert abs(float(shown.inner_text()) - hours) < 0.01 + 0.01 * hours


def test_a_queue_admin_changes_the_quota_but_does_not_see_members(guarded: ConsoleSite, opened: Opener) -> None:
    with guarded.client(create_token(guarded, "root", "admin")) as client:
        client.create_queue({"name": "research", "limit_gpus": 8})
        client.create_queue({"name": "secret"})
    guarded.tick()
    page = opened(f"{guarded.url}/#/queues/research", expects=UNAUTHORIZED)
    sign_in(page, create_token(guarded, "anna", "queue-admin:research"))
    expect(page.get_by_role("button", name="Change quota")).to_be_enabled()
    expect(page.get_by_role("button", name="Delete")).to_be_disabled()
    expect(page.get_by_role("region", name="Members")).to_contain_text("Only admins")
    page.goto(f"{guarded.url}/#/queues")
    expect(page.locator("tbody tr")).to_have_count(1)
