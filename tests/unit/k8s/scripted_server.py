"""An HTTP server on loopback that answers as scripted: for what a healthy API server does not do."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from scheduler.k8s.objects import Object


@dataclass(frozen=True, slots=True)
class Answer:
    """`cut` closes the connection after the request was read, without a word."""

    status: int = 200
    body: Object | str = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    after_s: float = 0.0
    cut: bool = False


class ScriptedServer:
    """Answers in the order of `script`; `heard` is what was asked, "METHOD path"."""

    def __init__(self, *script: Answer) -> None:
        self.heard: list[str] = []
        self.tokens: list[str | None] = []
        self._script = iter(script)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @contextmanager
    def running(self) -> Iterator[ScriptedServer]:
        thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            thread.join()
            self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        script = self

        class Handler(BaseHTTPRequestHandler):
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

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _answer  # noqa: N815

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                """Say nothing."""

        return Handler
