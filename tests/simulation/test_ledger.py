"""The ledger that is carried from tick to tick against one that is worked out from nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from scheduler.domain.snapshot_index import SnapshotIndex
from scheduler.scheduling.policies.policy_set import load_policy_set
from scheduler.simulator.demand import DemandChange
from scheduler.simulator.engine import Simulation, TickRecord
from scheduler.simulator.fault_injection import SeededFaultInjector
from tests.simulation.test_faults import RATES, world

SEEDS = (11, 12)
TICKS_BETWEEN = 7


def figures(ledger: SnapshotIndex) -> dict[str, Any]:
    """All that it says, without the mappings it stands for and without counts that have come down to nothing."""
    parts = {
        name: part
        for name, part in vars(ledger).items()
        if name not in ("pools", "nodes", "loans", "jobs", "heard", "heard_nodes", "_job_sets")
    }
    return {
        name: {key: value for key, value in part.items() if value} if isinstance(part, dict) else part
        for name, part in parts.items()
    }


class Comparison:
    def __init__(self) -> None:
        self.ticks = 0
        self.compared = 0
        self.heard = 0

    def on_tick(self, tick: TickRecord) -> None:
        self.ticks += 1
        if self.ticks % TICKS_BETWEEN == 0:
            self.compared += 1
            assert figures(tick.after.index) == figures(SnapshotIndex.build(replace(tick.after, cached_index=None)))
            self.heard += len(tick.after.index.observed_runs)
            for job_id, run in tick.after.index.observed_runs.items():
                assert run.gpus is tick.after.jobs[job_id].allocation.target, "a run lies elsewhere than was heard"

    def on_demand_change(self, change: DemandChange) -> None:
        """Nothing to compare."""


@pytest.mark.parametrize("seed", SEEDS)
def test_the_ledger_carried_along_is_the_one_made_from_nothing(seed: int) -> None:
    whole = world(seed)
    comparison = Comparison()
    policies = load_policy_set("ebbtide")
    faults = SeededFaultInjector(seed, tuple(node.name for node in whole.nodes), RATES)
    Simulation(whole, policies, observers=[comparison], faults=faults).run()
    assert comparison.compared > 100
    assert comparison.heard > 100
