"""The snapshot index that is carried from tick to tick equals one that is built from the snapshot."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from scheduler.domain.snapshot_index import SnapshotIndex
from scheduler.scheduling.policy_sets import load_policy_set
from scheduler.simulator.demand import DemandChange
from scheduler.simulator.engine import Simulation, TickRecord
from scheduler.simulator.fault_injection import SeededFaultInjector
from tests.simulation.test_faults import RATES, world

SEEDS = (11, pytest.param(12, marks=pytest.mark.full))
TICKS_BETWEEN = 7


def contents(index: SnapshotIndex) -> dict[str, Any]:
    """Return the index without the mappings of its snapshot, cached results and counts of zero."""
    parts = {
        name: part
        for name, part in vars(index).items()
        if name not in ("pools", "nodes", "loans", "jobs", "_job_id_sets", "fit_cache", "fleet_version")
    }
    return {
        name: {key: value for key, value in part.items() if value} if isinstance(part, dict) else part
        for name, part in parts.items()
    }


class Comparison:
    def __init__(self) -> None:
        self.ticks = 0
        self.compared = 0

    def on_tick(self, tick: TickRecord) -> None:
        self.ticks += 1
        if self.ticks % TICKS_BETWEEN == 0:
            self.compared += 1
            assert contents(tick.after.index) == contents(SnapshotIndex.build(replace(tick.after, cached_index=None)))

    def on_demand_change(self, change: DemandChange) -> None:
        """Not compared."""


@pytest.mark.parametrize("seed", SEEDS)
def test_carried_index_equals_a_new_one(seed: int) -> None:
    whole = world(seed)
    comparison = Comparison()
    policies = load_policy_set("ebbtide")
    faults = SeededFaultInjector(seed, tuple(node.name for node in whole.nodes), RATES)
    Simulation(whole, policies, observers=[comparison], faults=faults).run()
    assert comparison.compared > 100
