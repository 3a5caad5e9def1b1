"""SeededFaults: five kinds of fault, struck at times and on victims that one seed decides."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from heapq import heappop, heappush
from random import Random

from scheduler.executors.protocol import Executor
from scheduler.executors.simulated import SimulatedExecutor
from scheduler.simulator.faults import LossyStore, StaleExecutor
from scheduler.store.protocol import Store


class FaultKind(StrEnum):
    NODE_LOSS = "node-loss"
    WORKER_CRASH = "worker-crash"
    SLOW_CHECKPOINT = "slow-checkpoint"
    STALE_OBSERVATION = "stale-observation"
    LOST_COMMIT = "lost-commit"


@dataclass(frozen=True, slots=True)
class FaultRates:
    """Mean seconds between two faults of a kind (each kind on its own), until `until_s`; then nothing goes wrong
    any more, and lost nodes have come back. `outage_s` is a node's mean absence, `slow_save_s` the mean extra
    time of a slow checkpoint."""

    until_s: float
    mean_gap_s: Mapping[FaultKind, float]
    outage_s: float = 1800.0
    slow_save_s: float = 240.0


class SeededFaults:
    """One generator a kind, so that a change in one kind's draws leaves the others alone."""

    def __init__(self, seed: int, nodes: tuple[str, ...], rates: FaultRates, *, start_s: float = 0.0) -> None:
        self._struck: Counter[FaultKind] = Counter()
        self._rates = rates
        self._nodes = nodes
        self._random = {kind: Random(f"faults/{seed}/{kind}") for kind in FaultKind}
        self._due: list[tuple[float, str, str]] = []
        self._down: set[str] = set()
        self._store: LossyStore | None = None
        self._executor: StaleExecutor | None = None
        for kind in FaultKind:
            self._draw_next(kind, start_s)

    def counts(self) -> Mapping[FaultKind, int]:
        """How often each kind did harm: an armed fault that nothing met does not count."""
        assert self._store is not None, "the control loop uses the wrapped store"
        assert self._executor is not None, "the control loop uses the wrapped executor"
        met = {
            FaultKind.STALE_OBSERVATION: self._executor.shown_stale,
            FaultKind.LOST_COMMIT: self._store.conflicted + self._store.died,
        }
        return {kind: met.get(kind, self._struck[kind]) for kind in FaultKind}

    def around_store(self, store: Store) -> Store:
        self._store = LossyStore(store)
        return self._store

    def around_executor(self, executor: Executor) -> Executor:
        self._executor = StaleExecutor(executor)
        return self._executor

    def next_event_s(self) -> float:
        return self._due[0][0] if self._due else math.inf

    def happen(self, now_s: float, world: SimulatedExecutor) -> None:
        while self._due and self._due[0][0] <= now_s:
            at_s, kind, returning = heappop(self._due)
            if returning:
                self._down.discard(returning)
                world.node_up(returning)
                continue
            self._strike(FaultKind(kind), at_s, world)
            self._draw_next(FaultKind(kind), at_s)

    def _strike(self, kind: FaultKind, at_s: float, world: SimulatedExecutor) -> None:
        assert self._store is not None, "the control loop uses the wrapped store"
        assert self._executor is not None, "the control loop uses the wrapped executor"
        random = self._random[kind]
        match kind:
            case FaultKind.NODE_LOSS:
                hit = self._lose_node(at_s, world)
            case FaultKind.WORKER_CRASH:
                hit = bool(victims := world.running()) and world.crash(random.choice(victims))
            case FaultKind.SLOW_CHECKPOINT:
                extra_s = random.expovariate(1.0 / self._rates.slow_save_s)
                hit = bool(victims := world.running()) and world.slow_save(random.choice(victims), extra_s)
            case FaultKind.STALE_OBSERVATION:
                self._executor.stale_left, hit = random.randint(1, 3), True
            case FaultKind.LOST_COMMIT:
                self._store.conflicts, self._store.deaths = random.choice(((1, 0), (0, 1)))
                hit = True
        if hit:
            self._struck[kind] += 1

    def _lose_node(self, at_s: float, world: SimulatedExecutor) -> bool:
        random = self._random[FaultKind.NODE_LOSS]
        victim = random.choice(self._nodes)
        back_s = min(at_s + random.expovariate(1.0 / self._rates.outage_s), self._rates.until_s)
        if victim in self._down:
            return False
        self._down.add(victim)
        world.node_down(victim)
        heappush(self._due, (back_s, FaultKind.NODE_LOSS, victim))
        return True

    def _draw_next(self, kind: FaultKind, now_s: float) -> None:
        gap_s = self._rates.mean_gap_s.get(kind, math.inf)
        if gap_s == math.inf:
            return
        at_s = now_s + self._random[kind].expovariate(1.0 / gap_s)
        if at_s < self._rates.until_s:
            heappush(self._due, (at_s, kind, ""))
