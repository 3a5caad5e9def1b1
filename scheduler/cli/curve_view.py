"""A curve of plans over numbers of GPUs, as people read it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from scheduler.cli.humanise import share, span
from scheduler.cli.output import columns, stacked
from scheduler.cli.plan_view import PlanJson, summary_of

if TYPE_CHECKING:
    from rich.console import RenderableType


def curve_view(points: Sequence[PlanJson], *, memory_bytes: int) -> RenderableType:
    """One line a number of GPUs: what each is worth beside the fewest that work, and why the others do not.

    A mark stands where fewer GPUs are at least as fast, so that more of them are wasted.
    """
    from rich.text import Text

    solved = [point for point in points if "infeasible" not in point]
    table = columns(
        (_row(point, solved[0], memory_bytes) for point in solved),
        heads=["GPUs", "", "step", "samples/s", "speed-up", "a GPU", "memory", "plan"],
        right=["GPUs", "step", "samples/s", "speed-up", "a GPU", "memory"],
        empty="No plan fits.",
    )
    wasted = [point for point in solved if point["better_gpus"]]
    marks = [Text(f"! {wasted_text(wasted)}")] if wasted else []
    reasons = [Text(f"{point['shape']}: {point['infeasible']}") for point in points if "infeasible" in point]
    notes = [*marks, *reasons]
    return stacked(table, *([Text(), *notes] if notes else []))


def wasted_text(wasted: Sequence[PlanJson]) -> str:
    """`fewer GPUs are at least as fast: 5 (4 do), 7 (6 do)`."""
    each = ", ".join(f"{point['gpus']} ({point['better_gpus']} do)" for point in wasted)
    return f"fewer GPUs are at least as fast: {each}"


def _row(point: PlanJson, first: PlanJson, memory_bytes: int) -> list[str]:
    gain = point["samples_per_s"] / first["samples_per_s"]
    return [
        str(point["gpus"]),
        "!" if point["better_gpus"] else "",
        span(point["iteration_time_s"]),
        f"{point['samples_per_s']:,.2f}",
        f"{gain:.2f}x",
        share(gain * first["gpus"] / point["gpus"]),
        share(point["peak_bytes_per_gpu"] / memory_bytes),
        summary_of(point),
    ]
