"""History of the use of pools: bins in tiers of width, checkpoints and changes of the fleet, and forecast fans."""

from __future__ import annotations

import threading
from bisect import bisect_right, insort
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import Protocol

from scheduler.domain.capacity_history import CAPACITY_TIERS, CapacityBin, roll_up
from scheduler.domain.fleet import ForecastFan
from scheduler.store.protocol import Commit

HOUR_S = 3600


@dataclass(frozen=True, slots=True)
class FleetCheckpoint:
    """Compressed state of fleet and queue at a time, in whole seconds since 1970 (UTC).

    An hourly checkpoint, the first one of its hour, is stored longer than the others.
    """

    at_s: int
    is_hourly: bool
    body: bytes


class CapacityHistory(Protocol):
    """Every method may raise UnavailableError. Methods with an `epoch` raise FencedError if the lease has another."""

    def list_bins(self, step_s: int, *, from_s: float, to_s: float, pool: str = "") -> tuple[CapacityBin, ...]:
        """Return the bins of a tier that overlap the time span, by pool and time; of one pool, or of all."""

    def find_checkpoint(self, at_s: float) -> FleetCheckpoint | None:
        """Return the newest checkpoint that was written at `at_s` or before."""

    def add_checkpoint(self, at_s: int, body: bytes, *, epoch: int) -> None:
        """Store a checkpoint. One with the same time is replaced."""

    def list_fleet_changes(self, *, after: int, until_s: float) -> tuple[bytes, ...]:
        """Return the encoded changes of commits above generation `after`, up to `until_s`, in order of generation."""

    def put_fans(self, fans: tuple[ForecastFan, ...], *, epoch: int) -> None:
        """Replace the forecast fans of these pools."""

    def list_fans(self) -> tuple[ForecastFan, ...]:
        """Return the newest forecast fan of each pool that has one, by pool."""


class MemoryCapacityHistory:
    """CapacityHistory in memory. Nothing is deleted."""

    def __init__(self) -> None:
        self._bins: dict[int, dict[tuple[str, int], CapacityBin]] = {tier.step_s: {} for tier in CAPACITY_TIERS}
        self._checkpoints: list[FleetCheckpoint] = []
        self._fleet_changes: list[tuple[int, float, bytes]] = []
        self._fans: dict[str, ForecastFan] = {}
        self._lock = threading.Lock()

    def add(self, commit: Commit) -> None:
        """Add the bins and the change of the fleet of a commit."""
        with self._lock:
            if commit.fleet_change:
                self._fleet_changes.append((commit.snapshot.generation, commit.snapshot.now_s, commit.fleet_change))
            for step_s, stored in self._bins.items():
                for each in roll_up(commit.capacity, step_s):
                    known = stored.get((each.pool, each.at_s))
                    stored[each.pool, each.at_s] = each if known is None else known.merge(each)

    def list_bins(self, step_s: int, *, from_s: float, to_s: float, pool: str = "") -> tuple[CapacityBin, ...]:
        with self._lock:
            stored = sorted(self._bins[step_s].items())
        overlapping = (each for (name, at_s), each in stored if pool in ("", name) and from_s - step_s < at_s < to_s)
        return tuple(overlapping)

    def find_checkpoint(self, at_s: float) -> FleetCheckpoint | None:
        with self._lock:
            after = bisect_right(self._checkpoints, at_s, key=attrgetter("at_s"))
            return self._checkpoints[after - 1] if after else None

    def add_checkpoint(self, at_s: int, body: bytes, *, epoch: int) -> None:
        del epoch  # no other process can write to this store
        previous = self.find_checkpoint(at_s - 1)
        is_hourly = previous is None or previous.at_s // HOUR_S < at_s // HOUR_S
        with self._lock:
            self._checkpoints = [each for each in self._checkpoints if each.at_s != at_s]
            insort(self._checkpoints, FleetCheckpoint(at_s, is_hourly, body), key=attrgetter("at_s"))

    def list_fleet_changes(self, *, after: int, until_s: float) -> tuple[bytes, ...]:
        with self._lock:
            first = bisect_right(self._fleet_changes, after, key=itemgetter(0))
            return tuple(body for _, at_s, body in self._fleet_changes[first:] if at_s <= until_s)

    def put_fans(self, fans: tuple[ForecastFan, ...], *, epoch: int) -> None:
        del epoch
        with self._lock:
            self._fans.update((fan.pool, fan) for fan in fans)

    def list_fans(self) -> tuple[ForecastFan, ...]:
        with self._lock:
            return tuple(self._fans[pool] for pool in sorted(self._fans))
