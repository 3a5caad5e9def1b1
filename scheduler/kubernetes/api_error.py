"""ApiError: what the API server refuses, and what keeps it from answering."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

NO_RESPONSE = 0
TRANSIENT_STATUSES = frozenset({NO_RESPONSE, 429, 500, 502, 503, 504})
DISRUPTION_BUDGET_CAUSE = "DisruptionBudget"
_MULTIPLE_BUDGETS = "more than one PodDisruptionBudget"
_WEBHOOK_FAILED = "failed calling webhook"
"""How the API server says with 500, before it does anything, that a pod cannot be evicted, or that a webhook which has
to admit an object does not answer. It has no codes for either."""


class ApiError(Exception):
    """`status` is the HTTP status, or 0 where no answer came; `reason` is the machine-readable one of the server's
    Status, else its first line; `retry_after_s` is what the server asked for."""

    def __init__(
        self,
        status: int,
        reason: str,
        message: str,
        *,
        retry_after_s: float | None = None,
        causes: frozenset[str] = frozenset(),
        was_sent: bool = True,
    ) -> None:
        super().__init__(f"{status or 'no answer'} {reason}: {message}")
        self.status = status
        self.reason = reason
        self.message = message
        self.retry_after_s = retry_after_s
        self.causes = causes
        self.was_sent = was_sent
        self.had_ambiguous_attempt = False
        """An earlier attempt of the same call may have been carried out although no answer said so."""

    @property
    def is_not_found(self) -> bool:
        return self.status == 404

    @property
    def is_already_exists(self) -> bool:
        return self.status == 409 and self.reason == "AlreadyExists"

    @property
    def is_conflict(self) -> bool:
        """Somebody else wrote first, or a precondition (uid, resourceVersion) does not hold."""
        return self.status == 409 and not self.is_already_exists

    @property
    def is_gone(self) -> bool:
        """The resourceVersion asked for is no longer kept: list anew."""
        return self.status == 410

    @property
    def is_invalid(self) -> bool:
        """The object itself is wrong: a schema, a CEL rule, an admission policy."""
        return self.status in (400, 422)

    @property
    def is_permanent(self) -> bool:
        """A refusal that stands until somebody changes something: of the object, of rights and quotas, of a place, of a
        webhook."""
        return self.is_invalid or self.is_forbidden or self.is_not_found or self.is_webhook_unavailable

    @property
    def is_forbidden(self) -> bool:
        return self.status in (401, 403)

    @property
    def is_blocked_by_budget(self) -> bool:
        """A PodDisruptionBudget says no, or there are several: an answer, where any other 429 is a request to come
        later."""
        return (self.status == 429 and DISRUPTION_BUDGET_CAUSE in self.causes) or self._message_contains(
            _MULTIPLE_BUDGETS
        )

    @property
    def is_webhook_unavailable(self) -> bool:
        """A webhook that has to admit the object does not answer: nothing was done."""
        return self._message_contains(_WEBHOOK_FAILED)

    @property
    def is_transient(self) -> bool:
        """The same call may succeed a little later."""
        return self.status in TRANSIENT_STATUSES and not (self.is_blocked_by_budget or self.is_webhook_unavailable)

    @property
    def is_ambiguous(self) -> bool:
        """The server may have carried the call out. A 429 is turned away before anything is done."""
        was_refused = self.is_blocked_by_budget or self.is_webhook_unavailable
        return (self.status == NO_RESPONSE and self.was_sent) or (self.status >= 500 and not was_refused)

    def _message_contains(self, text: str) -> bool:
        return self.status == 500 and text in self.message


def parse_error_response(status: int, headers: Mapping[str, str], body: bytes) -> ApiError:
    """From an answer that is no success. Its body is a Status, or plain text: of a proxy, of overload."""
    try:
        said: Any = json.loads(body)
    except ValueError:
        said = None
    if not isinstance(said, dict):
        text = body.decode(errors="replace").strip()
        return ApiError(status, text.partition("\n")[0][:80], text[:500], retry_after_s=_parse_retry_after(headers))
    return parse_status_error(said, status=status, retry_after_s=_parse_retry_after(headers))


def parse_status_error(
    document: Mapping[str, Any], *, status: int = 500, retry_after_s: float | None = None
) -> ApiError:
    """From a Status, be it the body of an answer or a watch's ERROR event."""
    details = document.get("details") or {}
    asked_s = details.get("retryAfterSeconds")
    return ApiError(
        int(document.get("code") or status),
        str(document.get("reason") or "Unknown"),
        str(document.get("message") or ""),
        retry_after_s=retry_after_s if asked_s is None else float(asked_s),
        causes=frozenset(str(cause.get("reason", "")) for cause in details.get("causes") or ()),
    )


def _parse_retry_after(headers: Mapping[str, str]) -> float | None:
    """The API server says Retry-After in whole seconds; a date, which a proxy may say, is left to our own back-off."""
    said = headers.get("Retry-After", "")
    return float(said) if said.isdecimal() else None
