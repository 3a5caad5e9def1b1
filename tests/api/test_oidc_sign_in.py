"""Sign-in to the console at an OpenID Connect issuer, against a real issuer on loopback."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest

from api.identity.oidc import LEEWAY_S
from api.identity.oidc_sign_in import STATE_COOKIE, STATE_S
from api.identity.sessions import REDIRECT_CODE_S
from tests.api.authenticated_service import AuthenticatedService
from tests.api.conftest import Problem
from tests.api.test_sign_in import Browser
from tests.oidc_provider import CLIENT_ID, CLIENT_SECRET, OidcProvider

CONSOLE = "http://service"
CALLBACK = f"{CONSOLE}/sign-in/oidc/callback"


@pytest.fixture
def provider() -> Iterator[OidcProvider]:
    made = OidcProvider(redirect_uri=CALLBACK)
    with made.server:
        yield made


def build_service(provider: OidcProvider, **settings: Any) -> AuthenticatedService:
    own = {"oidc_issuer": provider.url, "oidc_client_id": CLIENT_ID, "console_url": CONSOLE}
    return AuthenticatedService(**{**own, **settings})


@pytest.fixture
def guarded(provider: OidcProvider) -> Iterator[AuthenticatedService]:
    made = build_service(provider)
    yield made
    made.http.close()


def go_to_issuer(browser: Browser) -> str:
    """Follow the redirects of a sign-in up to the callback, and return its URL."""
    started = browser.http.get("/sign-in/oidc")
    assert started.status_code == 302, started.text
    return str(httpx.get(started.headers["location"]).headers["location"])


def come_back(browser: Browser, callback: str) -> dict[str, str]:
    """Open the callback and return what the page finds in the fragment."""
    response = browser.http.get(callback)
    assert (response.status_code, response.headers["cache-control"]) == (303, "no-store")
    location = urlsplit(response.headers["location"])
    assert (location.scheme, location.netloc, location.path, location.query) == ("", "", "/", "")
    return {name: each[0] for name, each in parse_qs(location.fragment.partition("?")[2]).items()}


def test_the_issuer_signs_a_browser_in(guarded: AuthenticatedService, provider: OidcProvider) -> None:
    provider.claims = {"exp": int(guarded.clock.now_s()) + 10**9}
    browser = Browser(guarded)
    assert browser.http.get("/sign-in").json() == {"methods": ["token", "oidc"], "issuer": "localhost"}
    answer = come_back(browser, go_to_issuer(browser))
    assert browser.sign_in(code=answer["code"]).status_code == 201
    caller = browser.get().json()
    assert (caller["name"], caller["grants"], caller["token_id"]) == ("anna", ["submitter"], "")
    assert STATE_COOKIE not in browser.http.cookies
    (query,) = provider.authorizations
    assert query["scope"].split()[0] == "openid"
    assert len({query["state"], query["nonce"], query["code_challenge"]}) == 3


def test_the_client_secret_is_sent_as_the_standard_says(provider: OidcProvider) -> None:
    provider.secret = CLIENT_SECRET
    with (guarded := build_service(provider, oidc_client_secret=CLIENT_SECRET)).http:
        browser = Browser(guarded)
        assert "code" in come_back(browser, go_to_issuer(browser))


def test_the_session_ends_with_the_identity(provider: OidcProvider, problem: Problem) -> None:
    provider.claims = {"exp": int(time.time()) + 60}
    with (guarded := build_service(provider, session_s=1e9)).http:
        browser = Browser(guarded)
        opened = browser.sign_in(code=come_back(browser, go_to_issuer(browser))["code"])
        assert opened.json()["expires_at_s"] == provider.claims["exp"] + LEEWAY_S
        guarded.clock.move_to(opened.json()["expires_at_s"])
        problem(browser.get(), 401)


def test_another_browser_cannot_use_the_answer(
    guarded: AuthenticatedService, provider: OidcProvider, problem: Problem
) -> None:
    """Neither the callback nor the login code signs in a browser that did not begin the sign-in."""
    attacker, victim = Browser(guarded), Browser(guarded)
    callback = go_to_issuer(attacker)
    assert come_back(victim, callback) == {"problem": "expired"}
    go_to_issuer(victim)
    assert come_back(victim, callback) == {"problem": "expired"}
    code = come_back(attacker, callback)["code"]
    for browser in (Browser(guarded), victim):
        problem(browser.sign_in(code=code), 401)
    assert attacker.sign_in(code=code).status_code == 201


def test_an_answer_works_once_and_in_time(
    guarded: AuthenticatedService, provider: OidcProvider, problem: Problem
) -> None:
    browser = Browser(guarded)
    callback = go_to_issuer(browser)
    code = come_back(browser, callback)["code"]
    assert come_back(browser, callback) == {"problem": "failed"}
    guarded.clock.move_to(guarded.clock.now_s() + REDIRECT_CODE_S)
    problem(browser.sign_in(code=code), 401)
    late = go_to_issuer(browser)
    guarded.clock.move_to(guarded.clock.now_s() + STATE_S + 1.0)
    assert come_back(browser, late) == {"problem": "expired"}


@pytest.mark.parametrize(
    "claims",
    [{"nonce": "other"}, {"nonce": None}, {"aud": "ebbtide"}, {"azp": "other"}, {"iss": "http://other.example"},
     {"exp": 1_600_000_000}, {"sub": None}],
)  # fmt: skip
def test_identity_tokens_of_other_sign_ins_are_refused(
    guarded: AuthenticatedService, provider: OidcProvider, claims: dict[str, object]
) -> None:
    provider.claims = claims
    browser = Browser(guarded)
    assert come_back(browser, go_to_issuer(browser)) == {"problem": "failed"}


def test_an_identity_token_is_no_token_for_the_api(
    guarded: AuthenticatedService, provider: OidcProvider, problem: Problem
) -> None:
    """It is for the client, not for the audience of the API."""
    browser = Browser(guarded)
    come_back(browser, go_to_issuer(browser))
    problem(guarded.request("GET", "/v1/whoami", provider.tokens[-1]), 401)


def test_a_refusal_and_a_silent_issuer_have_their_own_answers(
    guarded: AuthenticatedService, provider: OidcProvider
) -> None:
    browser = Browser(guarded)
    provider.refusal = "access_denied"
    assert come_back(browser, go_to_issuer(browser)) == {"problem": "denied"}
    provider.refusal = ""
    callback = go_to_issuer(browser)
    provider.server.close()
    assert come_back(browser, callback) == {"problem": "unavailable"}


def test_an_issuer_that_never_answered_is_asked_rarely(guarded: AuthenticatedService, provider: OidcProvider) -> None:
    provider.is_available = False
    browser = Browser(guarded)
    assert browser.http.get("/sign-in/oidc").headers["location"] == "/#/login?problem=unavailable"
    provider.is_available = True
    assert browser.http.get("/sign-in/oidc").headers["location"] == "/#/login?problem=unavailable"


def test_another_name_of_the_service_leads_to_its_url(guarded: AuthenticatedService) -> None:
    browser = Browser(guarded, "http://localhost")
    location = browser.http.get("/sign-in/oidc").headers["location"]
    assert location == f"{CONSOLE}/sign-in/oidc?canonical=true"
    evil = browser.http.get("/sign-in/oidc", headers={"Host": "evil.example"}).headers["location"]
    assert evil == location


def test_failed_answers_are_limited_by_address(provider: OidcProvider, problem: Problem) -> None:
    with (guarded := build_service(provider, rate_per_s=0.001, rate_burst=3)).http:
        browser = Browser(guarded)
        for _ in range(3):
            assert come_back(browser, f"{CALLBACK}?code=x&state=y") == {"problem": "expired"}
        problem(browser.http.get(f"{CALLBACK}?code=x&state=y"), 429)


def test_without_a_client_the_console_offers_tokens_only(provider: OidcProvider, problem: Problem) -> None:
    with (guarded := AuthenticatedService(oidc_issuer=provider.url)).http:
        assert guarded.http.get("/sign-in").json()["methods"] == ["token"]
        problem(guarded.http.get("/sign-in/oidc"), 409)
