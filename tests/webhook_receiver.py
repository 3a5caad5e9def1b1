"""A webhook receiver on loopback that records messages and answers as a test specifies."""

from __future__ import annotations

import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.http_server import LoopbackServer, QuietHandler

PATIENCE_S = 240.0


@dataclass(frozen=True, slots=True)
class Answer:
    status: int = 204
    headers: dict[str, str] = field(default_factory=dict)
    after_s: float = 0.0
    body: str = ""


@dataclass(frozen=True, slots=True)
class Received:
    headers: dict[str, str]
    body: bytes

    @property
    def document(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.body)
        return document


class Receiver:
    """`answer` maps the number of a request, from 0, to the response.

    Every request is recorded before it is answered.
    """

    def __init__(self) -> None:
        self.answer: Callable[[int], Answer] = lambda number: Answer()
        self.received: list[Received] = []
        self._lock = threading.Lock()
        self.url = ""

    def take(self, received: Received) -> Answer:
        with self._lock:
            self.received.append(received)
            return self.answer(len(self.received) - 1)

    @property
    def numbers(self) -> list[int]:
        """Return the event numbers in order of arrival."""
        return [delivery.document["event_number"] for delivery in list(self.received)]


@contextmanager
def receiver(tls: ssl.SSLContext | None = None) -> Iterator[Receiver]:
    made = Receiver()

    class Handler(QuietHandler, BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            answer = made.take(Received(dict(self.headers.items()), body))
            time.sleep(answer.after_s)
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            content = answer.body.encode()
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    with LoopbackServer(Handler, tls) as server:
        made.url = f"{server.url}/hook"
        yield made


def wait_for(reached: Callable[[], bool], describe: Callable[[], object] = lambda: "") -> None:
    limit_s = time.monotonic() + PATIENCE_S
    while not reached():
        assert time.monotonic() < limit_s, describe()
        time.sleep(0.02)
