"""Parsing of durations and sizes."""

from __future__ import annotations

import math

import pytest

from scheduler.documents.units import parse_bytes, parse_duration_s


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (0, 0.0),
        (90, 90.0),
        (0.25, 0.25),
        ("90", 90.0),
        ("90s", 90.0),
        ("5m", 300.0),
        ("1h30m", 5400.0),
        ("1.5h", 5400.0),
        ("500ms", 0.5),
        ("1w2d", 9 * 86_400.0),
    ],
)
def test_duration_is_parsed_from_seconds_or_text(text: object, seconds: float) -> None:
    assert parse_duration_s(text) == seconds


@pytest.mark.parametrize(
    "text",
    [
        -1,
        -0.001,
        math.nan,
        math.inf,
        -math.inf,
        True,
        None,
        [],
        "",
        "m",
        "5 m",
        "-5m",
        "5parsecs",
        "1e5s",
        "٣s",
        "5m\n",
        10**400,
        "9" * 50,
    ],
)
def test_invalid_duration_is_rejected_with_examples(text: object) -> None:
    with pytest.raises(ValueError, match="90s, 5m, 1h30m"):
        parse_duration_s(text)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (1, 1),
        (2**40, 2**40),
        ("80GiB", 80 * 2**30),
        ("80 GiB", 80 * 2**30),
        ("24GB", 24 * 10**9),
        ("0.5MiB", 2**19),
        ("7B", 7),
    ],
)
def test_size_is_parsed_from_bytes_or_text(text: object, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text", [0, -1, 1.5, math.nan, True, None, "", "80", "80gib", "-1GiB", "0GiB", "80GiBs", 2**63, "99999999TiB"]
)
def test_invalid_size_is_rejected_with_examples(text: object) -> None:
    with pytest.raises(ValueError, match="80GiB"):
        parse_bytes(text)
