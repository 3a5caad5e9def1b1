"""Issuers that hang, refuse, answer slowly, answer too much or redirect: real HTTP servers, and a real API process."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import httpx
import pytest

from api.identity import oidc_provider
from api.identity.oidc_provider import IssuerUnavailableError, OidcProvider, ProviderMetadata
from api.identity.principals import Grant, Role, generate_token
from scheduler.settings import Settings
from tests.api.authenticated_service import MADE
from tests.api.stream_process import run_stream_process
from tests.api.test_oidc import RSA_KEY, _jwk, signed
from tests.http_server import LoopbackServer, QuietHandler
from tests.loopback import find_free_port

Answer = Callable[["FaultyIssuer", BaseHTTPRequestHandler], None]
TIMEOUT_S = 0.5
PATIENCE_S = 30.0


class FaultyIssuer:
    """An issuer whose answers a test replaces. `asked` counts requests, `answering` those in progress."""

    def __init__(self) -> None:
        self.answer: Answer = FaultyIssuer.work
        self.asked = 0
        self.released = threading.Event()
        issuer = self

        class Handler(QuietHandler, BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                issuer.asked += 1
                try:
                    issuer.answer(issuer, self)
                except OSError:
                    self.close_connection = True  # the client has had enough

        self.server = LoopbackServer(Handler)
        self.url = self.server.url

    def work(self, request: BaseHTTPRequestHandler) -> None:
        endpoints = {"jwks_uri": "/keys", "authorization_endpoint": "/authorize", "token_endpoint": "/token"}
        discovery = {"issuer": self.url, **{name: self.url + path for name, path in endpoints.items()}}
        document = {"keys": [_jwk(RSA_KEY, "rsa-1")]} if request.path.startswith("/keys") else discovery
        self.send(request, 200, json.dumps(document).encode())

    def send(self, request: BaseHTTPRequestHandler, status: int, body: bytes = b"", **headers: str) -> None:
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name, value)
        request.end_headers()
        request.wfile.write(body)

    def hang(self, request: BaseHTTPRequestHandler) -> None:
        self.released.wait(30.0)

    def drip(self, request: BaseHTTPRequestHandler) -> None:
        """Send a byte often enough that no timeout of a single read expires."""
        request.send_response(200)
        request.end_headers()
        while not self.released.wait(0.05):
            request.wfile.write(b" ")

    def flood(self, request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.end_headers()
        for _ in range(100):
            request.wfile.write(b" " * 1_000_000)

    def refuse(self, request: BaseHTTPRequestHandler) -> None:
        self.send(request, 500)

    def redirect_for_ever(self, request: BaseHTTPRequestHandler) -> None:
        self.send(request, 302, Location=f"{self.url}/again")

    def redirect_once(self, request: BaseHTTPRequestHandler) -> None:
        if request.path.endswith("moved"):
            self.work(request)
        else:
            self.send(request, 302, Location=request.path + "?moved")

    def nest(self, request: BaseHTTPRequestHandler) -> None:
        self.send(request, 200, b"[" * 100_000)

    def send_other_issuer(self, request: BaseHTTPRequestHandler) -> None:
        self.send(request, 200, json.dumps({"issuer": "https://other.example", "jwks_uri": self.url}).encode())


@contextmanager
def serving() -> Iterator[FaultyIssuer]:
    made = FaultyIssuer()
    try:
        yield made
    finally:
        made.released.set()
        made.server.close()


@pytest.fixture
def issuer(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyIssuer]:
    monkeypatch.setattr(oidc_provider, "FETCH_TIMEOUT_S", PATIENCE_S)
    with serving() as made:
        yield made


def find_keys(provider: OidcProvider, *kids: str, elapsed_s: float) -> list[object]:
    """Look up keys at the same time, and return what each lookup returned or raised."""

    async def ask() -> list[object]:
        return await asyncio.gather(*(provider.find_key(kid, elapsed_s) for kid in kids), return_exceptions=True)

    return asyncio.run(ask())


FAULTS = [
    *(FaultyIssuer.hang, FaultyIssuer.drip, FaultyIssuer.flood, FaultyIssuer.refuse),
    *(FaultyIssuer.redirect_for_ever, FaultyIssuer.nest, FaultyIssuer.send_other_issuer),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_faulty_issuer_costs_one_bounded_fetch_and_known_keys_go_on(
    issuer: FaultyIssuer, fault: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oidc_provider, "FETCH_TIMEOUT_S", TIMEOUT_S)
    provider = OidcProvider(Settings(oidc_issuer=issuer.url))
    issuer.answer = fault
    started_s = time.monotonic()
    found = find_keys(provider, *("rsa-1",) * 20, elapsed_s=0.0)
    assert all(isinstance(each, IssuerUnavailableError) for each in found), found
    assert time.monotonic() - started_s < TIMEOUT_S + 5.0
    asked, started_s = issuer.asked, time.monotonic()
    assert asked <= 1 + oidc_provider.REDIRECTS_MAX
    assert all(isinstance(each, IssuerUnavailableError) for each in find_keys(provider, "a", "b", elapsed_s=9.0))
    assert issuer.asked == asked, "the failure is remembered"

    issuer.answer = FaultyIssuer.work
    _await_idle(provider)
    monkeypatch.setattr(oidc_provider, "FETCH_TIMEOUT_S", PATIENCE_S)
    assert [getattr(each, "key_id", each) for each in find_keys(provider, "rsa-1", elapsed_s=20.0)] == ["rsa-1"]
    issuer.answer = fault
    at_s = 20.0 + oidc_provider.DOCUMENTS_TTL_S
    started_s = time.monotonic()
    assert [getattr(each, "key_id", each) for each in find_keys(provider, "rsa-1", elapsed_s=at_s)] == ["rsa-1"]
    assert time.monotonic() - started_s < PATIENCE_S / 2, "old keys are used without waiting"
    issuer.released.set()
    _await_idle(provider)


def _await_idle(provider: OidcProvider) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while provider._fetch is not None:
        assert time.monotonic() < until_s
        time.sleep(0.01)


def test_redirects_are_followed_and_metadata_names_the_endpoints(issuer: FaultyIssuer) -> None:
    provider = OidcProvider(Settings(oidc_issuer=issuer.url))
    issuer.answer = FaultyIssuer.redirect_once
    metadata = asyncio.run(provider.get_metadata(0.0))
    url = issuer.url
    assert metadata == ProviderMetadata(url, f"{url}/keys", f"{url}/authorize", f"{url}/token", "")
    assert [getattr(each, "key_id", each) for each in find_keys(provider, "rsa-1", "b", elapsed_s=1.0)] == [
        "rsa-1",
        None,
    ]


def test_a_configured_key_url_needs_no_discovery(issuer: FaultyIssuer) -> None:
    def have_keys_only(faulty: FaultyIssuer, request: BaseHTTPRequestHandler) -> None:
        (faulty.work if request.path == "/keys" else faulty.refuse)(request)

    issuer.answer = have_keys_only
    provider = OidcProvider(Settings(oidc_issuer=issuer.url, oidc_jwks_url=f"{issuer.url}/keys"))
    assert [getattr(each, "key_id", each) for each in find_keys(provider, "rsa-1", elapsed_s=0.0)] == ["rsa-1"]
    with pytest.raises(IssuerUnavailableError):
        asyncio.run(provider.get_metadata(1.0))


def test_nobody_is_listening() -> None:
    provider = OidcProvider(Settings(oidc_issuer=f"http://127.0.0.1:{find_free_port()}"))
    assert isinstance(find_keys(provider, "a", elapsed_s=0.0)[0], IssuerUnavailableError)


def test_api_tokens_do_not_wait_for_an_issuer_that_hangs(tmp_path: Path) -> None:
    with serving() as issuer, run_stream_process(tmp_path, auth="on", oidc_issuer=issuer.url) as api:
        issuer.answer = FaultyIssuer.hang
        token, secret = generate_token(
            "ada", (Grant(Role.VIEWER),), created_by="tests", now_s=time.time(), expires_at_s=None
        )
        api.store.tokens.add(token, MADE)
        jwt = signed({"iss": issuer.url, "aud": "ebbtide", "sub": "eve", "exp": int(time.time()) + 300})
        statuses: list[int] = []

        def ask(bearer: str) -> int:
            url, headers = f"http://127.0.0.1:{api.port}/v1/whoami", {"Authorization": f"Bearer {bearer}"}
            return httpx.get(url, headers=headers, timeout=PATIENCE_S, trust_env=False).status_code

        threads = [threading.Thread(target=lambda: statuses.append(ask(jwt))) for _ in range(20)]
        for thread in threads:
            thread.start()
        waits_s: list[float] = []
        while any(thread.is_alive() for thread in threads):
            started_s = time.monotonic()
            assert ask(secret) == 200
            waits_s.append(time.monotonic() - started_s)
            time.sleep(0.02)
        assert statuses == [503] * 20
        assert max(waits_s) < 3.0, sorted(waits_s)[-3:]
        assert issuer.asked == 1
