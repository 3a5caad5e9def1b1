"""Connection: sends one request to an Ebbtide service, patiently where that is safe, and reads the answer.

Server-sent events as a client reads them: message by message, over as many connections as it takes.

Calls: what the client's methods of one noun share, the connection that they are sent over.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import httpx

JsonObject = dict[str, Any]

IDEMPOTENT_METHODS = frozenset({"GET", "DELETE"})
IF_MATCH_HEADER = "If-Match"
RETRYABLE_STATUSES = frozenset({429, 502, 503, 504})
RETRY_DELAY_S_MAX = 10.0
STREAM_READ_TIMEOUT_S = 45.0
"""Three heartbeats of a stream."""


@dataclass(frozen=True, slots=True)
class FieldError:
    """One field of a request that the service refused."""

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
    """No usable answer came: nobody listens, the connection broke, it took too long, or it was not ours."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """`attempts` in all, with a pause before the second that doubles before each later one, up to 10 s."""

    attempts: int = 3
    delay_s: float = 0.2
    sleep: Callable[[float], None] = time.sleep


class _TaggedObject(JsonObject):
    """An answer, and the ETag that came with it."""

    def __init__(self, document: JsonObject, etag: str) -> None:
        super().__init__(document)
        self.etag = etag


def etag_of(view: Mapping[str, object]) -> str:
    """The ETag of a job, pool, node or queue, as a method of the client has given it: what `if_match` takes.

    Raises:
        ValueError: it came without one, or is a copy.
    """
    if not isinstance(view, _TaggedObject) or not view.etag:
        raise ValueError("view: it has no ETag; allowed: a job, pool, node or queue just as the client has given it")
    return view.etag


class Connection:
    """Sends requests to one service.

    A request that changes nothing when it is repeated (GET, DELETE, or one with an idempotency key) is tried again
    after a broken connection or an answer that says "later"; every other request is sent once, also one with If-Match:
    that has to fail where its first attempt was obeyed.
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
        """Raises ValueError for a URL that is not http or https, and for a token that cannot be sent."""
        if not token.isascii() or any(mark.isspace() for mark in token):
            raise ValueError("token: got one with blanks or other than ASCII characters; allowed: ebk_... or a JWT")
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url: {url!r} must start with http:// or https://")
        self.url = url.rstrip("/")
        self.retries = retries
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            self._http = httpx.Client(base_url=self.url, timeout=timeout_s, transport=transport, headers=headers)
        except httpx.InvalidURL as wrong:
            raise ValueError(f"url: {url!r} is not a URL: {wrong}") from None

    def close(self) -> None:
        self._http.close()

    def list_items(self, path: str, *, limit: int | None = None, query: Mapping[str, str]) -> Iterator[Any]:
        """The rows of a list, page by page; empty values of `query` are left out."""
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
        query: Mapping[str, str] | None = None,
        key: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """The JSON object that the service answers with (see `api`); empty for an answer without a body.

        Raises:
            ProblemError: the service refused.
            UnreachableError: no usable answer came.
        """
        answer = self._send(method, path, json=json, query=query, key=key, headers=headers)
        if answer.is_error:
            raise _to_problem_error(answer)
        if not answer.content:
            return {}
        document = _read_json(answer)
        if not isinstance(document, dict):
            raise UnreachableError(f"{self.url}{path} did not answer with a JSON object: is this an Ebbtide service?")
        return _TaggedObject(document, answer.headers.get("ETag", ""))

    @contextmanager
    def stream_lines(self, path: str, *, query: Mapping[str, str], last_id: str) -> Iterator[Iterator[str]]:
        """The lines of a stream of server-sent events, after the message of that id.

        Raises:
            ProblemError: the service refused.
            httpx.TransportError: the connection broke, or was silent for longer than a living service is.
        """
        headers = {"Accept": "text/event-stream", **({"Last-Event-ID": last_id} if last_id else {})}
        patience = httpx.Timeout(self._http.timeout.connect, read=STREAM_READ_TIMEOUT_S)
        with self._http.stream("GET", path, params=query, headers=headers, timeout=patience) as answer:
            if answer.is_error:
                answer.read()
                raise _to_problem_error(answer)
            yield answer.iter_lines()

    def _send(
        self,
        method: str,
        path: str,
        *,
        json: Mapping[str, Any] | None,
        query: Mapping[str, str] | None,
        key: str,
        headers: Mapping[str, str] | None,
    ) -> httpx.Response:
        headers = {**(headers or {}), **({"Idempotency-Key": key} if key else {})}
        attempts = (
            self.retries.attempts if key or (method in IDEMPOTENT_METHODS and IF_MATCH_HEADER not in headers) else 1
        )
        for attempt in range(1, attempts + 1):
            last = attempt == attempts
            pause_s = self.retries.delay_s * 2.0 ** (attempt - 1)
            try:
                answer = self._http.request(method, path, json=json, params=query, headers=headers)
            except httpx.TransportError as broken:
                if last:
                    raise UnreachableError(f"{self.url} does not answer: {broken or type(broken).__name__}") from broken
            else:
                if last or answer.status_code not in RETRYABLE_STATUSES:
                    return answer
                pause_s = max(pause_s, _retry_after_s(answer))
            self.retries.sleep(min(pause_s, RETRY_DELAY_S_MAX))
        raise AssertionError("the last attempt returns or raises")


def _read_json(response: httpx.Response) -> Any:
    """The body as JSON; None where it is something else."""
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


RECONNECTS_MAX = 10
"""So many connections in a row that bring nothing are the end: with their pauses, most of a minute."""


@dataclass(frozen=True, slots=True)
class ServerSentEvent:
    """`id` is where to go on from; `kind` is `message` unless the service says otherwise."""

    id: str
    kind: str
    data: JsonObject


def follow_stream(connection: Connection, path: str, query: Mapping[str, str]) -> Iterator[ServerSentEvent]:
    """Messages until one of kind `end`, each once, whatever becomes of the connection.

    Raises:
        ProblemError: the service refused.
        UnreachableError: it did not answer for a while.
    """
    last_id, failures, said = "", 0, "the stream ends at once"
    while True:
        try:
            with connection.stream_lines(path, query=query, last_id=last_id) as lines:
                for message in _parse_events(lines):
                    last_id, failures = message.id, 0
                    yield message
                    if message.kind == "end":
                        return
        except httpx.TransportError as broken:
            said = str(broken) or type(broken).__name__
        except ProblemError as problem:
            if problem.status not in RETRYABLE_STATUSES:
                raise
            said = str(problem)
        failures += 1
        if failures >= RECONNECTS_MAX:
            raise UnreachableError(f"{connection.url} does not answer: {said}")
        connection.retries.sleep(min(connection.retries.delay_s * 2.0 ** (failures - 1), RETRY_DELAY_S_MAX))


def _parse_events(lines: Iterable[str]) -> Iterator[ServerSentEvent]:
    fields: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(": ")
        if line and name:
            fields[name] = value
        elif not line:
            if "data" in fields:
                yield ServerSentEvent(fields.get("id", ""), fields.get("event", "message"), json.loads(fields["data"]))
            fields = {}


class ClientMethods:
    """Base of the groups of methods that make up `api.client.Client`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection


def job_path(job_id: str) -> str:
    return f"/v1/jobs/{quote(job_id, safe='')}"


def if_match_headers(if_match: str) -> dict[str, str]:
    """The header that has a change made only where this is still the ETag of what it changes; else a problem of 412."""
    return {IF_MATCH_HEADER: if_match} if if_match else {}
