"""Limits of a plan search from the options --only and --without."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from cli.inputs import raise_input_error

if TYPE_CHECKING:
    from scheduler.domain.plan_limits import PlanDimension, PlanLimits


def parse_limits(only: Sequence[str] | None, without: Sequence[str] | None) -> PlanLimits:
    """Return the limits of the options, whose values are names separated by commas.

    Raises:
        InputError: a name is unknown, or an option has none.
    """
    from scheduler.domain.plan_limits import PlanLimits

    limits = PlanLimits(excluded=tuple(_parse_names("--without", without or ())))
    if only is None:
        return limits
    return limits.combine(PlanLimits.allow_only(_parse_names("--only", only)))


def _parse_names(option: str, values: Sequence[str]) -> Iterator[PlanDimension]:
    from scheduler.domain.plan_limits import parse_dimension_name

    for value in values:
        for name in value.split(","):
            try:
                yield from parse_dimension_name(name)
            except ValueError as error:
                raise_input_error(f"{option}: {name.strip()!r} is not a dimension. Use {error}.")
