"""Times every request under its route's template; a stream until it begins."""

from __future__ import annotations

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from scheduler.telemetry.metrics import record_request

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class RequestTiming:
    """ASGI middleware. Paths that lead nowhere share one label, and so do invented methods."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_s = time.perf_counter()
        status, begun_s = 500, None

        async def note_status(message: Message) -> None:
            nonlocal status, begun_s
            if message["type"] == "http.response.start":
                status = message["status"]
                is_stream = any(value.startswith(b"text/event-stream") for _, value in message["headers"])
                begun_s = time.perf_counter() if is_stream else None
            await send(message)

        try:
            await self._app(scope, receive, note_status)
        finally:
            method = scope["method"] if scope["method"] in _METHODS else "other"
            route = getattr(scope.get("route"), "path", "unmatched")
            seconds = (begun_s or time.perf_counter()) - started_s
            record_request(method=method, route=route, status=status, seconds=seconds)
