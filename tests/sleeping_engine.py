"""An inference engine over a socket that has the sleep mode of vLLM, or fails as real ones do."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.http_server import LoopbackServer, QuietHandler


class SleepingEngine:
    """State and faults of one engine; change them at any time.

    Attributes:
        is_sleeping: what it is. With level 2, waking needs weights, `reload_weights` and the KV cache, in this order.
        order_s: time that it takes for an order before it answers.
        lies: it answers orders with 200 and does nothing.
        status: answers every request with this status, if set.
        redirect: location of a 307 for every request, if set.
        body: answers `/is_sleeping` with this text, if set.
        drips: sends the answer to `/is_sleeping` byte by byte without end.
    """

    def __init__(self) -> None:
        self.is_sleeping = False
        self.level = 0
        self.order_s = 0.0
        self.lies = False
        self.status = 0
        self.redirect = ""
        self.body = ""
        self.drips = False
        self.requests: list[str] = []
        self.port = 0
        self._awake_parts: list[str] = []
        self.closing = threading.Event()

    @property
    def orders(self) -> list[str]:
        """Return the requests that change something, in order."""
        return [request for request in list(self.requests) if request.startswith("POST")]

    def obey(self, path: str, document: Any) -> int:
        """Carry out a POST and return the status."""
        parts, query = urlsplit(path), parse_qs(urlsplit(path).query)
        self.closing.wait(self.order_s)
        if self.lies:
            return 200
        if parts.path == "/sleep":
            self.is_sleeping, self.level, self._awake_parts = True, int(query["level"][0]), []
        elif parts.path == "/wake_up" and self.level < 2:
            self.is_sleeping = False
        elif parts.path in ("/wake_up", "/collective_rpc"):
            self._awake_parts.append(document.get("method") or query.get("tags", [""])[0])
            self.is_sleeping = self._awake_parts[-3:] != ["weights", "reload_weights", "kv_cache"]
        else:
            return 404
        return 200


@contextmanager
def serving_engine() -> Iterator[SleepingEngine]:
    """Serve an engine on loopback."""
    engine = SleepingEngine()

    class Handler(QuietHandler, BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            engine.requests.append(f"GET {self.path}")
            if self._fail():
                return
            self.send_response(200)
            self.end_headers()
            if engine.drips:
                self._drip()
            else:
                text = engine.body or json.dumps({"is_sleeping": engine.is_sleeping})
                self.wfile.write(text.encode())

        def do_POST(self) -> None:
            engine.requests.append(f"POST {self.path}")
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if not self._fail():
                self.send_response(engine.obey(self.path, json.loads(body or "{}")))
                self.send_header("Content-Length", "0")
                self.end_headers()

        def _fail(self) -> bool:
            if engine.redirect or engine.status:
                self.send_response(307 if engine.redirect else engine.status)
                self.send_header("Location", engine.redirect or "/")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return True
            return False

        def _drip(self) -> None:
            try:
                while not engine.closing.is_set():
                    self.wfile.write(b" ")
                    time.sleep(0.02)
            except OSError:
                return  # the client has given up

    with LoopbackServer(Handler) as server:
        engine.port = int(server.address.rpartition(":")[2])
        try:
            yield engine
        finally:
            engine.closing.set()
