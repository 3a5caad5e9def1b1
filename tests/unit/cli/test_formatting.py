"""Formatted durations, sizes, counts and times."""

from __future__ import annotations

import pytest

from cli.output import (
    format_bytes,
    format_count,
    format_duration,
    format_gpus,
    format_number,
    format_percent,
    format_time,
)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (None, "-"),
        (float("inf"), "-"),
        (float("nan"), "-"),
        (0, "0 s"),
        (0.00137, "1.37 ms"),
        (0.0341, "34.1 ms"),
        (0.9999, "1 s"),
        (9.876, "9.88 s"),
        (12.34, "12.3 s"),
        (99.97, "1m40s"),
        (100, "1m40s"),
        (245, "4m05s"),
        (3599.9, "1h00m"),
        (7980, "2h13m"),
        (86_400, "1d00h"),
        (273_600, "3d04h"),
        (-7980, "-2h13m"),
    ],
)
def test_duration_has_at_most_two_units(seconds: float | None, said: str) -> None:
    assert format_duration(seconds) == said


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (61_300_000_000, "61.3 GB"),
        (2.5e12, "2.5 TB"),
        (9e15, "9000.0 TB"),
    ],
)
def test_bytes_use_decimal_units(count: float, said: str) -> None:
    assert format_bytes(count) == said


def test_counts_agree_with_their_noun() -> None:
    assert [format_gpus(count) for count in (0, 1, 1.0, 2.5, 4)] == ["0 GPUs", "1 GPU", "1 GPU", "2.5 GPUs", "4 GPUs"]
    assert [format_count(count, "resize") for count in (1, 2)] == ["1 resize", "2 resizes"]


def test_numbers_have_no_exponent_and_no_trailing_zeros() -> None:
    assert [format_number(value) for value in (None, 0, 3.0, 2.5, 1 / 3, 1_234_567)] == [
        "-",
        "0",
        "3",
        "2.5",
        "0.333",
        "1,234,567",
    ]
    assert format_number(1234.5678, 1) == "1,234.6"
    assert format_number(4079.9, 0) == "4,080"
    assert [format_percent(ratio) for ratio in (None, 0.0, 0.1234, 1.0)] == ["-", "0.0%", "12.3%", "100.0%"]


def test_times_are_utc() -> None:
    assert format_time(0.0) == "1970-01-01 00:00:00"
    assert format_time(None) == "-"
