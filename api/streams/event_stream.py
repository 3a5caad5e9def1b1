"""Server-sent events (HTML Living Standard, 9.2) over ASGI: the frames, and the response that sends them.

Each stream waits for its own socket alone: what it has not sent it does not read, so that a slow reader costs nobody
memory or time.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

if TYPE_CHECKING:
    from api.streams.streams import Streams

logger = logging.getLogger(__name__)

MEDIA_TYPE = "text/event-stream"
HEARTBEAT = b": still here\n\n"
RETRY = b"retry: 1000\n\n"
"""A client that has lost its stream comes back after so many milliseconds."""
_FAREWELL_S = 1.0


def frame(document: Mapping[str, Any], *, number: object, event: str = "") -> bytes:
    """One event. `event` is its type where that is not `message`; JSON of one line needs no other escape."""
    kind = f"event: {event}\n" if event else ""
    data = json.dumps(document, separators=(",", ":"))
    return f"id: {number}\n{kind}data: {data}\n\n".encode()


class EventStream(Response):
    """Sends the chunks until they end, the client goes, the service ends, the socket takes nothing for a while, the
    token of who asked is good no more, or it has lived for long enough: who asks then comes back with its last id."""

    media_type = MEDIA_TYPE

    def __init__(self, chunks: AsyncGenerator[bytes], streams: Streams) -> None:
        self._chunks = chunks
        self._streams = streams
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises ProblemError (503, 429) before it sends anything where there are too many streams already."""
        asker = _asker(scope)
        self._streams.require_room(asker)
        sending = asyncio.create_task(self._send(send))
        leaving = asyncio.create_task(_gone(receive))
        refusing = asyncio.create_task(self._refused(scope))
        tasks: tuple[asyncio.Task[None], ...] = (sending, leaving, refusing)
        self._streams.add(sending, asker)
        try:
            lifetime_s = self._streams.pace.lifetime_s
            await asyncio.wait(tasks, timeout=lifetime_s, return_when=asyncio.FIRST_COMPLETED)
            is_gone = leaving.done()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        failure = None if sending.cancelled() else sending.exception()
        if isinstance(failure, TimeoutError):
            logger.info("a stream of %s ends: its reader takes nothing", scope["path"])
        elif failure is not None:
            raise failure
        elif not is_gone:
            with suppress(TimeoutError):
                async with asyncio.timeout(_FAREWELL_S):
                    await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._chunks) as chunks:
            async for chunk in chunks:
                async with asyncio.timeout(self._streams.pace.stall_s):
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def _refused(self, scope: Scope) -> None:
        """Until the token is good no more; for ever where nobody had to say who asks."""
        is_good = scope.get("state", {}).get("is_good")
        while is_good is None or await is_good():
            await asyncio.sleep(self._streams.pace.token_s)


def _asker(scope: Scope) -> str:
    """Whose stream it is; empty where nobody has to say."""
    state = scope.get("state", {})
    principal = state.get("principal")
    return "" if principal is None or "is_good" not in state else principal.token_id or principal.name


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
