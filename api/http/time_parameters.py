"""Times in query parameters: seconds since 1970, or ISO dates and times."""

from __future__ import annotations

import math
from datetime import UTC, datetime

from api.http.errors import raise_invalid_field

TIME_S_MAX = 253_402_300_800
"""The year 10000."""
TIME_FORMS = "Seconds since 1970 (UTC), or a date or time such as 2026-11-22 or 2026-11-22T08:00:00Z"


def parse_time(field: str, text: str, default_s: float) -> float:
    """Return the time in seconds since 1970. Empty text stands for `default_s`.

    Raises:
        InvalidDocumentError: the text is not a time, or outside of the years 1970 to 9999.
    """
    if not text:
        return default_s
    try:
        at_s = float(text)
    except ValueError:
        at_s = _parse_iso_time(text)
    if not 0 <= at_s <= TIME_S_MAX:
        raise_invalid_field(
            field, text, "seconds since 1970, or a date or time such as 2026-11-22 or 2026-11-22T08:00:00Z"
        )
    return at_s


def _parse_iso_time(text: str) -> float:
    """Return the time in seconds since 1970, or NaN if the text is not a time. Times without a zone are UTC."""
    try:
        moment = datetime.fromisoformat(text)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return math.nan
