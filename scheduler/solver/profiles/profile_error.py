"""ProfileError, and the one check that every figure of a profile passes."""

from __future__ import annotations

from math import isfinite


class ProfileError(ValueError):
    """A model or hardware profile that cannot be used; the message names the field, the value and what is allowed."""


def require_positive(owner: str, **figures: float) -> None:
    """Refuses NaN, infinity, zero and negative figures.

    Raises:
        ProfileError: the first offending figure, by name.
    """
    for field, value in figures.items():
        if not (isfinite(value) and value > 0):
            raise ProfileError(f"{owner}: {field} is {value}; it must be a finite number above 0")


def require_not_negative(owner: str, **figures: float) -> None:
    """Like `require_positive`, but 0 is allowed.

    Raises:
        ProfileError: the first offending figure, by name.
    """
    for field, value in figures.items():
        if not (isfinite(value) and value >= 0):
            raise ProfileError(f"{owner}: {field} is {value}; it must be a finite number, 0 or above")
