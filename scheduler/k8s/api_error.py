"""ApiError: what the API server refuses, and what keeps it from answering."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

NO_ANSWER = 0
PASSING = frozenset({NO_ANSWER, 429, 500, 502, 503, 504})
BUDGET_CAUSE = "DisruptionBudget"
_SEVERAL_BUDGETS = "more than one PodDisruptionBudget"
_NO_ADMISSION = "failed calling webhook"
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
        self.in_doubt = False
        """An earlier attempt of the same call may have been carried out although no answer said so."""

    @property
    def is_missing(self) -> bool:
        return self.status == 404

    @property
    def exists_already(self) -> bool:
        return self.status == 409 and self.reason == "AlreadyExists"

    @property
    def is_conflict(self) -> bool:
        """Somebody else wrote first, or a precondition (uid, resourceVersion) does not hold."""
        return self.status == 409 and not self.exists_already

    @property
    def is_gone(self) -> bool:
        """The resourceVersion asked for is no longer kept: list anew."""
        return self.status == 410

    @property
    def is_invalid(self) -> bool:
        """The object itself is wrong: a schema, a CEL rule, an admission policy."""
        return self.status in (400, 422)

    @property
    def is_standing(self) -> bool:
        """A refusal that stands until somebody changes something: of the object, of rights and quotas, of a place, of a
        webhook."""
        return self.is_invalid or self.is_forbidden or self.is_missing or self.is_unadmitted

    @property
    def is_forbidden(self) -> bool:
        return self.status in (401, 403)

    @property
    def is_budget_refusal(self) -> bool:
        """A PodDisruptionBudget says no, or there are several: an answer, where any other 429 is a request to come
        later."""
        return (self.status == 429 and BUDGET_CAUSE in self.causes) or self._says(_SEVERAL_BUDGETS)

    @property
    def is_unadmitted(self) -> bool:
        """A webhook that has to admit the object does not answer: nothing was done."""
        return self._says(_NO_ADMISSION)

    @property
    def is_passing(self) -> bool:
        """The same call may succeed a little later."""
        return self.status in PASSING and not (self.is_budget_refusal or self.is_unadmitted)

    @property
    def may_have_happened(self) -> bool:
        """The server may have carried the call out. A 429 is turned away before anything is done."""
        was_refused = self.is_budget_refusal or self.is_unadmitted
        return (self.status == NO_ANSWER and self.was_sent) or (self.status >= 500 and not was_refused)

    def _says(self, words: str) -> bool:
        return self.status == 500 and words in self.message


def error_of(status: int, headers: Mapping[str, str], body: bytes) -> ApiError:
    """From an answer that is no success. Its body is a Status, or plain text: of a proxy, of overload."""
    try:
        said: Any = json.loads(body)
    except ValueError:
        said = None
    if not isinstance(said, dict):
        text = body.decode(errors="replace").strip()
        return ApiError(status, text.partition("\n")[0][:80], text[:500], retry_after_s=_seconds(headers))
    return error_of_status(said, status=status, retry_after_s=_seconds(headers))


def error_of_status(said: Mapping[str, Any], *, status: int = 500, retry_after_s: float | None = None) -> ApiError:
    """From a Status, be it the body of an answer or a watch's ERROR event."""
    details = said.get("details") or {}
    asked_s = details.get("retryAfterSeconds")
    return ApiError(
        int(said.get("code") or status),
        str(said.get("reason") or "Unknown"),
        str(said.get("message") or ""),
        retry_after_s=retry_after_s if asked_s is None else float(asked_s),
        causes=frozenset(str(cause.get("reason", "")) for cause in details.get("causes") or ()),
    )


def _seconds(headers: Mapping[str, str]) -> float | None:
    """The API server says Retry-After in whole seconds; a date, which a proxy may say, is left to our own back-off."""
    said = headers.get("Retry-After", "")
    return float(said) if said.isdecimal() else None
