"""Validation errors of documents."""

from __future__ import annotations

import json
import math

import pytest

from scheduler.documents.document import InvalidField, to_printable


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        1,
        -1.5,
        math.nan,
        -math.inf,
        10**400,
        2**60,
        "x" * 10_000,
        "\ud800",
        b"\xff",
        [math.nan],
        {"a": 1},
        object,
    ],
)
def test_any_value_is_printable_as_short_json(value: object) -> None:
    text = json.dumps(to_printable(value), allow_nan=False, ensure_ascii=False)
    assert len(text.encode()) < 1000


def test_invalid_field_has_a_message() -> None:
    assert InvalidField("gpus.max", 2, "at least 4").message == "gpus.max: got 2; allowed: at least 4"
    assert InvalidField("name", None, "a value").message == "name: got nothing; allowed: a value"
