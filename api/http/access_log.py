"""The access log: one JSON object per line for each request that the setting `access_log` names.

A line has the template of the route and never the path or the query, which may contain tokens. Failed authentications
are logged under every setting. Of one address only the first few per minute are; the others are counted, and the number
is logged after the minute.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from starlette.types import Scope

from scheduler.telemetry.logs import ACCESS_LOGGER, REQUEST_ID

logger = logging.getLogger(ACCESS_LOGGER)

FAILURES_MAX = 10
"""Failed authentications of one address that are logged in a period."""
FAILURE_PERIOD_S = 60.0
_ADDRESSES_MAX = 10_000
_UNAUTHENTICATED = 401
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


@dataclass(slots=True)
class _Failures:
    since_s: float
    logged: int = 0
    suppressed: int = 0


class AccessLog:
    """Writer of the access log. Belongs to one application and its event loop."""

    def __init__(self, setting: str, *, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        """`setting`: off, changes or all."""
        self._setting = setting
        self._monotonic_s = monotonic_s
        self._failures: dict[str, _Failures] = {}
        self._flush_at_s = float("inf")

    def record(self, scope: Scope, *, method: str, status: int, seconds: float) -> None:
        """Log a request that was answered, if the setting or a failed authentication requires it."""
        now_s = self._monotonic_s()
        if now_s >= self._flush_at_s:
            self._flush(now_s)
        state = scope.get("state", {})
        if status == _UNAUTHENTICATED or state.get("has_failed_authentication"):
            if self._count_failure(_address(scope), now_s):
                _write("AuthenticationFailed", scope, method=method, status=status, seconds=seconds)
        elif self._setting == "all" or (
            self._setting == "changes" and method not in _SAFE_METHODS and "worker_caller" not in state
        ):
            _write("Request", scope, method=method, status=status, seconds=seconds)

    def _count_failure(self, address: str, now_s: float) -> bool:
        """Return whether this failure of the address is logged."""
        failures = self._failures.get(address)
        if failures is None:
            if len(self._failures) >= _ADDRESSES_MAX:
                self._flush(float("inf"))
            failures = self._failures[address] = _Failures(now_s)
            self._flush_at_s = min(self._flush_at_s, now_s + FAILURE_PERIOD_S)
        if failures.logged < FAILURES_MAX:
            failures.logged += 1
            return True
        failures.suppressed += 1
        return False

    def _flush(self, now_s: float) -> None:
        """Log the numbers of periods that have ended, and forget them."""
        ended = {
            address: failures
            for address, failures in self._failures.items()
            if now_s >= failures.since_s + FAILURE_PERIOD_S
        }
        for address, failures in ended.items():
            del self._failures[address]
            if failures.suppressed:
                line = {"at": _now(), "event": "AuthenticationFailuresSuppressed", "address": address}
                logger.info(json.dumps({**line, "suppressed": failures.suppressed}))
        ends_s = [failures.since_s + FAILURE_PERIOD_S for failures in self._failures.values()]
        self._flush_at_s = min(ends_s, default=float("inf"))


def _write(event: str, scope: Scope, *, method: str, status: int, seconds: float) -> None:
    state = scope.get("state", {})
    principal = state.get("principal")
    line: dict[str, Any] = {
        "at": _now(),
        "event": event,
        "method": method,
        "route": state.get("route_template", "unmatched"),
        "status": status,
        "duration_ms": round(1000 * seconds, 3),
        "principal": "" if principal is None else principal.name,
        "token_id": "" if principal is None else principal.token_id,
        "address": _address(scope),
        "request_id": state.get("request_id") or REQUEST_ID.get(),
    }
    logger.info(json.dumps(line))


def _address(scope: Scope) -> str:
    return str((scope.get("client") or ("", 0))[0])


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
