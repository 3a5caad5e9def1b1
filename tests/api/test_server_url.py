"""A URL at which no service answers: the error says which one to use."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from cli.connection import service_client
from cli.exit_codes import ServiceError
from ebbtide.client import Client, RetryPolicy, UnreachableError
from tests.http_server import LoopbackServer, QuietHandler
from tests.loopback import find_free_port


class RedirectHandler(QuietHandler, BaseHTTPRequestHandler):
    """Sends every client to another URL, as a proxy does that wants TLS."""

    def do_GET(self) -> None:
        self.send_response(308)
        self.send_header("Location", "https://ebbtide.example.com/readyz")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_HEAD(self) -> None:
        self.do_GET()


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> ssl.SSLContext:
    """A server's context with a certificate that nobody trusts."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    file: Path = tmp_path_factory.mktemp("tls") / "server.pem"
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    file.write_bytes(private + certificate.public_bytes(serialization.Encoding.PEM))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)
    return context


@pytest.fixture
def plain() -> Iterator[LoopbackServer]:
    with LoopbackServer(RedirectHandler) as server:
        yield server


def explain(url: str) -> str:
    with Client(url, retries=RetryPolicy(attempts=1)) as client, pytest.raises(UnreachableError) as raised:
        client.whoami()
    return str(raised.value)


def test_http_against_a_tls_server_says_https(tls: ssl.SSLContext) -> None:
    with LoopbackServer(RedirectHandler, tls) as server:
        said = explain(f"http://{server.address}")
        assert f"use https://{server.address}" in said
        assert "SSL" not in said


def test_https_against_a_plain_server_says_http(plain: LoopbackServer) -> None:
    said = explain(f"https://{plain.address}")
    assert f"use http://{plain.address}" in said
    assert "SSL" not in said


def test_the_command_line_suggests_another_service_only_if_none_answers(
    plain: LoopbackServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ebbtide.client.Client", partial(Client, retries=RetryPolicy(attempts=1)))
    for url, suggests in ((f"https://{plain.address}", False), (f"http://127.0.0.1:{find_free_port()}", True)):
        with pytest.raises(ServiceError) as raised, service_client(url) as client:
            client.whoami()
        assert ("`ebbtide serve`" in str(raised.value)) == suggests


def test_an_unknown_certificate_is_named_without_the_words_of_the_library(tls: ssl.SSLContext) -> None:
    with LoopbackServer(RedirectHandler, tls) as server:
        said = explain(f"https://{server.address}")
    assert "certificate" in said
    assert "SSL" not in said
    assert "_ssl.c" not in said


def test_a_redirect_names_its_target(plain: LoopbackServer) -> None:
    assert "https://ebbtide.example.com" in explain(plain.url)


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_port_without_a_server_suggests_nothing(scheme: str) -> None:
    assert "use http" not in explain(f"{scheme}://127.0.0.1:{find_free_port()}")


@pytest.mark.parametrize("url", ["http://service/v1", "https://service/ebbtide/v1/"])
def test_the_version_is_no_part_of_the_url(url: str) -> None:
    with pytest.raises(ValueError, match=r"Use https?://service(/ebbtide)?$"):
        Client(url)
