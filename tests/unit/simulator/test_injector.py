"""Seeded faults: the same seed strikes the same, and at the end nothing is left broken."""

from __future__ import annotations

import math

import pytest

from scheduler.domain.commands import Command, PauseLending
from scheduler.domain.snapshot import Snapshot
from scheduler.executors.executor import RecordingExecutor
from scheduler.executors.simulated_executor import SimulatedExecutor
from scheduler.simulator.fault_injection import (
    ControllerCrashError,
    FaultKind,
    FaultRates,
    LossyStore,
    NoFaults,
    SeededFaultInjector,
    StaleExecutor,
)
from scheduler.store.memory_store import MemoryStore
from scheduler.store.protocol import Commit, ConflictError
from tests.builders import a_node

NODES = tuple(a_node(f"t{at}") for at in range(4))
NAMES = tuple(node.name for node in NODES)
RATES = FaultRates(until_s=100_000.0, mean_gap_s=dict.fromkeys(FaultKind, 3_000.0))


def struck(seed: int) -> list[tuple[float, int]]:
    """When something happened, and how many nodes were up afterwards; then all faults are over."""
    world = SimulatedExecutor(NODES)
    faults = SeededFaultInjector(seed, NAMES, RATES)
    faults.wrap_store(MemoryStore())
    faults.wrap_executor(world)
    story = []
    while (at_s := faults.next_event_s()) < math.inf:
        world.advance_to(at_s)
        faults.inject_due(at_s, world)
        story.append((at_s, sum(facts.up for facts in world.observe().nodes.values())))
    assert faults.count_faults()[FaultKind.NODE_LOSS] > 0
    assert faults.count_faults()[FaultKind.WORKER_CRASH] == 0, "nothing runs, so nothing crashes"
    return story


def test_the_same_seed_strikes_the_same_and_another_one_differently() -> None:
    assert struck(1) == struck(1)
    assert struck(1) != struck(2)


def test_when_the_faults_are_over_every_node_is_back() -> None:
    story = struck(3)
    assert min(up for _, up in story) < len(NODES)
    assert story[-1][1] == len(NODES)
    assert story[-1][0] <= RATES.until_s


def test_a_stale_executor_shows_the_last_observation_again() -> None:
    world = RecordingExecutor()
    stale = StaleExecutor(world)
    first = stale.observe()
    stale.converge(Snapshot(generation=3))
    stale.stale_remaining = 1
    assert stale.observe() is first
    assert stale.observe().converged_generation == 3
    assert stale.stale_observations == 1


def test_a_lossy_store_refuses_or_writes_and_dies() -> None:
    memory = MemoryStore()
    lease = memory.acquire_lease("test", now_s=0.0, ttl_s=math.inf)
    assert lease is not None
    lossy = LossyStore(memory)
    commit = Commit(previous=Snapshot(), snapshot=Snapshot(generation=1), epoch=lease.epoch)
    lossy.armed_conflicts = lossy.armed_crashes = 1
    with pytest.raises(ConflictError):
        lossy.commit(commit)
    assert lossy.load().snapshot.generation == 0
    with pytest.raises(ControllerCrashError):
        lossy.commit(commit)
    assert lossy.load().snapshot.generation == 1
    assert (lossy.conflict_count, lossy.crash_count) == (1, 1)
    assert lossy.send(Command("one", 0.0, PauseLending()))
    assert lossy.count_pending_commands() == 1


def test_a_world_without_faults_is_left_as_it_is() -> None:
    store, world = MemoryStore(), SimulatedExecutor(NODES)
    faults = NoFaults()
    assert faults.wrap_store(store) is store
    assert faults.wrap_executor(world) is world
    assert faults.next_event_s() == math.inf
