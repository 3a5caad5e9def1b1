"""Sessions of the web console: sign-in with a token or a login code, sign-out, and requests with the session."""

from __future__ import annotations

from collections.abc import Iterator
from http.cookies import SimpleCookie
from typing import Any

import httpx
import pytest

from api.identity.authentication import TOKEN_CACHE_S
from api.identity.login_codes import LOGIN_CODE_S
from api.identity.sessions import KEY_HEADER
from scheduler.settings import Settings
from scheduler.store.api_protocol import AuditFilter
from scheduler.store.protocol import Page
from tests.api.authenticated_service import MADE, AuthenticatedService
from tests.api.conftest import ApiService, Problem


class Browser:
    """A browser with one page of the console. `key` is what the page keeps."""

    def __init__(self, service: ApiService, url: str = "http://service") -> None:
        self.http = httpx.Client(transport=service.transport, base_url=url)
        self.key = ""

    def sign_in(self, *, headers: dict[str, str] | None = None, **credential: str) -> httpx.Response:
        response = self.http.post("/sign-in", json=credential, headers=headers)
        self.key = response.json().get("key", "") if response.status_code == 201 else self.key
        return response

    def get(self, path: str = "/v1/whoami", **headers: str) -> httpx.Response:
        return self.http.get(path, headers={KEY_HEADER: self.key, **headers})

    def sign_out(self) -> httpx.Response:
        return self.http.post("/sign-out", headers={KEY_HEADER: self.key})


@pytest.fixture
def guarded() -> Iterator[AuthenticatedService]:
    made = AuthenticatedService()
    yield made
    made.http.close()


def read_cookie(response: httpx.Response) -> Any:
    (header,) = [each for each in response.headers.get_list("set-cookie") if "_session_" in each]
    (morsel,) = SimpleCookie(header).values()
    return morsel


def list_actions(service: AuthenticatedService) -> list[tuple[str, str]]:
    entries = service.store.audit_log.list_entries(Page(0, 100), AuditFilter())
    return [(each.entry.action, each.entry.actor) for each in entries]


def test_a_token_opens_a_session(guarded: AuthenticatedService) -> None:
    browser = Browser(guarded)
    response = browser.sign_in(token=guarded.token("anna", "viewer"))
    assert response.status_code == 201
    assert response.headers["cache-control"] == "no-store"
    cookie = read_cookie(response)
    assert (cookie["httponly"], cookie["samesite"], cookie["path"]) == (True, "strict", "/")
    assert cookie["domain"] == ""
    assert cookie.value not in response.text
    answer = browser.get()
    assert (answer.json()["name"], answer.headers["cache-control"]) == ("anna", "no-store")
    assert list_actions(guarded)[-1] == ("SignIn", "anna")


def test_cookie_and_key_work_together_only(guarded: AuthenticatedService, problem: Problem) -> None:
    browser = Browser(guarded)
    cookie = read_cookie(browser.sign_in(token=guarded.root)).value
    problem(browser.http.get("/v1/whoami"), 401)
    problem(Browser(guarded).http.get("/v1/whoami", headers={KEY_HEADER: browser.key}), 401)
    for value in (cookie, browser.key, f"ebs_{cookie}"):
        problem(guarded.request("GET", "/v1/whoami", value), 401)


@pytest.mark.parametrize(
    "headers",
    [{"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"}, {"Origin": "http://evil.example"},
     {"Origin": "null"}, {"Origin": "http://service:9999"}],
)  # fmt: skip
def test_pages_of_other_sites_have_no_session(
    guarded: AuthenticatedService, problem: Problem, headers: dict[str, str]
) -> None:
    browser = Browser(guarded)
    assert browser.sign_in(token=guarded.root).status_code == 201
    problem(browser.get(**headers), 401)
    problem(browser.http.post("/v1/lending:pause", headers={KEY_HEADER: browser.key, **headers}), 401)
    problem(browser.sign_in(token=guarded.root, headers=headers), 403)
    problem(browser.http.post("/sign-out", headers={KEY_HEADER: browser.key, **headers}), 403)
    assert browser.get(Origin="http://service", **{"Sec-Fetch-Site": "same-origin"}).status_code == 200


def test_every_sign_in_has_new_secrets(guarded: AuthenticatedService) -> None:
    browser = Browser(guarded)
    first = read_cookie(browser.sign_in(token=guarded.root)).value, browser.key
    second = read_cookie(browser.sign_in(token=guarded.root)).value, browser.key
    assert not set(first) & set(second)


def test_a_session_that_somebody_else_chose_is_refused(guarded: AuthenticatedService, problem: Problem) -> None:
    browser = Browser(guarded)
    browser.http.cookies.set(f"ebbtide_session_{Settings().port}", "chosen")
    browser.key = "chosen"
    problem(browser.get(), 401)


def test_sign_out_ends_the_session_in_the_service(guarded: AuthenticatedService, problem: Problem) -> None:
    browser, thief = Browser(guarded), Browser(guarded)
    browser.sign_in(token=guarded.root)
    thief.key = browser.key
    thief.http.cookies.update(browser.http.cookies)
    response = browser.sign_out()
    assert response.status_code == 204
    assert read_cookie(response).value == ""
    guarded.clock.move_to(guarded.clock.now_s() + TOKEN_CACHE_S)
    problem(thief.get(), 401)
    assert browser.sign_out().status_code == 204
    assert list_actions(guarded).count(("SignOut", "root")) == 1


def test_a_session_ends_with_its_token(guarded: AuthenticatedService, problem: Problem) -> None:
    token, secret = guarded.create_token("gone", "admin")
    revoked, expiring = Browser(guarded), Browser(guarded)
    revoked.sign_in(token=secret)
    response = expiring.sign_in(token=guarded.token("late", "viewer", life_s=60.0))
    assert response.json()["expires_at_s"] == guarded.clock.now_s() + 60.0
    assert int(read_cookie(response)["max-age"]) == 60
    guarded.store.tokens.revoke(token.id, guarded.clock.now_s(), MADE)
    guarded.clock.move_to(guarded.clock.now_s() + TOKEN_CACHE_S)
    problem(revoked.get(), 401)
    assert expiring.get().status_code == 200
    guarded.clock.move_to(guarded.clock.now_s() + 60.0)
    problem(expiring.get(), 401)


def test_a_session_lasts_as_long_as_the_setting_says(problem: Problem) -> None:
    with (guarded := AuthenticatedService(session_s=100.0)).http:
        browser = Browser(guarded)
        browser.sign_in(token=guarded.root)
        guarded.clock.move_to(guarded.clock.now_s() + 99.0)
        assert browser.get().status_code == 200
        guarded.clock.move_to(guarded.clock.now_s() + 1.0)
        problem(browser.get(), 401)


def test_a_login_code_signs_in_once(guarded: AuthenticatedService, problem: Problem) -> None:
    made = guarded.request("POST", "/v1/login-codes", guarded.token("anna", "viewer"))
    assert (made.status_code, made.headers["cache-control"]) == (201, "no-store")
    code = made.json()["code"]
    browser = Browser(guarded)
    assert browser.sign_in(code=code).status_code == 201
    assert browser.get().json()["name"] == "anna"
    problem(Browser(guarded).sign_in(code=code), 401)
    problem(guarded.request("GET", "/v1/whoami", code), 403)
    assert list_actions(guarded)[-2:] == [("CreateLoginCode", "anna"), ("SignIn", "anna")]


def test_a_login_code_expires_and_ends_with_its_token(guarded: AuthenticatedService, problem: Problem) -> None:
    token, secret = guarded.create_token("gone", "viewer")
    late, orphan = (guarded.request("POST", "/v1/login-codes", each).json() for each in (guarded.root, secret))
    guarded.store.tokens.revoke(token.id, guarded.clock.now_s(), MADE)
    problem(Browser(guarded).sign_in(code=orphan["code"]), 401)
    guarded.clock.move_to(guarded.clock.now_s() + LOGIN_CODE_S)
    assert late["expires_at_s"] == guarded.clock.now_s()
    problem(Browser(guarded).sign_in(code=late["code"]), 401)


def test_a_session_opens_no_other_session(guarded: AuthenticatedService, problem: Problem) -> None:
    browser = Browser(guarded)
    cookie = read_cookie(browser.sign_in(token=guarded.root)).value
    for blank in ("", " "):
        problem(browser.sign_in(token=f"{blank}ebs_{cookie}~{browser.key}"), 401)


@pytest.mark.parametrize("credential", [{}, {"token": "a", "code": "b"}, {"token": "x" * 8193}])
def test_a_sign_in_needs_one_credential(
    guarded: AuthenticatedService, problem: Problem, credential: dict[str, Any]
) -> None:
    problem(Browser(guarded).sign_in(**credential), 422)


@pytest.mark.parametrize("kind", ["token", "code"])
def test_failed_sign_ins_are_limited_by_address(problem: Problem, kind: str) -> None:
    with (guarded := AuthenticatedService(rate_per_s=0.001, rate_burst=5)).http:
        credential: dict[str, Any] = {kind: "ebk_wrong"}
        for _ in range(5):
            problem(Browser(guarded).sign_in(**credential), 401)
        assert problem(Browser(guarded).sign_in(**credential), 429)["type"].endswith(":rate-limited")


def test_the_cookie_is_secure_under_tls(guarded: AuthenticatedService) -> None:
    assert not read_cookie(Browser(guarded).sign_in(token=guarded.root))["secure"]
    assert read_cookie(Browser(guarded, "https://service").sign_in(token=guarded.root))["secure"]
    behind_proxy = {"Origin": "https://service", "Sec-Fetch-Site": "same-origin"}
    assert read_cookie(Browser(guarded).sign_in(token=guarded.root, headers=behind_proxy))["secure"]


def test_without_authentication_nobody_signs_in(service: ApiService, problem: Problem) -> None:
    assert service.http.get("/sign-in").json() == {"methods": [], "issuer": ""}
    problem(service.post("/sign-in", {"token": "ebk_x"}), 409)
    problem(service.post("/v1/login-codes"), 409)
