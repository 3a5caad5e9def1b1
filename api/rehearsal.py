"""Rehearsal: the tick of the service on a copy of the state, with nobody affected. Dry runs and explanations use it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from scheduler.domain.command import Command
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.tick_report import TickReport
from scheduler.executors.recording import RecordingExecutor
from scheduler.policies.policy_set import PolicySet
from scheduler.runtime.clock import ManualClock
from scheduler.runtime.reconciler import tick
from scheduler.store.memory import MemoryStore


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What the next tick would do, and the state that it would leave."""

    report: TickReport
    snapshot: Snapshot


def rehearse(snapshot: Snapshot, policies: PolicySet, *commands: Command) -> Rehearsal:
    """One real tick at `snapshot.now_s` with `commands` in the inbox.

    The executor has seen nothing new, so everything that is on its way stays on its way.
    """
    store = MemoryStore(snapshot)
    _send_all(store, commands)
    lease = store.acquire("rehearsal", now_s=snapshot.now_s, ttl_s=60.0)
    assert lease is not None, "nobody else knows this store"
    clock = ManualClock(snapshot.now_s)
    report = tick(store, RecordingExecutor(), clock, policies, epoch=lease.epoch)
    return Rehearsal(report, store.load().snapshot)


def _send_all(store: MemoryStore, commands: Iterable[Command]) -> None:
    for command in commands:
        store.send(command)
