"""Sign-in and permissions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from playwright.sync_api import expect

from api.identity.principals import Grant, generate_token
from scheduler.store.api_protocol import AuditEntry
from tests.console.fleets import create_fleet, small_site

if TYPE_CHECKING:
    from tests.console.conftest import Opener
    from tests.console.console_site import ConsoleSite


def test_invalid_token_is_rejected_and_a_valid_one_is_accepted(tmp_path: Path, opened: Opener) -> None:
    site = small_site(tmp_path, auth="on", hours=0.1)
    try:
        root, viewer = _token(site, "root", "admin"), _token(site, "guest", "viewer")
        create_fleet(site, root)
        site.tick()
        page = opened(site.url, expects=("401", "403"))
        dialog = page.get_by_role("dialog", name="Sign in")
        dialog.get_by_label("Token").fill("ebk_wrong")
        dialog.get_by_role("button", name="Sign in").click()
        expect(dialog).to_contain_text("The token was rejected")
        dialog.get_by_label("Token").fill(viewer)
        dialog.get_by_role("button", name="Sign in").click()
        expect(page.get_by_role("listbox", name="Nodes of pool training")).to_be_visible()
        expect(page.locator("#connection")).to_have_text("Live")
        pause = page.get_by_role("button", name="Pause lending")
        expect(pause).to_be_disabled()
        pause.focus()
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert")).to_contain_text("Requires the role admin; you are guest (viewer)")
        page.reload()
        expect(page.get_by_role("listbox", name="Nodes of pool training")).to_be_visible()
    finally:
        site.close()


def _token(site: ConsoleSite, name: str, grant: str) -> str:
    now_s = site.clock.now_s()
    token, secret = generate_token(name, [Grant.parse(grant)], created_by="tests", now_s=now_s, expires_at_s=None)
    site.store.tokens.add(token, AuditEntry(now_s, "tests", "", "CreateToken", "", None, None, ""))
    return secret
