"""Ticked: one tick as whoever watches a simulation sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from scheduler.domain.snapshot import Snapshot
from scheduler.domain.tick_report import TickReport
from scheduler.simulator.traces import DemandChange


@dataclass(frozen=True, slots=True)
class Ticked:
    """`before` and `after` are the stored states around the tick; `occupied_gpus` counts GPUs with live workers
    after it; `wall_s` is what it took."""

    before: Snapshot
    after: Snapshot
    report: TickReport
    occupied_gpus: int
    wall_s: float


class Watcher(Protocol):
    def ticked(self, tick: Ticked) -> None:
        """Called after every tick that came to its end."""

    def demand_changed(self, change: DemandChange) -> None:
        """Called when a pool's demand changes, before the tick that hears of it."""
