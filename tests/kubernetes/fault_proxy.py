"""A proxy in front of the real API server that drops, delays or rejects requests on demand."""

from __future__ import annotations

import http.client
import json
import re
import select
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path

from tests.http_server import LoopbackServer, QuietHandler
from tests.kubernetes.control_plane import ADMIN, ControlPlane

PASSED_ON = ("Content-Type", "Accept", "Authorization")


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault. `status` is returned without asking the API server. Otherwise the server executes the request, and the
    response is late by `delay_s` or, with `swallow`, lost.
    """

    status: int = 0
    delay_s: float = 0.0
    swallow: bool = False


FAULTLESS = Fault()


class FaultProxy:
    """An HTTP proxy. Requests with a bearer token keep their identity; all others are admin.

    `fault` is called for each request with method and path, in the thread that handles it. While `is_mute`, new watches
    stay open and silent. With `watch_s`, watches end after this time.
    """

    def __init__(self, plane: ControlPlane) -> None:
        self.fault: Callable[[str, str], Fault] = lambda method, path: FAULTLESS
        self.is_mute = False
        self.watch_s = 0
        self._plane = plane
        self._trust = ssl.create_default_context(cafile=str(plane.authority.certificate("ca")))
        self._admin = ssl.create_default_context(cafile=str(plane.authority.certificate("ca")))
        self._admin.load_cert_chain(plane.authority.certificate(ADMIN), plane.authority.key(ADMIN))
        self._url = ""

    def kubeconfig(self, folder: Path, **user: str) -> Path:
        document = {
            "clusters": [{"name": "proxy", "cluster": {"server": self._url}}],
            "users": [{"name": "user", "user": user}],
            "contexts": [{"name": "proxy", "context": {"cluster": "proxy", "user": "user"}}],
            "current-context": "proxy",
        }
        path = folder / "proxy.kubeconfig"
        path.write_text(json.dumps(document))
        return path

    @contextmanager
    def running(self) -> Iterator[FaultProxy]:
        with LoopbackServer(_handler(self)) as server:
            self._url = server.url
            yield self

    def ask(
        self, method: str, path: str, body: bytes, headers: dict[str, str]
    ) -> tuple[http.client.HTTPSConnection, http.client.HTTPResponse]:
        if self.watch_s:
            path = re.sub(r"(?<=timeoutSeconds=)\d+", str(self.watch_s), path)
        context = self._trust if "Authorization" in headers else self._admin
        upstream = http.client.HTTPSConnection("127.0.0.1", self._plane.api_port, timeout=60, context=context)
        try:
            upstream.request(method, path, body or None, headers)
            return upstream, upstream.getresponse()
        except (OSError, http.client.HTTPException):
            upstream.close()
            raise


def _handler(proxy: FaultProxy) -> type[BaseHTTPRequestHandler]:
    class Handler(QuietHandler, BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _relay(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            fault = proxy.fault(self.command, self.path)
            if fault.status:
                status = {"kind": "Status", "code": fault.status, "reason": "Fault", "message": "as the test wants"}
                self._answer(fault.status, json.dumps(status).encode())
                return
            headers = {name: self.headers[name] for name in PASSED_ON if name in self.headers}
            try:
                upstream, answer = proxy.ask(self.command, self.path, body, headers)
                with closing(upstream):
                    self._pass_on(answer, fault)
            except (OSError, http.client.HTTPException):
                self.close_connection = True  # one side has disconnected

        def _pass_on(self, answer: http.client.HTTPResponse, fault: Fault) -> None:
            time.sleep(fault.delay_s)
            if fault.swallow:
                answer.read()
                self.close_connection = True
            elif "watch=true" in self.path and answer.status == 200:
                self._stream(answer)
            else:
                self._answer(answer.status, answer.read(), answer.headers.get("Retry-After"))

        def _answer(self, status: int, body: bytes, retry_after: str | None = None) -> None:
            self.send_response(status)
            if retry_after:
                self.send_header("Retry-After", retry_after)
            self.send_header("Content-Length", str(len(body)))
            try:
                self.end_headers()
                self.wfile.write(body)
            except OSError:
                self.close_connection = True  # the client has given up

        def _stream(self, answer: http.client.HTTPResponse) -> None:
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.close_connection = True
            while chunk := answer.read1(1 << 16):
                if proxy.is_mute:
                    self._be_silent()
                    return
                self.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
            self.wfile.write(b"0\r\n\r\n")

        def _be_silent(self) -> None:
            """Stay silent until the client disconnects."""
            while not select.select([self.connection], [], [], 1.0)[0]:
                continue

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _relay  # noqa: N815  # the names are http.server's

    return Handler
