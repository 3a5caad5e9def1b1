"""The ledger that is carried from tick to tick against one that is worked out from nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from scheduler.domain.ledger import Ledger
from scheduler.policies.policy_set import policy_set
from scheduler.simulator.engine import Simulation
from scheduler.simulator.injector import SeededFaults
from scheduler.simulator.ticked import Ticked
from scheduler.simulator.traces import DemandChange
from tests.simulation.test_faults import RATES, world

SEEDS = (11, 12)
TICKS_BETWEEN = 7


def figures(ledger: Ledger) -> dict[str, Any]:
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

    def ticked(self, tick: Ticked) -> None:
        self.ticks += 1
        if self.ticks % TICKS_BETWEEN == 0:
            self.compared += 1
            assert figures(tick.after.ledger) == figures(Ledger.of(replace(tick.after, memo=None)))
            self.heard += len(tick.after.ledger.heard)
            for job_id, run in tick.after.ledger.heard.items():
                assert run.gpus is tick.after.jobs[job_id].allocation.target, "a run lies elsewhere than was heard"

    def demand_changed(self, change: DemandChange) -> None:
        """Nothing to compare."""


@pytest.mark.parametrize("seed", SEEDS)
def test_the_ledger_carried_along_is_the_one_made_from_nothing(seed: int) -> None:
    whole = world(seed)
    comparison = Comparison()
    policies = policy_set("ebbtide")
    faults = SeededFaults(seed, tuple(node.name for node in whole.nodes), RATES)
    Simulation(whole, policies, watchers=[comparison], faults=faults).run()
    assert comparison.compared > 100
    assert comparison.heard > 100
