"""Durations (`5m`, `1h30m`) and sizes (`80GiB`) as people write them, parsed to seconds and bytes."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any

from pydantic import BeforeValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}
_BYTES = {
    "B": 1,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_NUMBER = r"\d+(?:\.\d+)?"
_PLAIN = re.compile(_NUMBER, re.ASCII)
_PART = re.compile(rf"({_NUMBER})(ms|[smhdw])", re.ASCII)
_DURATION = re.compile(rf"(?:{_NUMBER}(?:ms|[smhdw]))+", re.ASCII)
_SIZE = re.compile(rf"({_NUMBER}) ?({'|'.join(_BYTES)})", re.ASCII)

DURATION_FORM = "a finite duration of at least 0: seconds as a number, or text such as 90s, 5m, 1h30m"
SIZE_FORM = f"a size above 0: bytes as a whole number, or text such as 80GiB ({', '.join(_BYTES)})"


def parse_duration_s(value: object) -> float:
    """Parse a number of seconds or text such as "90", "90s", "5m", "1h30m", "1.5h" or "500ms".

    Raises:
        ValueError: the value is no duration, is negative, or is not finite.
    """
    seconds = _parse_seconds(value)
    if seconds is None or not 0 <= seconds < math.inf:
        raise ValueError(f"{value!r:.80} is not {DURATION_FORM}")
    return seconds


def parse_bytes(value: object) -> int:
    """Parse a number of bytes or text such as "80GiB" (2**30) or "80GB" (10**9).

    Raises:
        ValueError: the value is no size, or is not above 0.
    """
    size = value if isinstance(value, int) and not isinstance(value, bool) else _parse_size_text(value)
    if size is None or not 0 < size < 2**63:
        raise ValueError(f"{value!r:.80} is not {SIZE_FORM}")
    return size


def _parse_seconds(value: object) -> float | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value) if abs(value) < 1e15 else None
    if not isinstance(value, str) or len(value) > 40:
        return None
    if _PLAIN.fullmatch(value):
        return float(value)
    if _DURATION.fullmatch(value):
        return sum(float(number) * _SECONDS[unit] for number, unit in _PART.findall(value))
    return None


def _parse_size_text(value: object) -> int | None:
    match = _SIZE.fullmatch(value) if isinstance(value, str) and len(value) <= 40 else None
    return round(float(match[1]) * _BYTES[match[2]]) if match else None


def _validate_duration(value: Any) -> float:
    try:
        return parse_duration_s(value)
    except ValueError:
        raise PydanticCustomError("duration", "Input should be {form}", {"form": DURATION_FORM}) from None


def _validate_positive_duration(value: Any) -> float:
    seconds = _validate_duration(value)
    if seconds == 0:
        raise PydanticCustomError("duration", "Input should be above 0 seconds")
    return seconds


def _validate_hang_timeout(value: Any) -> float | None:
    return None if value == "never" else _validate_positive_duration(value)


def _validate_size(value: Any) -> int:
    try:
        return parse_bytes(value)
    except ValueError:
        raise PydanticCustomError("size", "Input should be {form}", {"form": SIZE_FORM}) from None


def _validate_size_or_zero(value: Any) -> int:
    is_zero = not isinstance(value, bool) and value in (0, "0")
    return 0 if is_zero else _validate_size(value)


def _json_schema(number: str, example: str) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [{"type": number, "minimum": 0}, {"type": "string"}], "examples": [example]})


Duration = Annotated[float, BeforeValidator(_validate_duration), _json_schema("number", "5m")]
PositiveDuration = Annotated[float, BeforeValidator(_validate_positive_duration), _json_schema("number", "5m")]
HangTimeout = Annotated[float | None, BeforeValidator(_validate_hang_timeout), _json_schema("number", "30s")]
"""A duration above 0, or None for `never`."""
Size = Annotated[int, BeforeValidator(_validate_size), _json_schema("integer", "80GiB")]
SizeOrZero = Annotated[int, BeforeValidator(_validate_size_or_zero), _json_schema("integer", "2GiB")]
