"""The terminal of the demo: a live view on a terminal, and lines elsewhere."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from cli.demo.checks import CheckResult
from cli.demo.day_view import DayView, PoolLine, RecallSummary, format_day_time
from cli.demo.simulated_fleet import SIMULATED_PREFIX

if TYPE_CHECKING:
    from ebbtide.client.views import EventView

EVENTS_SHOWN = 8
BAR_WIDTH, STATE_WIDTH = 40, 36
PLAIN_PERIOD = 1.0 / 24.0
"""Share of the day between two lines on output that is no terminal: one hour."""
EVENT_WORDS: Mapping[str, tuple[str, str]] = {
    "NodeLent": ("lent", "cyan"),
    "JobGrown": ("grown", "green"),
    "NodeRecalled": ("recalled", "yellow"),
    "NodeRecallCancelled": ("recall cancelled", "yellow"),
    "JobShrunk": ("shrunk", "yellow"),
    "JobMoved": ("moved", "yellow"),
    "NodeReturned": ("returned", "cyan"),
    "JobPreempted": ("preempted", "red"),
    "JobLostWork": ("lost work", "bold red"),
    "Breach": ("breach", "bold red"),
    "DecisionDropped": ("decision dropped", "bold red"),
}
NODE_EVENTS = frozenset(
    {"NodeLent", "NodeRecalled", "NodeRecallCancelled", "NodeReturned", "Breach", "DecisionDropped"}
)


class Screen(Protocol):
    """Output of the demo while the day passes."""

    def __enter__(self) -> Screen: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def show(self, view: DayView, events: Sequence[tuple[float, EventView]]) -> None:
        """Show the state and the new events, each with the passed share of the day."""


class LiveScreen:
    """A view that is redrawn in place. `hint` tells how to cause a surge."""

    def __init__(self, console: Console, *, hint: str) -> None:
        self._hint = hint
        self._events: deque[Text] = deque(maxlen=EVENTS_SHOWN)
        self._live = Live(console=console, auto_refresh=False)

    def __enter__(self) -> LiveScreen:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._live.stop()

    def show(self, view: DayView, events: Sequence[tuple[float, EventView]]) -> None:
        self._events.extend(line for passed, event in events if (line := render_event(passed, event)))
        self._live.update(render_day(view, list(self._events), hint=self._hint), refresh=True)


class LineScreen:
    """One line for each event, and one for each hour of the replayed day."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._due = 0.0

    def __enter__(self) -> LineScreen:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Do nothing: all lines are printed."""

    def show(self, view: DayView, events: Sequence[tuple[float, EventView]]) -> None:
        for passed, event in events:
            if line := render_event(passed, event):
                self._console.print(line, soft_wrap=True)
        if view.passed >= self._due:
            self._due = PLAIN_PERIOD * (math.floor(view.passed / PLAIN_PERIOD) + 1)
            pools = "; ".join(map(_describe_pool, view.pools))
            self._console.print(
                f"{view.clock}  [bold]{pools}[/bold]; {_describe_recalls(view.recalls)}", soft_wrap=True
            )


def render_day(view: DayView, events: Sequence[Text], *, hint: str) -> RenderableType:
    return Group(
        _render_clock(view, hint),
        Text(),
        _render_pools(view.pools),
        Text(_describe_recalls(view.recalls)),
        Text(),
        _render_trainings(view),
        Text(),
        *events,
    )


def render_event(passed: float, event: EventView) -> Text | None:
    """Return the line of an event; None for one of little interest, such as every step of a simulated job."""
    is_node_event = event["code"] in NODE_EVENTS
    if not is_node_event and (event["code"] not in EVENT_WORDS or event["subject"].startswith(SIMULATED_PREFIX)):
        return None
    word, style = EVENT_WORDS[event["code"]]
    line = Text.assemble(
        (f"{format_day_time(passed)}  ", "dim"), (f"{word:<18}", style), f"{event['subject']:<26.26} ", event["message"]
    )
    line.no_wrap, line.overflow = True, "ellipsis"
    return line


def render_results(results: Sequence[CheckResult]) -> Table:
    table = Table(title="Verdict", title_justify="left")
    for head in ("claim", "asked", "measured", "verdict"):
        table.add_column(head)
    for result in results:
        verdict = "[green]holds[/green]" if result.passed else "[bold red]FAILS[/bold red]"
        table.add_row(result.claim, result.asked, result.measured, verdict)
    return table


def _render_clock(view: DayView, hint: str) -> RenderableType:
    line = Table.grid(padding=(0, 2))
    surge = Text(f"surge, {view.surge_left_s:.0f} s left", "bold yellow") if view.surge_left_s else Text(hint, "dim")
    line.add_row(
        Text(f"Ebbtide demo  {view.clock}", "bold"),
        ProgressBar(total=1.0, completed=view.passed, width=BAR_WIDTH),
        surge,
    )
    return line


def _render_pools(pools: Sequence[PoolLine]) -> Table:
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="dim")
    table.add_column("inference pool")
    for head in ("demand", "GPUs", "nodes lent", "recalled", "lent GPUs in use"):
        table.add_column(head, justify="right")
    for pool in pools:
        table.add_row(
            pool.name,
            f"{pool.demand_gpus:.1f}",
            str(pool.capacity_gpus),
            Text(f"{pool.lent} of {pool.nodes}", "cyan" if pool.lent else ""),
            Text(str(pool.recalled), "yellow" if pool.recalled else ""),
            str(pool.training_gpus),
        )
    return table


def _render_trainings(view: DayView) -> Table:
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="dim")
    table.add_column("training on this machine")
    table.add_column("state", min_width=STATE_WIDTH)
    for head in ("GPUs", "step", "loss", "resizes"):
        table.add_column(head, justify="right")
    for job in view.trainings:
        loss = "" if job.loss is None else f"{job.loss:.4f}"
        table.add_row(
            job.name, job.state, str(job.gpus or ""), f"{job.step:.0f} of {job.steps}", loss, str(job.resizes)
        )
    simulated = ", ".join(f"{count} {state}" for state, count in sorted(view.simulated_jobs.items()))
    table.add_row("simulated jobs", simulated or "none")
    return table


def _describe_pool(pool: PoolLine) -> str:
    return f"{pool.name}: demand {pool.demand_gpus:.1f} of {pool.capacity_gpus} GPUs, {pool.lent} nodes lent"


def _describe_recalls(recalls: RecallSummary) -> str:
    text = f"{recalls.total} recalls, {recalls.open} open, {recalls.late} late"
    return text if recalls.margin_s is None else f"{text}, closest return {recalls.margin_s:.1f} s before its deadline"
