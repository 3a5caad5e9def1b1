"""Readers and checks of profile fields. Every error names the field, its value and the accepted values."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Any

MAX_MAGNITUDE = 1e24
MAX_COUNT = 2**43
"""No value is larger, or (unless it is 0) smaller than 1 / MAX_MAGNITUDE, so that no cost overflows."""


class ProfileError(ValueError):
    """An invalid model or hardware profile. The message names the field, the value and the accepted values."""


def require_positive(owner: str, **values: float) -> None:
    """Check that every value is finite and above 0.

    Raises:
        ProfileError: a value is out of range. The message names the first one.
    """
    for field, value in values.items():
        if not (isfinite(value) and value > 0):
            raise ProfileError(f"{owner}: {field} is {value}; it must be a finite number above 0")


def require_non_negative(owner: str, **values: float) -> None:
    """Check that every value is finite and at least 0.

    Raises:
        ProfileError: a value is out of range. The message names the first one.
    """
    for field, value in values.items():
        if not (isfinite(value) and value >= 0):
            raise ProfileError(f"{owner}: {field} is {value}; it must be a finite number, 0 or above")


def require_range(owner: str, field: str, value: float, limits: tuple[float, float], unit: str) -> None:
    """Check that a value lies within the limits, which are inclusive.

    Raises:
        ProfileError: it does not. The message names the limits and their unit.
    """
    lower, upper = limits
    if not lower <= value <= upper:
        raise ProfileError(f"{owner}: {field} is {value:g}; it must be from {lower:g} to {upper:g} {unit}")


def parse_object(json_text: str, owner: str) -> Mapping[str, Any]:
    """Parse a JSON object.

    Raises:
        ProfileError: the text is not JSON, or not an object.
    """
    try:
        document = json.loads(json_text)
    except (ValueError, RecursionError) as error:  # also numbers of too many digits, and nesting without end
        raise ProfileError(f"{owner}: not JSON: {error}") from None
    return require_object(document, owner)


def require_object(value: Any, owner: str) -> Mapping[str, Any]:
    """Return `value` if it is a JSON object.

    Raises:
        ProfileError: it is something else.
    """
    if not isinstance(value, dict):
        raise ProfileError(f"{owner} is {value!r}; it must be a JSON object")
    return value


def require_fields(
    document: Mapping[str, Any], owner: str, required: Iterable[str], optional: Iterable[str] = ()
) -> None:
    """Check that a document has all required fields and no unknown ones.

    Raises:
        ProfileError: a field is missing or unknown. The message names the first one.
    """
    needed = set(required)
    allowed = needed | set(optional)
    for field in sorted(needed - set(document)):
        raise ProfileError(f"{owner}: field {field!r} is missing; it is required")
    for field in sorted(set(document) - allowed):
        raise ProfileError(f"{owner}: field {field!r} is unknown; allowed are {', '.join(sorted(allowed))}")


def unwrap_value(entry: Any) -> Any:
    """Return the value of a field that is given either bare or with unit and source."""
    return entry["value"] if isinstance(entry, dict) and "value" in entry else entry


def read_number(document: Mapping[str, Any], field: str, unit: str, owner: str) -> float:
    """Return the number in `document[field]`; whole numbers stay integers.

    Raises:
        ProfileError: it is not a finite number, is given in another unit, or has fields besides value, unit and source.
    """
    entry = document[field]
    if isinstance(entry, dict):
        require_fields(entry, f"{owner}: {field}", {"value"}, {"unit", "source"})
    if isinstance(entry, dict) and entry.get("unit", unit) != unit:
        raise ProfileError(f"{owner}: {field} is in {entry['unit']!r}; it must be in {unit!r}")
    value = unwrap_value(entry)
    if isinstance(value, bool) or not isinstance(value, int | float) or not _is_in_range(value):
        allowed = f"it must be a finite number, 0 or from {1 / MAX_MAGNITUDE:g} to {MAX_MAGNITUDE:g} in size"
        raise ProfileError(f"{owner}: {field} is {value!r}; {allowed}")
    return value


def read_count(document: Mapping[str, Any], field: str, unit: str, owner: str) -> int:
    """Return the whole number in `document[field]`.

    Raises:
        ProfileError: it is not a whole number that JSON holds exactly, or is given in another unit.
    """
    value = read_number(document, field, unit, owner)
    if value != int(value) or abs(value) > MAX_COUNT:
        raise ProfileError(f"{owner}: {field} is {value!r}; it must be a whole number of at most {MAX_COUNT}")
    return int(value)


def _is_in_range(value: float) -> bool:
    return value == 0 or 1 / MAX_MAGNITUDE <= abs(value) <= MAX_MAGNITUDE


def read_name(document: Mapping[str, Any], field: str, owner: str) -> str:
    """Return the text in `document[field]`.

    Raises:
        ProfileError: it is empty or something else.
    """
    value = unwrap_value(document[field])
    if not isinstance(value, str) or not value.strip():
        raise ProfileError(f"{owner}: {field} is {value!r}; it must be text that is not empty")
    return value


def read_flag(document: Mapping[str, Any], field: str, owner: str) -> bool:
    """Return the boolean in `document[field]`; false if the field is absent.

    Raises:
        ProfileError: it is something else.
    """
    value = unwrap_value(document.get(field, False))
    if not isinstance(value, bool):
        raise ProfileError(f"{owner}: {field} is {value!r}; it must be true or false")
    return value
