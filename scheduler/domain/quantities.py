"""Kubernetes quantities, and amounts of resources.

Source: Kubernetes documentation, "Quantity" in the API reference.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fractions import Fraction
from functools import lru_cache
from math import ceil

Resources = tuple[tuple[str, int], ...]
"""Amounts by resource name, sorted by name: CPU in thousandths of a core, all others in their own unit."""

CPU = "cpu"
_SUFFIXES: Mapping[str, Fraction] = {
    "": Fraction(1),
    **{suffix: Fraction(1, 10 ** (3 * power)) for power, suffix in enumerate(("m", "u", "n"), 1)},
    **{suffix: Fraction(10 ** (3 * power)) for power, suffix in enumerate(("k", "M", "G", "T", "P", "E"), 1)},
    **{suffix: Fraction(2 ** (10 * power)) for power, suffix in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"), 1)},
}
_QUANTITY = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))(?:([eE][+-]?\d{1,3})|([numkMGTPE]|[KMGTPE]i)?)", re.ASCII)


def parse_quantity(value: object) -> Fraction | None:
    """Return the number that a quantity such as `500m`, `1.5` or `64Gi` stands for, or None if it is malformed."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    return _parse_text(str(value))


@lru_cache(maxsize=65536)
def _parse_text(text: str) -> Fraction | None:
    match = _QUANTITY.fullmatch(text)
    if match is None:
        return None
    number, exponent, suffix = match.groups()
    return Fraction(number + exponent) if exponent else Fraction(number) * _SUFFIXES[suffix or ""]


def parse_resources(amounts: Mapping[str, object]) -> dict[str, int]:
    """Return amounts by resource, rounded up as Kubernetes does. Malformed and negative quantities count as 0."""
    parsed = {}
    for name, value in amounts.items():
        quantity = parse_quantity(value) or Fraction(0)
        parsed[name] = max(0, ceil(quantity * 1000 if name == CPU else quantity))
    return parsed


def multiply_quantity(name: str, value: object, factor: int) -> str:
    """Return a multiple of a quantity as text, rounded up as `parse_resources` does."""
    amount = factor * parse_resources({name: value})[name]
    return f"{amount}m" if name == CPU else str(amount)


def freeze_resources(amounts: Mapping[str, int]) -> Resources:
    """Return the amounts as a value. Amounts of 0 are left out."""
    return tuple(sorted((name, amount) for name, amount in amounts.items() if amount))


def sum_resources(parts: Iterable[Resources]) -> dict[str, int]:
    total: dict[str, int] = {}
    for part in parts:
        for name, amount in part:
            total[name] = total.get(name, 0) + amount
    return total


def format_resource(name: str, amount: int) -> str:
    """Format an amount for people, for example `96 CPUs`, `512 GiB of memory` or `4 rdma/hca`."""
    if name == CPU:
        return f"{amount / 1000:g} CPU{'' if amount == 1000 else 's'}"
    if name in ("memory", "ephemeral-storage") or name.startswith("hugepages-"):
        return f"{_format_bytes(amount)} of {name}"
    return f"{amount} {name}"


def _format_bytes(amount: int) -> str:
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if amount >= 2**power:
            return f"{amount / 2**power:.4g} {unit}"
    return f"{amount} B"
