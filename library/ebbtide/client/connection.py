"""The client's HTTP layer: requests with retries, event streams that reconnect, and the errors that both raise."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import httpx
import httpx_sse
from tenacity import RetryCallState, Retrying, retry_if_exception_type, retry_if_result, stop_after_attempt

from ebbtide.client.server_url import suggest_scheme

JsonObject = dict[str, Any]

IDEMPOTENT_METHODS = frozenset({"GET", "HEAD", "PUT", "DELETE"})
IF_MATCH_HEADER = "If-Match"
RETRYABLE_STATUSES = frozenset({429, 502, 503, 504})
RETRY_DELAY_S_MAX = 10.0
RECONNECTS_MAX = 10
"""Consecutive connections without an event after which a stream fails: with their delays, most of a minute."""
STREAM_READ_TIMEOUT_S = 45.0
"""Three heartbeats of a stream."""


@dataclass(frozen=True, slots=True)
class FieldError:
    """One field of a request that the service rejected."""

    field: str
    message: str


@dataclass(eq=False)
class ProblemError(Exception):
    """The service answered with a problem (RFC 9457). `status` is the HTTP status."""

    status: int
    type: str
    title: str
    detail: str = ""
    errors: tuple[FieldError, ...] = ()

    def __str__(self) -> str:
        return self.detail or self.title or f"HTTP {self.status}"


class UnreachableError(Exception):
    """No usable response: connection refused or broken, timeout, or a server that is not an Ebbtide service."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """`attempts` in total. The delay before the second is `delay_s`; it doubles for each later one, up to 10 s."""

    attempts: int = 3
    delay_s: float = 0.2
    sleep: Callable[[float], None] = time.sleep

    def compute_delay_s(self, attempts: int) -> float:
        """Return the delay after that many failed attempts."""
        return float(min(self.delay_s * 2.0 ** (attempts - 1), RETRY_DELAY_S_MAX))


class _TaggedObject(JsonObject):
    """A JSON object with the ETag of its response."""

    def __init__(self, document: JsonObject, etag: str) -> None:
        super().__init__(document)
        self.etag = etag


def etag_of(view: Mapping[str, object]) -> str:
    """Return the ETag of a job, pool, node or queue that the client returned. Pass it as `if_match`.

    Raises:
        ValueError: `view` has no ETag, for example because it is a copy.
    """
    if not isinstance(view, _TaggedObject) or not view.etag:
        raise ValueError("view: it has no ETag. Pass a job, pool, node or queue exactly as the client returned it")
    return view.etag


class Connection:
    """HTTP connection to one service.

    GET, HEAD, PUT, DELETE and requests with an idempotency key are retried after a broken connection or a status that
    asks for a retry. Other requests are sent once, and so are requests with If-Match: after a lost response, a retry
    would fail.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str = "",
        timeout_s: float,
        retries: RetryPolicy,
        transport: httpx.BaseTransport | None,
    ) -> None:
        """Raises ValueError if the URL is not http or https, or has `/v1`, or if the token does not fit in a header."""
        if not token.isascii() or any(character.isspace() for character in token):
            raise ValueError("token: it has blanks or non-ASCII characters. Pass an API token (ebk_...) or a JWT")
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url: {url!r} must start with http:// or https://")
        self.url = url.rstrip("/")
        if self.url.endswith("/v1"):
            raise ValueError(
                f"url: {url!r} must not have /v1, which is added to it. Use {self.url.removesuffix('/v1')}"
            )
        self.retries = retries
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            self._http = httpx.Client(base_url=self.url, timeout=timeout_s, transport=transport, headers=headers)
        except httpx.InvalidURL as error:
            raise ValueError(f"url: {url!r} is not a URL: {error}") from None

    def close(self) -> None:
        self._http.close()

    def list_items(self, path: str, *, limit: int | None = None, query: Mapping[str, str]) -> Iterator[Any]:
        """Yield the items of a list, page by page. Empty values of `query` are not sent."""
        parameters = {name: value for name, value in query.items() if value}
        if limit is not None:
            parameters["limit"] = str(limit)
        while True:
            page = self.request("GET", path, query=parameters)
            yield from page["items"]
            if not page.get("next"):
                return
            parameters["cursor"] = str(page["next"])

    def request(
        self,
        method: str,
        path: str,
        *,
        json: Mapping[str, Any] | None = None,
        open_body: Callable[[], Iterator[bytes]] | None = None,
        query: Mapping[str, str] | None = None,
        key: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """Return the JSON object of the response; an empty one if the response has no body.

        `open_body` returns a body other than JSON. It is called for each attempt.

        Raises:
            ProblemError: the service rejected the request.
            UnreachableError: no usable response came.
        """
        headers = {**(headers or {}), **({"Idempotency-Key": key} if key else {})}
        response = self._send(
            method, path, json=json, open_body=open_body, query=query, headers=headers, is_keyed=bool(key)
        )
        if response.is_error:
            raise _to_problem_error(response)
        if response.is_redirect:
            raise UnreachableError(
                f"{self.url}{path} redirects to {response.headers['Location']}. Use that server's URL"
            )
        if not response.content:
            return {}
        document = _read_json(response)
        if not isinstance(document, dict):
            raise UnreachableError(f"{self.url}{path} did not answer with a JSON object: is this an Ebbtide service?")
        return _TaggedObject(document, response.headers.get("ETag", ""))

    @contextmanager
    def open_stream(
        self, path: str, *, query: Mapping[str, str], last_id: str
    ) -> Iterator[Iterator[httpx_sse.ServerSentEvent]]:
        """Open a stream of server-sent events that continues after the event `last_id`.

        Raises:
            ProblemError: the service rejected the request.
            httpx.TransportError: The connection broke, or was silent for STREAM_READ_TIMEOUT_S.
        """
        headers = {"Accept": "text/event-stream", **({"Last-Event-ID": last_id} if last_id else {})}
        timeout = httpx.Timeout(self._http.timeout.connect, read=STREAM_READ_TIMEOUT_S)
        with self._http.stream("GET", path, params=query, headers=headers, timeout=timeout) as response:
            if response.is_error:
                response.read()
                raise _to_problem_error(response)
            yield httpx_sse.EventSource(response).iter_sse()

    def _send(
        self,
        method: str,
        path: str,
        *,
        json: Mapping[str, Any] | None,
        open_body: Callable[[], Iterator[bytes]] | None,
        query: Mapping[str, str] | None,
        headers: Mapping[str, str],
        is_keyed: bool,
    ) -> httpx.Response:
        may_retry = is_keyed or (method in IDEMPOTENT_METHODS and IF_MATCH_HEADER not in headers)
        retrying = Retrying(
            stop=stop_after_attempt(self.retries.attempts if may_retry else 1),
            wait=self._compute_delay_s,
            retry=retry_if_exception_type(httpx.TransportError) | retry_if_result(_asks_for_retry),
            sleep=self.retries.sleep,
            retry_error_callback=_last_outcome,
        )

        def send_once() -> httpx.Response:
            content = None if open_body is None else open_body()
            return self._http.request(method, path, json=json, content=content, params=query, headers=headers)

        try:
            response: httpx.Response = retrying(send_once)
        except httpx.TransportError as error:
            reason = f"{self.url} does not answer: {error or type(error).__name__}"
            raise UnreachableError(f"{reason}{suggest_scheme(self.url)}") from error
        is_page = response.status_code == httpx.codes.BAD_REQUEST and _read_json(response) is None
        if is_page and (advice := suggest_scheme(self.url)):  # TLS servers answer plain HTTP so
            raise UnreachableError(f"{self.url} does not answer{advice}")
        return response

    def _compute_delay_s(self, state: RetryCallState) -> float:
        delay_s = self.retries.compute_delay_s(state.attempt_number)
        if state.outcome is None or state.outcome.failed:
            return delay_s
        return min(max(delay_s, _retry_after_s(state.outcome.result())), RETRY_DELAY_S_MAX)


def _asks_for_retry(response: httpx.Response) -> bool:
    return response.status_code in RETRYABLE_STATUSES


def _last_outcome(state: RetryCallState) -> Any:
    assert state.outcome is not None
    return state.outcome.result()


def _read_json(response: httpx.Response) -> Any:
    """Return the body as JSON, or None if it is something else."""
    try:
        return response.json()
    except ValueError:
        return None


def _retry_after_s(response: httpx.Response) -> float:
    value = response.headers.get("Retry-After", "")
    return float(value) if value.isdigit() else 0.0


def _to_problem_error(response: httpx.Response) -> ProblemError:
    document = _read_json(response)
    if not isinstance(document, dict):
        document = {}
    return ProblemError(
        status=response.status_code,
        type=str(document.get("type", "about:blank")),
        title=str(document.get("title", response.reason_phrase)),
        detail=str(document.get("detail", "")),
        errors=tuple(_to_field_error(item) for item in document.get("errors", ())),
    )


def _to_field_error(item: Any) -> FieldError:
    if not isinstance(item, dict):
        return FieldError("", str(item))
    return FieldError(str(item.get("field", "")), str(item.get("message", "")))


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """One event of a stream. `id` is the position to continue from; `kind` is `message` unless the service sets it."""

    id: str
    kind: str
    data: JsonObject


def follow_stream(connection: Connection, path: str, query: Mapping[str, str]) -> Iterator[StreamEvent]:
    """Yield each event once, up to and including one of kind `end`. Reconnects when the connection breaks.

    Raises:
        ProblemError: the service rejected the request.
        UnreachableError: RECONNECTS_MAX connections in a row brought no event.
    """
    last_id, failures, reason = "", 0, "the stream ends at once"
    while True:
        try:
            with connection.open_stream(path, query=query, last_id=last_id) as events:
                for event in events:
                    if not event.data:  # a heartbeat or a `retry` field
                        continue
                    last_id, failures = event.id, 0
                    yield StreamEvent(event.id, event.event, json.loads(event.data))
                    if event.event == "end":
                        return
        except httpx.TransportError as error:
            reason = str(error) or type(error).__name__
        except ProblemError as problem:
            if problem.status not in RETRYABLE_STATUSES:
                raise
            reason = str(problem)
        failures += 1
        if failures >= RECONNECTS_MAX:
            raise UnreachableError(f"{connection.url} does not answer: {reason}")
        connection.retries.sleep(connection.retries.compute_delay_s(failures))


class ClientMethods:
    """Base of the method groups that make up `ebbtide.client.Client`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection


def job_path(job_id: str) -> str:
    return f"/v1/jobs/{quote(job_id, safe='')}"


def if_match_headers(if_match: str) -> dict[str, str]:
    """Return the header that makes a change fail with 412 unless `if_match` is still the resource's ETag."""
    return {IF_MATCH_HEADER: if_match} if if_match else {}
