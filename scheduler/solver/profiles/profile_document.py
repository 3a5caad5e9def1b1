"""Reading figures from the JSON form of a profile, with an error that names the field."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from scheduler.solver.profiles.profile_error import ProfileError

LARGEST = 1e24
LARGEST_COUNT = 2**43
"""No figure is larger (or, unless it is 0, smaller than 1 / LARGEST), so that no cost overflows."""


def parse_object(json_text: str, owner: str) -> Mapping[str, Any]:
    """The JSON object in `json_text`.

    Raises:
        ProfileError: the text is not JSON, or not an object.
    """
    try:
        document = json.loads(json_text)
    except json.JSONDecodeError as wrong:
        raise ProfileError(f"{owner}: not JSON: {wrong}") from None
    return require_object(document, owner)


def require_object(value: Any, owner: str) -> Mapping[str, Any]:
    """`value` itself if it is a JSON object.

    Raises:
        ProfileError: it is something else.
    """
    if not isinstance(value, dict):
        raise ProfileError(f"{owner}: got {value!r}; a JSON object is needed")
    return value


def require_fields(
    document: Mapping[str, Any], owner: str, required: Iterable[str], optional: Iterable[str] = ()
) -> None:
    """Refuses missing and unknown fields.

    Raises:
        ProfileError: the first such field, by name.
    """
    needed = set(required)
    allowed = needed | set(optional)
    for field in sorted(needed - set(document)):
        raise ProfileError(f"{owner}: field {field!r} is missing")
    for field in sorted(set(document) - allowed):
        raise ProfileError(f"{owner}: field {field!r} is unknown; allowed are {', '.join(sorted(allowed))}")


def flat(entry: Any) -> Any:
    """The value of a figure, whether bare or with unit and source."""
    return entry["value"] if isinstance(entry, dict) and "value" in entry else entry


def figure(document: Mapping[str, Any], field: str, unit: str, owner: str) -> float:
    """The number in `document[field]`; whole numbers stay integers.

    Raises:
        ProfileError: not a finite number, or given in another unit.
    """
    entry = document[field]
    if isinstance(entry, dict) and entry.get("unit", unit) != unit:
        raise ProfileError(f"{owner}: {field} is in {entry['unit']!r}; it must be in {unit!r}")
    value = flat(entry)
    if isinstance(value, bool) or not isinstance(value, int | float) or not _usable(value):
        allowed = f"it must be a finite number, 0 or from {1 / LARGEST:g} to {LARGEST:g} in size"
        raise ProfileError(f"{owner}: {field} is {value!r}; {allowed}")
    return value


def count(document: Mapping[str, Any], field: str, unit: str, owner: str) -> int:
    """Like `figure`, for whole numbers that JSON holds exactly.

    Raises:
        ProfileError: not a whole number, or given in another unit.
    """
    value = figure(document, field, unit, owner)
    if value != int(value) or abs(value) > LARGEST_COUNT:
        raise ProfileError(f"{owner}: {field} is {value!r}; it must be a whole number of at most {LARGEST_COUNT}")
    return int(value)


def _usable(value: float) -> bool:
    return value == 0 or 1 / LARGEST <= abs(value) <= LARGEST


def flag(document: Mapping[str, Any], field: str, owner: str) -> bool:
    """The true or false in `document[field]`; false where the field is absent.

    Raises:
        ProfileError: it is something else.
    """
    value = flat(document.get(field, False))
    if not isinstance(value, bool):
        raise ProfileError(f"{owner}: {field} is {value!r}; it must be true or false")
    return value
