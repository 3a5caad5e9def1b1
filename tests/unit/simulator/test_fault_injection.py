"""Seeded faults are reproducible, and all their effects end."""

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


def run_faults(seed: int) -> list[tuple[float, int]]:
    """Return the times of faults and how many nodes were up after each, until all faults have ended."""
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


def test_faults_are_determined_by_the_seed() -> None:
    assert run_faults(1) == run_faults(1)
    assert run_faults(1) != run_faults(2)


def test_all_nodes_are_up_after_the_faults() -> None:
    story = run_faults(3)
    assert min(up for _, up in story) < len(NODES)
    assert story[-1][1] == len(NODES)
    assert story[-1][0] <= RATES.until_s


def test_stale_executor_repeats_its_last_observation() -> None:
    world = RecordingExecutor()
    stale = StaleExecutor(world)
    first = stale.observe()
    stale.converge(Snapshot(generation=3))
    stale.stale_remaining = 1
    assert stale.observe() is first
    assert stale.observe().converged_generation == 3
    assert stale.stale_observations == 1


def test_lossy_store_refuses_commits_or_crashes_after_them() -> None:
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


def test_no_faults_changes_nothing() -> None:
    store, world = MemoryStore(), SimulatedExecutor(NODES)
    faults = NoFaults()
    assert faults.wrap_store(store) is store
    assert faults.wrap_executor(world) is world
    assert faults.next_event_s() == math.inf
