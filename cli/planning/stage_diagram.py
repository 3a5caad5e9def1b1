"""Bar diagram of a pipeline: time components of each stage's step and its memory use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cli.output import format_bytes, format_duration, format_percent

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.text import Text


Device = Mapping[str, Any]
_TIME_COMPONENTS = {
    "compute": ("compute_s",),
    "communication": ("tensor_s", "sequence_s", "expert_s", "data_s"),
    "optimizer, host": ("other_s",),
    "idle (bubble)": ("idle_s",),
}
_GLYPHS = {"compute": "█", "communication": "▓", "optimizer, host": "▒", "idle (bubble)": "·"}
_STYLES = {"compute": "blue", "communication": "yellow", "optimizer, host": "magenta", "idle (bubble)": "dim"}
_FIGURES_WIDTH = 50
"""Terminal columns of the numbers and gaps next to the bars."""
_LEGEND_SHARE_MIN = 0.01
"""Share of the step below which a component gets no legend: it may have no cell in any bar."""


class StageDiagram:
    """Rich renderable as wide as the console. `inspection` belongs to a plan with a step time of `step_s` seconds."""

    def __init__(self, inspection: Mapping[str, Any], step_s: float) -> None:
        self.devices: Sequence[Device] = inspection["devices"]
        self.step_s = step_s

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.table import Table
        from rich.text import Text

        room = max(24, options.max_width - _FIGURES_WIDTH)
        time_cells, memory_cells = room - room // 4, room // 4
        table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
        table.add_column("stage", justify="right")
        table.add_column(f"one step, {format_duration(self.step_s)}", no_wrap=True)
        table.add_column("busy", justify="right", no_wrap=True)
        table.add_column("memory", no_wrap=True)
        table.add_column("", justify="right", no_wrap=True)
        table.add_column("bound by", overflow="fold")
        for position, device in enumerate(self.devices):
            need, limit = device["memory_bytes"], device["memory_bytes_max"]
            table.add_row(
                str(position),
                self._draw_time_bar(device, time_cells),
                format_percent(1 - device["idle_s"] / self.step_s),
                _draw_memory_bar(need / limit, memory_cells, near_limit=device["memory_near_limit"]),
                format_bytes(need),
                Text(self._format_bottleneck(device)),
            )
        yield table
        yield self._draw_legend()

    def _draw_time_bar(self, device: Device, cells: int) -> Text:
        from rich.text import Text

        parts_s = [sum(device[name] for name in names) for names in _TIME_COMPONENTS.values()]
        bar = Text()
        for part, width in zip(_TIME_COMPONENTS, apportion_cells(parts_s, cells), strict=True):
            bar.append(_GLYPHS[part] * width, style=_STYLES[part])
        return bar

    def _format_bottleneck(self, device: Device) -> str:
        """Format the bottleneck with its share of the step, `memory` near its limit, and what is on the host."""
        bound = device["bound"]
        if bound in ("bubble", "hand-over"):
            taken_s = device["idle_s"]
        elif bound in ("compute", "other"):
            taken_s = device[f"{bound}_s"]
        else:
            taken_s = sum(device[name] for name in _TIME_COMPONENTS["communication"])
        text = f"{bound} {100 * taken_s / self.step_s:.0f}%"
        text = f"{text}, memory" if device["memory_near_limit"] else text
        return f"{text}, {format_bytes(device['host_bytes'])} on the host" if device["host_bytes"] else text

    def _draw_legend(self) -> Text:
        from rich.text import Text

        legend = Text()
        for part, names in _TIME_COMPONENTS.items():
            if any(sum(device[name] for name in names) >= _LEGEND_SHARE_MIN * self.step_s for device in self.devices):
                legend.append(_GLYPHS[part] * 2, style=_STYLES[part]).append(f" {part}   ")
        return legend


def apportion_cells(parts: Sequence[float], cells: int) -> list[int]:
    """Split `cells` in proportion to `parts` with the largest-remainder method."""
    total = sum(parts) or 1.0
    exact = [part * cells / total for part in parts]
    widths = [int(width) for width in exact]
    by_remainder = sorted(range(len(parts)), key=lambda at: widths[at] - exact[at])
    for at in by_remainder[: cells - sum(widths)]:
        widths[at] += 1
    return widths


def _draw_memory_bar(ratio: float, cells: int, *, near_limit: bool) -> Text:
    from rich.text import Text

    filled = min(cells, round(ratio * cells))
    return Text("█" * filled, style="red" if near_limit else "green").append("░" * (cells - filled), style="dim")
