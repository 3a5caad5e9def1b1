"""Requests as data: what a method of the client sends and how it reads the answer, without any input or output.

A method returns one of three descriptions. `Request` stands for one request and its answer, `Pages` for a list that the
service returns page by page, `Stream` for server-sent events. `ebbtide.client.connection` performs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast
from urllib.parse import quote

from ebbtide.client.responses import JsonObject

Answer = TypeVar("Answer")
Item = TypeVar("Item")

IDEMPOTENT_METHODS = frozenset({"GET", "HEAD", "PUT", "DELETE"})
IF_MATCH_HEADER = "If-Match"


def discard(_answer: JsonObject) -> None:
    """Read nothing from the answer."""


def _keep(answer: Any) -> Any:
    return answer


@dataclass(frozen=True)
class Request(Generic[Answer]):
    """One request. `read` turns the JSON object of the answer into the result.

    `open_body` returns a body other than JSON; it is called for each attempt. `key` is the idempotency key.
    `results` has results for statuses that are no problem to the caller.
    """

    method: str
    path: str
    json: Mapping[str, Any] | None = None
    open_body: Callable[[], Iterator[bytes]] | None = None
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    key: str = ""
    read: Callable[[JsonObject], Answer] = _keep
    results: Mapping[int, Answer] = field(default_factory=dict)

    def may_retry(self) -> bool:
        """Return whether the request may be sent again when the fate of the first attempt is unknown.

        With If-Match it may not: if only the response was lost, the retry would fail.
        """
        return bool(self.key) or (self.method in IDEMPOTENT_METHODS and IF_MATCH_HEADER not in self.headers)

    def to_options(self) -> dict[str, Any]:
        """Return the arguments with which httpx sends the request, except for `content`."""
        return {
            "method": self.method,
            "url": self.path,
            "json": self.json,
            "params": self.query or None,
            "headers": {**self.headers, **({"Idempotency-Key": self.key} if self.key else {})},
        }


@dataclass(frozen=True)
class Pages(Generic[Item]):
    """A list that the service returns page by page. Empty values of `query` are not sent. `limit`: page size."""

    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    limit: int | None = None

    def request_page(self, cursor: str = "") -> Request[JsonObject]:
        """Return the request for the first page, or for the one at `cursor`."""
        size = "" if self.limit is None else str(self.limit)
        parameters = {**self.query, "limit": size, "cursor": cursor}
        return Request("GET", self.path, query={name: value for name, value in parameters.items() if value})

    def read_items(self, page: JsonObject) -> list[Item]:
        return cast("list[Item]", page["items"])


def next_cursor(page: JsonObject) -> str:
    """Return the cursor of the page after this one; empty if this is the last."""
    return str(page.get("next") or "")


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """One event of a stream. `id` is the position to continue from; `kind` is `message` unless the service sets it."""

    id: str
    kind: str
    data: JsonObject


@dataclass(frozen=True)
class Stream(Generic[Item]):
    """A stream of server-sent events up to one of kind `end`. `read` returns None for an event that is no item."""

    path: str
    read: Callable[[StreamEvent], Item | None]
    query: Mapping[str, str] = field(default_factory=dict)


def job_path(job_id: str) -> str:
    return f"/v1/jobs/{quote(job_id, safe='')}"


def if_match_headers(if_match: str) -> dict[str, str]:
    """Return the header that makes a change fail with 412 unless `if_match` is still the resource's ETag."""
    return {IF_MATCH_HEADER: if_match} if if_match else {}
