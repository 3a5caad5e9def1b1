"""The connection of `AsyncClient`: `Connection`, on an event loop of asyncio or trio."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import httpx
import httpx_sse
from tenacity import AsyncRetrying

from ebbtide.client.connection import (
    STREAM_READ_TIMEOUT_S,
    RetryPolicy,
    Server,
    StreamPosition,
    is_plain_http_refusal,
)
from ebbtide.client.requests import Pages, Request, Stream, next_cursor
from ebbtide.client.responses import ProblemError, read_answer, to_problem_error
from ebbtide.client.server_url import suggest_scheme

Answer = TypeVar("Answer")
Item = TypeVar("Item")


class AsyncConnection:
    """HTTP connection to one service. Its methods do what those of `Connection` do."""

    def __init__(
        self, server: Server, *, timeout_s: float, retries: RetryPolicy, transport: httpx.AsyncBaseTransport | None
    ) -> None:
        self._server, self._retries = server, retries
        self._http = httpx.AsyncClient(timeout=timeout_s, transport=transport, **server.to_options())

    async def close(self) -> None:
        await self._http.aclose()

    async def send(self, request: Request[Answer]) -> Answer:
        response = await self._fetch(request)
        if response.status_code in request.results:
            return request.results[response.status_code]
        return request.read(read_answer(response))

    async def collect(self, pages: Pages[Item]) -> list[Item]:
        return [item async for item in self._list(pages)]

    def iterate(self, items: Pages[Item] | Stream[Item]) -> AsyncIterator[Item]:
        return self._follow(items) if isinstance(items, Stream) else self._list(items)

    async def _list(self, pages: Pages[Item]) -> AsyncIterator[Item]:
        cursor = ""
        while True:
            page = await self.send(pages.request_page(cursor))
            for item in pages.read_items(page):
                yield item
            if not (cursor := next_cursor(page)):
                return

    async def _follow(self, stream: Stream[Item]) -> AsyncIterator[Item]:
        position = StreamPosition(self._server, self._retries)
        while True:
            try:
                async with self._open_stream(stream, position) as events:
                    async for event in events:
                        if (read := position.advance(event)) and (item := stream.read(read)) is not None:
                            yield item
                        if position.ended:
                            return
            except (httpx.TransportError, ProblemError) as error:
                position.note_failure(error)
            await anyio.sleep(position.compute_delay_s())

    @asynccontextmanager
    async def _open_stream(
        self, stream: Stream[Any], position: StreamPosition
    ) -> AsyncIterator[AsyncIterator[httpx_sse.ServerSentEvent]]:
        headers, query = position.choose_headers(), stream.query
        timeout = httpx.Timeout(self._http.timeout.connect, read=STREAM_READ_TIMEOUT_S)
        async with self._http.stream("GET", stream.path, params=query, headers=headers, timeout=timeout) as response:
            if response.is_error:
                await response.aread()
                raise to_problem_error(response)
            yield httpx_sse.EventSource(response).aiter_sse()

    async def _fetch(self, request: Request[Any]) -> httpx.Response:
        async def send_once() -> httpx.Response:
            content = None if request.open_body is None else _read_in_thread(request.open_body())
            return await self._http.request(content=content, **request.to_options())

        retrying = AsyncRetrying(sleep=anyio.sleep, **self._retries.choose_options(request))
        try:
            response: httpx.Response = await retrying(send_once)
        except httpx.TransportError as error:
            advice = await anyio.to_thread.run_sync(suggest_scheme, self._server.url)
            raise self._server.unreachable(str(error) or type(error).__name__, advice) from error
        if is_plain_http_refusal(response):
            advice = await anyio.to_thread.run_sync(suggest_scheme, self._server.url)
            if advice:
                raise self._server.unreachable("", advice)
        return response


async def _read_in_thread(body: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the chunks of a body whose source, for example a file, may block."""
    while chunk := await anyio.to_thread.run_sync(next, body, b""):
        yield chunk
