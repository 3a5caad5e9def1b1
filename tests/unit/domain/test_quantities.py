"""Quantities of Kubernetes."""

from __future__ import annotations

from fractions import Fraction

import pytest

from scheduler.domain.quantities import format_resource, multiply_quantity, parse_quantity, parse_resources


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", Fraction(0)),
        ("500m", Fraction(1, 2)),
        ("1.5", Fraction(3, 2)),
        (".5", Fraction(1, 2)),
        ("64Gi", Fraction(64 * 2**30)),
        ("1e3", Fraction(1000)),
        ("1E", Fraction(10**18)),
        ("2k", Fraction(2000)),
        ("100u", Fraction(1, 10_000)),
        (4, Fraction(4)),
        ("-1", Fraction(-1)),
    ],
)
def test_quantity_is_exact(text: object, value: Fraction) -> None:
    assert parse_quantity(text) == value


@pytest.mark.parametrize("text", ["", "abc", "1 Gi", "1GB", "1KI", "Gi", True, None, [], "1e", "\u0661"])
def test_malformed_quantity_is_none(text: object) -> None:
    assert parse_quantity(text) is None


def test_amounts_are_rounded_up_as_in_kubernetes() -> None:
    assert parse_resources({"cpu": "100u", "memory": "0.5", "pods": "-1"}) == {"cpu": 1, "memory": 1, "pods": 0}


def test_multiple_of_a_quantity() -> None:
    assert multiply_quantity("cpu", "1500m", 8) == "12000m"
    assert multiply_quantity("memory", "16Gi", 2) == str(32 * 2**30)


def test_amounts_are_formatted_with_their_unit() -> None:
    assert format_resource("cpu", 96_000) == "96 CPUs"
    assert format_resource("memory", 512 * 2**30) == "512 GiB of memory"
    assert format_resource("rdma/hca", 4) == "4 rdma/hca"
