"""Webhooks, tokens, secrets and settings pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect

from scheduler.settings import Settings
from tests.console.test_access import UNAUTHORIZED, create_token, guarded, sign_in

if TYPE_CHECKING:
    from tests.console.conftest import Opener
    from tests.console.console_site import ConsoleSite

__all__ = ["guarded"]  # a fixture

INVALID = ("422", "404")
HOOK = "https://hooks.example.com/ebbtide"


@pytest.mark.parametrize(
    ("path", "route"),
    [
        ("nodes", "/v1/overview*"),
        ("queues", "/v1/queues*"),
        ("pools", "/v1/pools*"),
        ("decisions", "/v1/decisions*"),
        ("audit", "/v1/audit*"),
        ("webhooks", "/v1/webhooks*"),
        ("tokens", "/v1/tokens*"),
        ("settings", "/v1/settings*"),
    ],
)
def test_an_error_is_shown_and_disappears(site: ConsoleSite, opened: Opener, path: str, route: str) -> None:
    page = opened(f"{site.url}/#/loans", expects=("503",))
    expect(page.get_by_role("heading", name="Loans", exact=True)).to_be_visible()
    problem = {"title": "The database is busy", "detail": "try again", "type": "about:blank", "status": 503}
    page.route(f"**{route}", lambda request: request.fulfill(status=503, json=problem))
    page.goto(f"{site.url}/#/{path}")
    expect(page.get_by_role("alert")).to_contain_text("The database is busy")
    page.unroute(f"**{route}")
    page.reload()
    expect(page.locator("main .card, main .facts").first).to_be_visible()
    expect(page.get_by_role("alert")).to_have_count(0)


def test_a_webhook_is_created_tested_disabled_and_deleted(fleet: ConsoleSite, opened: Opener) -> None:
    page = opened(f"{fleet.url}/#/webhooks", expects=INVALID)
    expect(page.get_by_text("There are no webhooks yet")).to_be_visible()
    page.get_by_role("button", name="Create a webhook").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("URL").fill("ftp://example.com")
    dialog.get_by_role("button", name="Create").click()
    expect(dialog.get_by_label("URL")).to_have_attribute("aria-invalid", "true")
    dialog.get_by_label("URL").fill(HOOK)
    dialog.get_by_label("Events").fill("JobStarted, NodeLent")
    dialog.get_by_label("Queue").fill("research")
    dialog.get_by_role("button", name="Create").click()
    expect(dialog.get_by_role("heading", name="Webhook created")).to_be_visible()
    assert dialog.locator("code").inner_text().startswith("whsec_")
    dialog.get_by_role("button", name="I have stored it").click()
    with fleet.client() as client:
        [webhook] = client.webhooks()
    assert (webhook["codes"], webhook["queue"]) == (["JobStarted", "NodeLent"], "research")
    page.get_by_role("link", name=HOOK).click()
    page.get_by_role("button", name="Send a test").click()
    dialog.get_by_role("button", name="Send a test").click()
    sent = page.get_by_role("region", name="Deliveries")
    expect(sent).to_contain_text("pending after 0 attempts")
    page.get_by_role("combobox", name="State").select_option("dead")
    expect(page.get_by_text("No matching deliveries")).to_be_visible()
    page.get_by_role("button", name="Disable").click()
    dialog.get_by_role("button", name="Disable").click()
    expect(page.get_by_role("button", name="Send a test")).to_be_disabled()
    page.get_by_role("button", name="Rotate secret").click()
    dialog.get_by_role("button", name="Rotate secret").click()
    expect(dialog.get_by_role("heading", name="New signing secret")).to_be_visible()
    dialog.get_by_role("button", name="I have stored it").click()
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    with fleet.client() as client:
        expect(page.get_by_text("There are no webhooks yet")).to_be_visible()
        assert list(client.webhooks()) == []


def test_a_token_is_shown_once_and_revoked(guarded: ConsoleSite, opened: Opener) -> None:
    page = opened(f"{guarded.url}/#/tokens", expects=(*UNAUTHORIZED, *INVALID))
    sign_in(page, create_token(guarded, "root", "admin"))
    expect(page.get_by_text("this session")).to_be_visible()
    page.get_by_role("button", name="Create a token").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Name").fill("not a name")
    dialog.get_by_role("button", name="Create").click()
    expect(dialog.get_by_label("Name")).to_have_attribute("aria-invalid", "true")
    dialog.get_by_label("Name").fill("ci")
    dialog.get_by_label("Queue").fill("research")
    dialog.get_by_role("button", name="Create").click()
    secret = dialog.locator("code")
    expect(secret).to_contain_text("ebk_")
    dialog.get_by_role("button", name="Copy token").click()
    token = secret.inner_text()
    assert page.evaluate("navigator.clipboard.readText()") == token
    with guarded.client(token) as client:
        assert client.whoami()["grants"] == ["submitter:research"]
    dialog.get_by_role("button", name="I have stored it").click()
    row = page.get_by_role("row", name="ci ")
    expect(row).to_contain_text("valid")
    assert token not in page.content()
    row.get_by_role("button", name="Revoke").click()
    dialog.get_by_role("button", name="Revoke").click()
    expect(row).to_have_count(0)
    page.get_by_label("Show").select_option("all")
    expect(row).to_contain_text("revoked")


def test_a_secret_is_set_and_deleted_without_its_value(fleet: ConsoleSite, opened: Opener) -> None:
    page = opened(f"{fleet.url}/#/secrets?queue=research", expects=INVALID)
    expect(page.get_by_text("No secrets yet")).to_be_visible()
    page.get_by_role("button", name="Set a secret").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Name").fill("hf-token")
    dialog.get_by_label("Value").fill("abc")
    dialog.get_by_role("button", name="Set").click()
    expect(dialog.get_by_label("Value")).to_have_attribute("aria-invalid", "true")
    dialog.get_by_label("Value").fill("hf_ü1234567")
    dialog.get_by_role("button", name="Set").click()
    expect(dialog).to_have_count(0)
    row = page.get_by_role("row", name="hf-token")
    expect(row).to_contain_text("anybody")
    assert "1234567" not in page.content()
    row.get_by_role("button", name="Change").click()
    dialog.get_by_label("Value").fill("hf_7654321")
    dialog.get_by_role("button", name="Change").click()
    expect(dialog).to_have_count(0)
    with fleet.client() as client:
        assert [(each["name"], each["version"]) for each in client.secrets("research")] == [("hf-token", 2)]
    row.get_by_role("button", name="Delete").click()
    dialog.get_by_role("button", name="Delete").click()
    expect(page.get_by_text("No secrets yet")).to_be_visible()


def test_a_submitter_lists_the_secrets_of_own_queues(guarded: ConsoleSite, opened: Opener) -> None:
    with guarded.client(create_token(guarded, "root", "admin")) as client:
        for queue in ("research", "vision"):
            client.create_queue({"name": queue})
        client.set_secret("research", "hf-token", b"hf_1234567")
    guarded.tick()
    page = opened(f"{guarded.url}/#/secrets", expects=UNAUTHORIZED)
    sign_in(page, create_token(guarded, "anna", "submitter:research"))
    expect(page.get_by_role("row", name="hf-token")).to_be_visible()
    expect(page.get_by_label("Queue").locator("option")).to_have_text(["research"])
    expect(page.get_by_role("button", name="Set a secret")).to_be_disabled()


def test_settings_are_searched_and_equal_the_api(fleet: ConsoleSite, opened: Opener) -> None:
    page = opened(f"{fleet.url}/#/settings")
    rows = page.locator("tbody tr")
    expect(rows).to_have_count(len(Settings.model_fields))
    page.get_by_label("Name or description contains").fill("run_dir")
    row = page.get_by_role("row", name="EBBTIDE_RUN_DIR Directory for logs")
    expect(row).to_contain_text(str(fleet.folder))
    expect(row).to_contain_text("environment")
    page.get_by_label("Name or description contains").fill("client_secret")
    expect(rows.first).to_contain_text("not set")
    page.get_by_label("Name or description contains").fill("no such setting")
    expect(page.get_by_text("No matching settings")).to_be_visible()
