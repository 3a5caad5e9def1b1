"""One delivery attempt against real servers on loopback: addresses, timeouts, certificates, and how much is read."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from pydantic import ValidationError

from api.webhooks.sender import DeliveryOutcome, WebhookSender, create_ssl_context
from scheduler.settings import Settings
from tests.http_server import LoopbackServer, QuietHandler
from tests.kubernetes.certificates import Authority
from tests.webhook_receiver import Answer, Receiver, receiver

NOW_S = 1_760_000_000.0


class ChangingResolver:
    """A resolver that returns each of `answers` in turn."""

    def __init__(self, *answers: list[str]) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []

    async def resolve(self, host: str, port: int) -> list[str]:
        self.asked.append(host)
        return self.answers.pop(0)


@pytest.fixture
def hook() -> Iterator[Receiver]:
    with receiver() as made:
        yield made


def send(sender: WebhookSender, url: str) -> DeliveryOutcome:
    return asyncio.run(sender.send(url, {"webhook-id": "msg_1"}, b"{}"))


def named(hook: Receiver, name: str = "hooks.example") -> str:
    return hook.url.replace("127.0.0.1", name)


def test_a_name_is_resolved_once_and_sent_as_host(hook: Receiver) -> None:
    names = ChangingResolver(["127.0.0.1"])
    sender = WebhookSender(frozenset({"hooks.example"}), resolve=names.resolve)
    assert send(sender, named(hook)) == DeliveryOutcome(204)
    assert names.asked == ["hooks.example"]
    assert hook.received[0].headers["Host"] == named(hook).split("/")[2]


@pytest.mark.parametrize("host", ["hooks..example", f"{'a' * 64}.example", "xn--a.example", "[v1.a]"])
def test_an_invalid_host_name_is_a_failed_attempt(host: str) -> None:
    outcome = send(WebhookSender(), f"http://{host}/")
    assert (outcome.status, outcome.is_delivered) == (None, False)
    assert "host name" in outcome.error


def test_a_refusal_does_not_reveal_what_a_name_resolves_to(hook: Receiver, caplog: pytest.LogCaptureFixture) -> None:
    names = ChangingResolver(["127.0.0.1"], ["93.184.216.34", "10.0.0.7"])
    outcomes = {send(WebhookSender(resolve=names.resolve), named(hook)) for _ in range(2)}
    outcomes.add(send(WebhookSender(resolve=_resolve_nothing), named(hook)))
    (outcome,) = outcomes
    assert (outcome.status, outcome.is_delivered) == (None, False)
    assert "127.0.0.1" not in outcome.error
    assert [detail in caplog.text for detail in ("127.0.0.1", "10.0.0.7", "no address")] == [True] * 3
    assert hook.received == []


async def _resolve_nothing(host: str, port: int) -> list[str]:
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


def test_the_next_address_is_tried_if_one_refuses(hook: Receiver) -> None:
    names = ChangingResolver(["::1", "127.0.0.1"])
    sender = WebhookSender(frozenset({"hooks.example"}), resolve=names.resolve)
    assert send(sender, named(hook)) == DeliveryOutcome(204)


def test_a_redirect_is_not_followed(hook: Receiver) -> None:
    hook.answer = lambda number: Answer(307, {"Location": "/elsewhere"})
    outcome = send(WebhookSender(frozenset({"127.0.0.1"})), hook.url)
    assert (outcome.status, "redirects are not followed" in outcome.error) == (307, True)
    assert len(hook.received) == 1


@pytest.mark.parametrize(
    ("given", "expected_s"),
    [
        *(("120", 120.0), (formatdate(NOW_S + 90, usegmt=True), 90.0), ("soon", 0.0), ("-5", 0.0), ("9" * 400, 0.0)),
        *((f"Fri, 01 Jan 2027 00:00:00 +{'9' * 20}", 0.0), ("Fri, 01 Jan 2027 99999999999:00:00 GMT", 0.0)),
    ],
)
def test_retry_after_is_parsed_as_seconds_or_date(hook: Receiver, given: str, expected_s: float) -> None:
    hook.answer = lambda number: Answer(429, {"Retry-After": given})
    assert send(WebhookSender(frozenset({"127.0.0.1"}), now_s=lambda: NOW_S), hook.url).retry_after_s == expected_s


def test_a_slow_response_ends_at_the_attempt_timeout() -> None:
    class SlowHandler(QuietHandler, BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "100000000")
            self.end_headers()
            for _ in range(100):
                self.wfile.write(b"x")
                time.sleep(0.1)

    with LoopbackServer(SlowHandler) as server:
        outcome = send(WebhookSender(frozenset({"127.0.0.1"}), timeout_s=0.5), server.url)
    assert (outcome.status, "0.5 s" in outcome.error) == (None, True)


def test_only_the_start_of_a_long_response_is_read() -> None:
    class EndlessHandler(QuietHandler, BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(500)
            self.end_headers()
            while True:  # until the client closes the connection
                try:
                    self.wfile.write(b"no " * 1000)
                except OSError:
                    return

    with LoopbackServer(EndlessHandler) as server:
        outcome = send(WebhookSender(frozenset({"127.0.0.1"})), server.url)
    assert outcome.status == 500
    assert outcome.error.startswith("HTTP 500: no no no")
    assert len(outcome.error) < 250


def test_connection_and_name_errors_are_distinguished() -> None:
    sender = WebhookSender(frozenset({"127.0.0.1"}))
    assert "ConnectError" in send(sender, "http://127.0.0.1:1/").error
    assert "public address" in send(sender, "http://nobody.invalid/").error


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    made = Authority(tmp_path_factory.mktemp("certificates") / "authority")
    made.sign_server("hooks", "DNS:hooks.example")
    return made


@pytest.fixture
def secure(authority: Authority) -> Iterator[Receiver]:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(authority.certificate("hooks"), authority.key("hooks"))
    with receiver(context) as made:
        yield made


def test_a_receiver_with_a_trusted_certificate_gets_the_message(secure: Receiver, authority: Authority) -> None:
    settings = Settings(webhook_ca_file=authority.certificate("ca"))
    sender = WebhookSender(
        frozenset({"hooks.example"}),
        ChangingResolver(["127.0.0.1"]).resolve,
        ssl_context=create_ssl_context(settings.webhook_ca_file),
    )
    assert send(sender, named(secure)) == DeliveryOutcome(204)
    assert secure.received[0].headers["Host"] == named(secure).split("/")[2]


@pytest.mark.parametrize(
    ("name", "is_known", "reason"),
    [
        ("hooks.example", False, "unable to get local issuer certificate"),
        ("other.example", True, "Hostname mismatch, certificate is not valid for 'other.example'"),
    ],
)
def test_nothing_is_sent_to_an_untrusted_certificate(
    secure: Receiver, authority: Authority, name: str, is_known: bool, reason: str
) -> None:
    ssl_context = create_ssl_context(authority.certificate("ca") if is_known else None)
    outcome = send(
        WebhookSender(frozenset({name}), ChangingResolver(["127.0.0.1"]).resolve, ssl_context=ssl_context),
        named(secure, name),
    )
    assert outcome.status is None
    assert reason in outcome.error
    assert secure.received == []


def test_a_file_without_certificates_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.pem").write_text("nothing")
    for file in (tmp_path / "empty.pem", tmp_path / "absent.pem"):
        with pytest.raises(ValidationError, match="webhook_ca_file"):
            Settings(webhook_ca_file=file)
