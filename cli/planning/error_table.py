"""The table of prediction errors that `fit`, `predict` and `profile` print."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from cli.output import render_table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from scheduler.solver.calibration.constant_fit import ErrorSummary


def render_errors(errors: Mapping[str, ErrorSummary], *, counted: str = "runs") -> RenderableType:
    """Return one row per quantity that was measured. `counted` names what `ErrorSummary.runs` counts."""
    heads = ["|predicted / measured - 1|", counted, "mean", "median", "95%", "worst"]
    rows = (
        [name, str(each.runs), *(f"{figure:.2%}" for figure in (each.mean, each.median, each.p95, each.worst))]
        for name, each in errors.items()
        if each.runs
    )
    return render_table(rows, headers=heads, right_aligned=heads[1:])
