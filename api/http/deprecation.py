"""Deprecated routes: a decorator that announces the end of a route in every response of it.

A route of `/v1` keeps working for NOTICE_DAYS after it was deprecated. Until then its responses carry `Deprecation`
(RFC 9745), `Sunset` (RFC 8594) and a `Link` to what replaces it, and the OpenAPI document marks it as deprecated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from email.utils import format_datetime
from typing import Any, TypeVar

from starlette.types import Scope

NOTICE_DAYS = 180
"""Days for which a deprecated route keeps working, at least."""
HEADERS: dict[str, Any] = {
    "Deprecation": {
        "description": "Time of the deprecation, as `@` and seconds since 1970 (RFC 9745).",
        "schema": {"type": "string", "pattern": "^@[0-9]+$"},
    },
    "Sunset": {
        "description": "Time from which the route may be gone, as an HTTP date (RFC 8594).",
        "schema": {"type": "string"},
    },
    "Link": {
        "description": "The path to call instead, with the relation `successor-version`.",
        "schema": {"type": "string"},
    },
}
"""Response headers of deprecated routes, as OpenAPI describes them."""
Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Deprecation:
    """The end of a route: since when it is deprecated, from when it may be gone, and the path that replaces it."""

    since: date
    sunset: date
    successor: str

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        since_s = int(_midnight(self.since).timestamp())
        fields = {
            "deprecation": f"@{since_s}",
            "sunset": format_datetime(_midnight(self.sunset), usegmt=True),
            "link": f'<{self.successor}>; rel="successor-version"',
        }
        return [(name.encode(), value.encode()) for name, value in fields.items()]


def deprecated(*, since: date, sunset: date, successor: str) -> Callable[[Endpoint], Endpoint]:
    """Mark an endpoint as deprecated. Place it below the router's decorator, like `requires`.

    Raises:
        ValueError: `sunset` is less than NOTICE_DAYS after `since`.
    """
    if sunset - since < timedelta(days=NOTICE_DAYS):
        raise ValueError(f"sunset: {sunset} is less than {NOTICE_DAYS} days after {since}")

    def mark(endpoint: Endpoint) -> Endpoint:
        endpoint.__dict__["deprecation"] = Deprecation(since, sunset, successor)
        return endpoint

    return mark


def find_deprecation(route: object) -> Deprecation | None:
    """Return the deprecation of the route's endpoint, or None if it is not deprecated."""
    found = getattr(getattr(route, "endpoint", None), "deprecation", None)
    return found if isinstance(found, Deprecation) else None


def list_deprecation_headers(scope: Scope) -> list[tuple[bytes, bytes]]:
    """Return the headers to add to the response of a request; none if its route is not deprecated."""
    found = find_deprecation(scope.get("route"))
    return [] if found is None else found.headers


def _midnight(day: date) -> datetime:
    return datetime(day.year, day.month, day.day, tzinfo=UTC)
