"""An HTTP server on loopback with scripted responses, for failures that a healthy API server never shows."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler

from scheduler.kubernetes.api_objects import Object
from tests.http_server import LoopbackServer, QuietHandler


@dataclass(frozen=True, slots=True)
class Answer:
    """A scripted response. `cut` closes the connection after reading the request."""

    status: int = 200
    body: Object | str = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    after_s: float = 0.0
    cut: bool = False


class ScriptedServer:
    """Responds in the order of `script` while it is `running`. `heard` records the requests as "METHOD path"."""

    def __init__(self, *script: Answer) -> None:
        self.heard: list[str] = []
        self.tokens: list[str | None] = []
        self.url = ""
        self._script = iter(script)

    @contextmanager
    def running(self) -> Iterator[ScriptedServer]:
        with LoopbackServer(self._handler()) as server:
            self.url = server.url
            yield self

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        script = self

        class Handler(QuietHandler, BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _answer(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                script.heard.append(f"{self.command} {self.path.partition('?')[0]}")
                script.tokens.append(self.headers.get("Authorization"))
                answer = next(script._script)
                time.sleep(answer.after_s)
                if answer.cut:
                    self.close_connection = True
                    return
                body = answer.body if isinstance(answer.body, str) else json.dumps(answer.body)
                self.send_response(answer.status)
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body.encode())))
                self.end_headers()
                self.wfile.write(body.encode())

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _answer  # noqa: N815  # the names are http.server's

        return Handler
