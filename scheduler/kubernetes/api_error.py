"""Errors of the Kubernetes API server, classified by how the caller can react."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

NO_RESPONSE = 0
TRANSIENT_STATUSES = frozenset({NO_RESPONSE, 429, 500, 502, 503, 504})
DISRUPTION_BUDGET_CAUSE = "DisruptionBudget"
_MULTIPLE_BUDGETS = "more than one PodDisruptionBudget"
_WEBHOOK_FAILED = "failed calling webhook"
"""Messages by which the API server reports, with status 500, that several budgets block an eviction or that an
admission webhook does not respond. There are no reason codes for either.
"""
_NO_DRY_RUN = "does not support dry run"
"""Message, with status 400, by which it reports an admission webhook with side effects."""


class ApiError(Exception):
    """A failed request.

    `status` is the HTTP status, or 0 without a response. `reason` is the reason in the server's Status object, else the
    first line of the body. `retry_after_s` is the delay that the server requested. `field_errors` are the invalid
    fields with their messages.
    """

    def __init__(
        self,
        status: int,
        reason: str,
        message: str,
        *,
        retry_after_s: float | None = None,
        causes: frozenset[str] = frozenset(),
        field_errors: tuple[tuple[str, str], ...] = (),
        was_sent: bool = True,
    ) -> None:
        super().__init__(f"{status or 'no response'} {reason}: {message}")
        self.status = status
        self.reason = reason
        self.message = message
        self.retry_after_s = retry_after_s
        self.causes = causes
        self.field_errors = field_errors
        self.was_sent = was_sent
        self.had_ambiguous_attempt = False
        """An earlier attempt of the same request may have succeeded without a response."""

    @property
    def is_not_found(self) -> bool:
        return self.status == 404

    @property
    def is_already_exists(self) -> bool:
        return self.status == 409 and self.reason == "AlreadyExists"

    @property
    def is_conflict(self) -> bool:
        """Return whether another client wrote first, or a precondition (uid, resourceVersion) failed."""
        return self.status == 409 and not self.is_already_exists

    @property
    def is_gone(self) -> bool:
        """Return whether the requested resourceVersion has expired. List again."""
        return self.status == 410

    @property
    def is_invalid(self) -> bool:
        """Return whether the object is invalid: schema, CEL rule or admission policy."""
        return self.status in (400, 422)

    @property
    def is_permanent(self) -> bool:
        """Return whether retries are useless until someone changes the object, permissions, quota or webhook."""
        return self.is_invalid or self.is_forbidden or self.is_not_found or self.is_webhook_unavailable

    @property
    def is_forbidden(self) -> bool:
        return self.status in (401, 403)

    @property
    def is_blocked_by_budget(self) -> bool:
        """Return whether a PodDisruptionBudget blocks the eviction. Any other 429 asks the client to slow down."""
        return (self.status == 429 and DISRUPTION_BUDGET_CAUSE in self.causes) or self._message_contains(
            _MULTIPLE_BUDGETS
        )

    @property
    def is_webhook_unavailable(self) -> bool:
        """Return whether an admission webhook did not respond. The request had no effect."""
        return self._message_contains(_WEBHOOK_FAILED)

    @property
    def lacks_dry_run(self) -> bool:
        """Return whether an admission webhook has side effects, so that the dry run was not made."""
        return self.status == 400 and _NO_DRY_RUN in self.message

    @property
    def is_transient(self) -> bool:
        """Return whether the same request may succeed later."""
        return self.status in TRANSIENT_STATUSES and not (self.is_blocked_by_budget or self.is_webhook_unavailable)

    @property
    def is_ambiguous(self) -> bool:
        """Return whether the server may have executed the request. A request rejected with 429 was not executed."""
        was_refused = self.is_blocked_by_budget or self.is_webhook_unavailable
        return (self.status == NO_RESPONSE and self.was_sent) or (self.status >= 500 and not was_refused)

    def _message_contains(self, text: str) -> bool:
        return self.status == 500 and text in self.message


def parse_error_response(status: int, headers: Mapping[str, str], body: bytes) -> ApiError:
    """Return the error for a response. The body is a Status object or plain text from a proxy."""
    try:
        document: Any = json.loads(body)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        text = body.decode(errors="replace").strip()
        return ApiError(status, text.partition("\n")[0][:80], text[:500], retry_after_s=_parse_retry_after(headers))
    return parse_status_error(document, status=status, retry_after_s=_parse_retry_after(headers))


def parse_status_error(
    document: Mapping[str, Any], *, status: int = 500, retry_after_s: float | None = None
) -> ApiError:
    """Return the error for a Status object, from a response body or a watch's ERROR event."""
    details = document.get("details") or {}
    asked_s, causes = details.get("retryAfterSeconds"), details.get("causes") or ()
    return ApiError(
        int(document.get("code") or status),
        str(document.get("reason") or "Unknown"),
        str(document.get("message") or ""),
        retry_after_s=retry_after_s if asked_s is None else float(asked_s),
        causes=frozenset(str(cause.get("reason", "")) for cause in causes),
        field_errors=tuple((str(each["field"]), str(each.get("message", ""))) for each in causes if each.get("field")),
    )


def _parse_retry_after(headers: Mapping[str, str]) -> float | None:
    """Return Retry-After in seconds. Dates, which only proxies send, are ignored."""
    seconds = headers.get("Retry-After", "")
    return float(seconds) if seconds.isdecimal() else None
