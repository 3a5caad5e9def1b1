"""Bar diagram of a pipeline."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from cli.planning.stage_diagram import StageDiagram, apportion_cells

PARTS = ("compute_s", "tensor_s", "sequence_s", "expert_s", "data_s", "other_s", "idle_s")


def device(bound: str, memory_gb: float, **parts_s: float) -> dict[str, Any]:
    spent = {**dict.fromkeys(PARTS, 0.0), **parts_s}
    memory = {
        "memory_bytes": memory_gb * 1e9,
        "memory_bytes_max": 80e9,
        "memory_near_limit": memory_gb > 72,
        "host_bytes": 0,
    }
    return {**spent, **memory, "bound": bound}


def drawn(width: int, *devices: dict[str, Any]) -> list[str]:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(StageDiagram({"devices": devices}, 10.0))
    return capture.get().splitlines()


@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_bars_are_proportional_and_fit_the_width(width: int) -> None:
    head, first, second, legend = drawn(
        width,
        device("compute", 80, compute_s=5.0, tensor_s=2.5, data_s=2.5),
        device("hand-over", 20, compute_s=2.0, other_s=1.0, idle_s=7.0),
    )
    assert all(len(line.rstrip()) <= width for line in (head, first, second, legend))
    assert "one step, 10.0 s" in head
    bar = first.split()[1]
    assert abs(bar.count("█") - bar.count("▓")) <= 1
    assert "compute 50%, memory" in first
    assert "hand-over 70%" in second
    assert second.count("·") > 2 * (second.count("▒") + 1)
    assert "idle (bubble)" in legend


def test_bottleneck_share_covers_all_communication() -> None:
    line = drawn(80, device("tensor", 8, compute_s=4.0, tensor_s=5.0, data_s=1.0))[1]
    assert "tensor 60%" in line


@pytest.mark.parametrize("cells", [1, 7, 30])
def test_cells_are_split_by_largest_remainders(cells: int) -> None:
    widths = apportion_cells([5.0, 3.0, 0.0, 2.0], cells)
    assert sum(widths) == cells
    assert widths[2] == 0
    assert all(abs(width - cells * part / 10) < 1 for width, part in zip(widths, (5, 3, 0, 2), strict=True))
