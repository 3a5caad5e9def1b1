"""Sign-in, sign-out and permissions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import Page, expect

from api.identity.principals import Grant, generate_token
from scheduler.store.api_protocol import AuditEntry
from scheduler.store.credentials import ApiToken
from tests.console.fleets import create_fleet, small_site
from tests.console.test_accessibility import find_serious_violations
from tests.loopback import find_free_port
from tests.oidc_provider import CLIENT_ID, OidcProvider

if TYPE_CHECKING:
    from tests.console.conftest import Opener
    from tests.console.console_site import ConsoleSite

UNAUTHORIZED = ("401", "403")


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[ConsoleSite]:
    """An empty service that requires authentication."""
    site = small_site(tmp_path, auth="on", hours=0.1)
    yield site
    site.close()


def test_invalid_token_is_rejected_and_a_valid_one_is_accepted(
    guarded: ConsoleSite, opened: Opener, picture: Callable[[Page, str], None]
) -> None:
    root, viewer = create_token(guarded, "root", "admin"), create_token(guarded, "guest", "viewer")
    create_fleet(guarded, root)
    guarded.tick()
    page = opened(guarded.url, expects=UNAUTHORIZED)
    dialog = page.get_by_role("dialog", name="Sign in")
    dialog.get_by_label("Token").fill("ebk_wrong")
    picture(page, "sign-in")
    dialog.get_by_role("button", name="Sign in").click()
    expect(dialog.get_by_role("alert")).to_be_visible()
    picture(page, "sign-in-refused")
    sign_in(page, viewer)
    expect(page.get_by_role("listbox", name="Nodes of pool training")).to_be_visible()
    expect(page.locator("#connection")).to_have_text("Live")
    expect(page.locator("#user .name")).to_have_text("guest")
    picture(page, "signed-in")
    assert find_serious_violations(page) == []
    page.set_viewport_size({"width": 420, "height": 800})
    picture(page, "signed-in-narrow")
    page.set_viewport_size({"width": 1280, "height": 900})
    pause = page.get_by_role("button", name="Pause lending")
    expect(pause).to_be_disabled()
    pause.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("Requires the role admin; you are guest (viewer)")
    page.reload()
    expect(page.get_by_role("listbox", name="Nodes of pool training")).to_be_visible()


def test_login_url_signs_in_once_and_leaves_no_secret(guarded: ConsoleSite, opened: Opener) -> None:
    token = create_token(guarded, "root", "admin")
    with guarded.client(token) as client:
        code = client.create_login_code()["code"]
    page = opened(f"{guarded.url}/#/login?code={code}")
    expect(page.locator("#user .name")).to_have_text("root")
    assert page.url == f"{guarded.url}/#/"
    assert page.evaluate("history.length") <= 2
    stored = page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])")
    (cookie,) = page.context.cookies()
    assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
    assert not any(secret in stored for secret in (code, token, cookie["value"]))
    used = opened(f"{guarded.url}/#/login?code={code}", expects=UNAUTHORIZED)
    expect(used.get_by_role("dialog", name="Sign in").get_by_role("alert")).to_contain_text("used or has expired")


def test_tabs_share_the_session_and_its_end(guarded: ConsoleSite, opened: Opener) -> None:
    token = create_token(guarded, "root", "admin")
    first = opened(guarded.url, expects=UNAUTHORIZED)
    second = first.context.new_page()
    second.goto(f"{guarded.url}/#/jobs")
    for page in (first, second):
        expect(page.get_by_role("dialog", name="Sign in")).to_be_visible()
    sign_in(first, token)
    for page in (first, second):
        expect(page.locator("#user .name")).to_have_text("root")
        expect(page.get_by_role("dialog")).to_have_count(0)
    second.get_by_role("button", name="Sign out").click()
    for page in (first, second):
        expect(page.get_by_role("dialog", name="Sign in")).to_be_visible()
    assert first.context.cookies() == []


def test_login_url_replaces_a_session_only_after_a_question(guarded: ConsoleSite, opened: Opener) -> None:
    page = opened(guarded.url, expects=UNAUTHORIZED)
    sign_in(page, create_token(guarded, "anna", "viewer"))
    expect(page.locator("#user .name")).to_have_text("anna")
    for button, name in (("Go back", "anna"), ("Sign in again", "berta")):
        with guarded.client(create_token(guarded, "berta", "viewer")) as client:
            code = client.create_login_code()["code"]
        page.goto(f"{guarded.url}/#/login?code={code}")
        page.get_by_role("dialog", name="Sign in again?").get_by_role("button", name=button).click()
        expect(page.get_by_role("dialog")).to_have_count(0)
        expect(page.locator("#user .name")).to_have_text(name)


def test_revoked_token_ends_the_session(guarded: ConsoleSite, opened: Opener) -> None:
    created, secret = create_stored_token(guarded, "anna", "viewer")
    page = opened(guarded.url, expects=UNAUTHORIZED)
    sign_in(page, secret)
    expect(page.locator("#user .name")).to_have_text("anna")
    guarded.store.tokens.revoke(created.id, guarded.clock.now_s(), _entry(guarded))
    guarded.tick(after_s=6.0)
    dialog = page.get_by_role("dialog", name="Sign in")
    expect(dialog.get_by_role("alert")).to_contain_text("was revoked")


def test_identity_provider_signs_in(tmp_path: Path, opened: Opener, picture: Callable[[Page, str], None]) -> None:
    url = f"http://127.0.0.1:{find_free_port()}"
    provider = OidcProvider(redirect_uri=f"{url}/sign-in/oidc/callback")
    settings = {"oidc_issuer": provider.url, "oidc_client_id": CLIENT_ID, "console_url": url}
    with provider.server:
        site = small_site(tmp_path, auth="on", hours=0.1, port=int(url.rpartition(":")[2]), settings=settings)
        try:
            page = opened(f"{url}/#/jobs?owner=anna", expects=UNAUTHORIZED)
            dialog = page.get_by_role("dialog", name="Sign in")
            provider.refusal = "access_denied"
            dialog.get_by_role("button", name="Continue with localhost").click()
            expect(dialog.get_by_role("alert")).to_contain_text("did not sign you in")
            picture(page, "sign-in-denied-by-provider")
            assert find_serious_violations(page) == []
            dialog.get_by_label("Token").fill("ebk_wrong")
            page.keyboard.press("Enter")
            expect(dialog.get_by_role("alert")).to_contain_text("The token does not exist")
            provider.refusal = ""
            dialog.get_by_role("button", name="Continue with localhost").click()
            expect(page.locator("#user .name")).to_have_text("anna")
            assert page.url == f"{url}/#/jobs?owner=anna"
            expect(page.get_by_role("heading", name="No jobs")).to_be_visible()
            page.close()  # before the service, which a request of the page would miss
        finally:
            site.close()


def sign_in(page: Page, token: str) -> None:
    dialog = page.get_by_role("dialog", name="Sign in")
    dialog.get_by_label("Token").fill(token)
    dialog.get_by_role("button", name="Sign in").click()


def create_token(site: ConsoleSite, name: str, grant: str) -> str:
    return create_stored_token(site, name, grant)[1]


def create_stored_token(site: ConsoleSite, name: str, grant: str) -> tuple[ApiToken, str]:
    now_s = site.clock.now_s()
    token, secret = generate_token(name, [Grant.parse(grant)], created_by="tests", now_s=now_s, expires_at_s=None)
    site.store.tokens.add(token, _entry(site))
    return token, secret


def _entry(site: ConsoleSite) -> AuditEntry:
    return AuditEntry(site.clock.now_s(), "tests", "", "CreateToken", "", None, None, "")
