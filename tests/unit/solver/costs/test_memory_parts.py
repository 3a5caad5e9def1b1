"""The parts of a plan's memory add up to its total, for any layers, hardware and strategies."""

from __future__ import annotations

import random

import numpy as np
import pytest

from scheduler.solver.costs.collectives import StageSetting
from scheduler.solver.costs.layer_memory import compute_state_bytes
from scheduler.solver.costs.memory_parts import compute_state_parts
from scheduler.solver.costs.strategy_space import DegreeLimits, StrategyCandidates
from scheduler.solver.plan_rules import find_strategy_error
from tests.unit.solver.costs.random_layers import enumerate_strategies, random_hardware, random_layer


@pytest.mark.parametrize("gpus", [1, 4, 6])
def test_state_by_purpose_adds_up_to_the_state(gpus: int) -> None:
    rng = random.Random(f"memory parts {gpus}")
    checked = 0
    for _ in range(8):
        kinds = tuple(random_layer(rng) for _ in range(3))
        hardware = random_hardware(rng)
        setting = StageSetting.for_stage(hardware, node_gpus=gpus, gpus=gpus, global_batch=12, node_gpus_min=0)
        limits = DegreeLimits.from_layers(kinds)
        strategies = [
            strategy
            for strategy in enumerate_strategies(gpus, limits.experts)
            if not find_strategy_error(strategy, limits, setting, 12)
        ]
        if not strategies:
            continue
        chosen = StrategyCandidates.from_strategies(strategies, micro_batches=1, batch=12)
        parts = compute_state_parts(kinds, chosen, setting)
        whole = compute_state_bytes(kinds, chosen, setting)
        total = parts.parameters + parts.gradients + parts.optimizer
        assert np.abs(total - whole).max() <= 1.0 + 1e-9 * whole.max()
        assert min(part.min() for part in (parts.parameters, parts.gradients, parts.optimizer)) >= 0
        checked += len(strategies)
    assert checked > 20
