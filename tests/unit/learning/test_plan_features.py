"""Layouts of plans: degrees, placement and switches, averaged over layers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.domain.gpu_sets import GpuShape
from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan, Recompute, Schedule, Stage
from scheduler.learning.plan_features import describe_layout

PLAIN = LayerStrategy(4, tp=2, dp=4)


def plan(*strategies: LayerStrategy) -> ParallelPlan:
    layers = sum(strategy.layers for strategy in strategies)
    return ParallelPlan(Schedule(), 2, 16, 1.0, 32.0, 0, (Stage(0, layers - 1, "a100-80g", 8, strategies),))


def test_degrees_and_micro_batches_count_in_doublings() -> None:
    layout = describe_layout(plan(PLAIN), GpuShape.packed("a100-80g", 8, 4))
    assert layout == (1, 2, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0)


def test_strategies_count_by_their_layers() -> None:
    full = replace(PLAIN, layers=12, zero=3, shard_group=4, recompute=Recompute.FULL)
    layout = describe_layout(plan(PLAIN, full), GpuShape.packed("a100-80g", 8, 8))
    assert layout[-4:] == (0.75, 0.0, 0.75, 0.0)


def test_uneven_nodes_differ_from_even_ones() -> None:
    even = describe_layout(plan(PLAIN), GpuShape.from_node_counts([("a100-80g", 4)] * 2))
    uneven = describe_layout(plan(PLAIN), GpuShape.from_node_counts([("a100-80g", 7), ("a100-80g", 1)]))
    assert uneven[7] == pytest.approx(0.807, abs=1e-3)
    assert (*uneven[:7], *uneven[8:]) == (*even[:7], *even[8:])
