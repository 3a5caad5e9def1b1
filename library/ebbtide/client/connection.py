"""The connection of `Client`, and the rules that both connections share: retries, and streams that reconnect."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
import httpx_sse
from tenacity import RetryCallState, Retrying, retry_if_exception_type, retry_if_result, stop_after_attempt

from ebbtide.client.requests import Pages, Request, Stream, StreamEvent, next_cursor
from ebbtide.client.responses import ProblemError, UnreachableError, read_answer, read_json, to_problem_error
from ebbtide.client.server_url import suggest_scheme

Answer = TypeVar("Answer")
Item = TypeVar("Item")

RETRYABLE_STATUSES = frozenset({429, 502, 503, 504})
RETRY_DELAY_S_MAX = 10.0
RECONNECTS_MAX = 10
"""Consecutive connections without an event after which a stream fails: with their delays, most of a minute."""
STREAM_READ_TIMEOUT_S = 45.0
"""Three heartbeats of a stream."""
_TLS_LIBRARY_WORDS = re.compile(r"\[SSL(: \w+)?\] | \(_ssl\.c:\d+\)")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """`attempts` in total. The delay before the second is `delay_s`; it doubles for each later one, up to 10 s.

    `Client` waits with `sleep`. `AsyncClient` waits in its event loop.
    """

    attempts: int = 3
    delay_s: float = 0.2
    sleep: Callable[[float], None] = time.sleep

    def compute_delay_s(self, attempts: int) -> float:
        """Return the delay after that many failed attempts."""
        return float(min(self.delay_s * 2.0 ** (attempts - 1), RETRY_DELAY_S_MAX))

    def choose_options(self, request: Request[Any]) -> dict[str, Any]:
        """Return the options of tenacity for this request.

        It is retried after a broken connection or a status that asks for a retry, if it may be sent twice.
        """
        return {
            "stop": stop_after_attempt(self.attempts if request.may_retry() else 1),
            "wait": self._compute_wait_s,
            "retry": retry_if_exception_type(httpx.TransportError) | retry_if_result(_asks_for_retry),
            "retry_error_callback": _last_outcome,
        }

    def _compute_wait_s(self, state: RetryCallState) -> float:
        delay_s = self.compute_delay_s(state.attempt_number)
        if state.outcome is None or state.outcome.failed:
            return delay_s
        return min(max(delay_s, _retry_after_s(state.outcome.result())), RETRY_DELAY_S_MAX)


def _asks_for_retry(response: httpx.Response) -> bool:
    return response.status_code in RETRYABLE_STATUSES


def _last_outcome(state: RetryCallState) -> Any:
    assert state.outcome is not None
    return state.outcome.result()


def _retry_after_s(response: httpx.Response) -> float:
    value = response.headers.get("Retry-After", "")
    return float(value) if value.isdigit() else 0.0


@dataclass(frozen=True, slots=True)
class Server:
    """Address and credential of one service, checked.

    Raises:
        ValueError: the URL is not http or https, or has `/v1`, or the token does not fit in a header.
    """

    url: str
    token: str = ""

    def __post_init__(self) -> None:
        if not self.token.isascii() or any(character.isspace() for character in self.token):
            raise ValueError("token: it has blanks or non-ASCII characters. Pass an API token (ebk_...) or a JWT")
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url: {self.url!r} must start with http:// or https://")
        if (root := self.url.rstrip("/")).endswith("/v1"):
            raise ValueError(
                f"url: {self.url!r} must not have /v1, which is added to it. Use {root.removesuffix('/v1')}"
            )
        try:
            httpx.URL(self.url)
        except httpx.InvalidURL as error:
            raise ValueError(f"url: {self.url!r} is not a URL: {error}") from None

    def to_options(self) -> dict[str, Any]:
        """Return the options of the HTTP client."""
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        return {"base_url": self.url.rstrip("/"), "headers": headers}

    def unreachable(self, reason: object, advice: str = "") -> UnreachableError:
        """Return the error. Advice replaces the reason, which may be the words of a TLS library."""
        cause = "" if advice else _TLS_LIBRARY_WORDS.sub("", str(reason))
        return UnreachableError(f"{self.url.rstrip('/')} does not answer{f': {cause}' if cause else ''}", advice)


def is_plain_http_refusal(response: httpx.Response) -> bool:
    """Return whether a TLS server may have answered to plain HTTP."""
    return response.status_code == httpx.codes.BAD_REQUEST and read_json(response) is None


class StreamPosition:
    """Where a stream continues after its connection breaks, and when to give up."""

    def __init__(self, server: Server, retries: RetryPolicy) -> None:
        self._server, self._retries = server, retries
        self._failures, self._reason = 0, "the stream ends at once"
        self._last_id = ""
        self.ended = False

    def choose_headers(self) -> dict[str, str]:
        return {"Accept": "text/event-stream", **({"Last-Event-ID": self._last_id} if self._last_id else {})}

    def advance(self, event: httpx_sse.ServerSentEvent) -> StreamEvent | None:
        """Return the event with its data; None for a heartbeat or a `retry` field."""
        if not event.data:
            return None
        self._last_id, self._failures, self.ended = event.id, 0, event.event == "end"
        return StreamEvent(event.id, event.event, json.loads(event.data))

    def note_failure(self, error: Exception) -> None:
        """Remember why the connection ended. Raises the problem if the service rejected the request."""
        if isinstance(error, ProblemError) and error.status not in RETRYABLE_STATUSES:
            raise error
        self._reason = str(error) or type(error).__name__

    def compute_delay_s(self) -> float:
        """Return the delay before the next connection.

        Raises:
            UnreachableError: RECONNECTS_MAX connections in a row brought no event.
        """
        self._failures += 1
        if self._failures >= RECONNECTS_MAX:
            raise self._server.unreachable(self._reason)
        return self._retries.compute_delay_s(self._failures)


class Connection:
    """HTTP connection to one service."""

    def __init__(
        self, server: Server, *, timeout_s: float, retries: RetryPolicy, transport: httpx.BaseTransport | None
    ) -> None:
        self._server, self._retries = server, retries
        self._http = httpx.Client(timeout=timeout_s, transport=transport, **server.to_options())

    def close(self) -> None:
        self._http.close()

    def send(self, request: Request[Answer]) -> Answer:
        """Return the result of the request.

        Raises:
            ProblemError: the service rejected the request.
            UnreachableError: no usable response came.
        """
        response = self._fetch(request)
        if response.status_code in request.results:
            return request.results[response.status_code]
        return request.read(read_answer(response))

    def collect(self, pages: Pages[Item]) -> list[Item]:
        return list(self.iterate(pages))

    def iterate(self, items: Pages[Item] | Stream[Item]) -> Iterator[Item]:
        return self._follow(items) if isinstance(items, Stream) else self._list(items)

    def _list(self, pages: Pages[Item]) -> Iterator[Item]:
        cursor = ""
        while True:
            page = self.send(pages.request_page(cursor))
            yield from pages.read_items(page)
            if not (cursor := next_cursor(page)):
                return

    def _follow(self, stream: Stream[Item]) -> Iterator[Item]:
        position = StreamPosition(self._server, self._retries)
        while True:
            try:
                with self._open_stream(stream, position) as events:
                    for event in events:
                        if (read := position.advance(event)) and (item := stream.read(read)) is not None:
                            yield item
                        if position.ended:
                            return
            except (httpx.TransportError, ProblemError) as error:
                position.note_failure(error)
            self._retries.sleep(position.compute_delay_s())

    @contextmanager
    def _open_stream(
        self, stream: Stream[Any], position: StreamPosition
    ) -> Iterator[Iterator[httpx_sse.ServerSentEvent]]:
        headers, query = position.choose_headers(), stream.query
        timeout = httpx.Timeout(self._http.timeout.connect, read=STREAM_READ_TIMEOUT_S)
        with self._http.stream("GET", stream.path, params=query, headers=headers, timeout=timeout) as response:
            if response.is_error:
                response.read()
                raise to_problem_error(response)
            yield httpx_sse.EventSource(response).iter_sse()

    def _fetch(self, request: Request[Any]) -> httpx.Response:
        def send_once() -> httpx.Response:
            content = None if request.open_body is None else request.open_body()
            return self._http.request(content=content, **request.to_options())

        retrying = Retrying(sleep=self._retries.sleep, **self._retries.choose_options(request))
        try:
            response: httpx.Response = retrying(send_once)
        except httpx.TransportError as error:
            advice = suggest_scheme(self._server.url)
            raise self._server.unreachable(str(error) or type(error).__name__, advice) from error
        if is_plain_http_refusal(response) and (advice := suggest_scheme(self._server.url)):
            raise self._server.unreachable("", advice)
        return response
