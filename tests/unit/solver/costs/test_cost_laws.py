"""Laws of the cost model on random layers: omitted candidates cannot win, and better hardware never costs more."""

from __future__ import annotations

import random
from dataclasses import replace
from math import gcd

import numpy as np
import pytest

from scheduler.domain.parallel_plan import LayerStrategy
from scheduler.solver.costs.collectives import StageSetting
from scheduler.solver.costs.communication_time import compute_border_s, compute_reshard_s
from scheduler.solver.costs.layer_chain import Layer, LayerChain, build_layer_table
from scheduler.solver.costs.layer_memory import (
    compute_activation_bytes,
    compute_buffer_bytes,
    compute_host_activation_bytes,
    compute_host_bytes,
    compute_state_bytes,
)
from scheduler.solver.costs.layer_time import compute_layer_times
from scheduler.solver.costs.pipeline_costs import compute_stage_costs
from scheduler.solver.costs.strategy_space import DegreeLimits, StrategyCandidates, list_divisors
from scheduler.solver.instance import Floats, Ints
from scheduler.solver.plan_rules import find_strategy_error
from scheduler.solver.profiles.hardware_profile import Dimension
from tests.unit.solver.costs.random_layers import enumerate_strategies, random_hardware, random_layer

ROUNDING = 1 + 1e-9
WORLDS = [(gpus, node) for gpus in (1, 2, 4, 6, 8, 12) for node in list_divisors(gpus) if node != 3]


def _substitute(strategy: LayerStrategy, setting: StageSetting, batch: int, tokens: int) -> LayerStrategy:
    """Return the strategy that the lemmas prefer."""
    replicas = setting.gpus // strategy.tp
    dp = gcd(batch, replicas)
    factor = dp // strategy.dp
    out_of_ulysses = gcd(factor, strategy.ulysses)
    hardware = setting.hardware
    zero = strategy.zero
    if zero == 1 and batch == setting.global_batch and hardware.supports(Dimension.ZERO):
        zero = 2
    return replace(
        strategy,
        dp=dp,
        ulysses=strategy.ulysses // out_of_ulysses,
        ring=strategy.ring // (factor // out_of_ulysses),
        sequence_sharding=strategy.tp > 1
        and hardware.supports(Dimension.SEQUENCE_SHARDING)
        and tokens % (strategy.tp * (replicas // dp)) == 0,
        zero=zero,
    )


def _columns(
    strategies: list[LayerStrategy], kinds: tuple[Layer, ...], setting: StageSetting, batch: int
) -> list[Floats | Ints]:
    chosen = StrategyCandidates.from_strategies(strategies, micro_batches=setting.global_batch // batch, batch=batch)
    return [
        compute_layer_times(kinds, chosen, setting).total_s,
        compute_state_bytes(kinds, chosen, setting),
        compute_activation_bytes(kinds, chosen, setting),
        compute_buffer_bytes(kinds, chosen, setting)[None],
        *(each for each in _host_columns(kinds, chosen, setting) if each is not None),
        compute_border_s(build_layer_table(kinds), chosen.degrees, setting),
    ]


def _host_columns(
    kinds: tuple[Layer, ...], chosen: StrategyCandidates, setting: StageSetting
) -> tuple[Ints | None, Ints | None]:
    return compute_host_bytes(kinds, chosen, setting), compute_host_activation_bytes(kinds, chosen)


@pytest.mark.parametrize(("gpus", "node"), WORLDS)
def test_every_omitted_strategy_is_dominated(gpus: int, node: int) -> None:
    rng = random.Random(f"lemmas {gpus} {node}")
    left_out = 0
    for _ in range(4):
        kinds = tuple(random_layer(rng) for _ in range(2))
        kinds = (kinds[0], replace(kinds[1], experts=0, expert_parameters=0))
        batch = rng.choice([1, 2, 3, 4, 6, 8, 12])
        setting = StageSetting.for_stage(
            random_hardware(rng),
            node_gpus=node,
            gpus=gpus,
            global_batch=batch * rng.choice([1, 5]),
            node_gpus_min=(0, node, min(2 * node, gpus))[batch % 3],
        )
        limits = DegreeLimits.from_layers(kinds)
        allowed = [
            strategy
            for strategy in enumerate_strategies(gpus, limits.experts)
            if not find_strategy_error(strategy, limits, setting, batch)
        ]
        costed = compute_stage_costs(LayerChain(kinds), setting).get(setting.global_batch // batch)
        kept = {costed.build_strategy(number) for number in range(costed.costs.strategies)} if costed else set()
        assert kept <= set(allowed)
        gone = [strategy for strategy in allowed if strategy not in kept]
        if not gone:
            continue
        left_out += len(gone)
        instead = [_substitute(strategy, setting, batch, limits.tokens) for strategy in gone]
        assert set(instead) <= kept
        for own, other in zip(
            _columns(gone, kinds, setting, batch), _columns(instead, kinds, setting, batch), strict=True
        ):
            assert (other <= own * ROUNDING).all()
    print(f"{left_out} strategies left out")
    assert left_out > 0 or gpus == 1 or node == 1


@pytest.mark.parametrize("seed", range(20))
def test_sequence_sharding_never_raises_layout_change_cost(seed: int) -> None:
    rng = random.Random(f"layouts {seed}")
    setting = StageSetting.for_stage(random_hardware(rng), node_gpus=12, gpus=12, global_batch=8)
    degrees = (1, 2, 3, 4, 6, 12)
    plain = [(degree, False) for degree in degrees]
    sharded = [(degree, degree > 1) for degree in degrees]
    every = tuple(dict.fromkeys(plain + sharded))
    table = compute_reshard_s(build_layer_table((random_layer(rng),)), every, np.array([8]), setting)[0, 0]
    better = [every.index(sharded[degrees.index(degree)]) for degree, _ in every]
    assert (table[np.ix_(better, better)] <= table * ROUNDING).all()


BETTER = {
    "peak_flops_per_s": 3.0,
    "memory_bandwidth_bytes_per_s": 2.0,
    "intra_bandwidth_bytes_per_s": 3.0,
    "inter_bandwidth_bytes_per_s": 3.0,
    "intra_latency_s": 0.3,
    "inter_latency_s": 0.3,
    "intra_hop_s": 0.3,
    "inter_hop_s": 0.3,
    "launch_s": 0.3,
    "host_bandwidth_bytes_per_s": 2.0,
    "host_optimizer_s_per_parameter": 0.5,
    "unaligned_slowdown": 0.5,
    "gpus_per_nic": 0.5,
}
LEAST = {"unaligned_slowdown": 1.0, "gpus_per_nic": 1.0}


@pytest.mark.parametrize("seed", range(12))
def test_better_hardware_never_costs_more(seed: int) -> None:
    rng = random.Random(f"better {seed}")
    hardware = replace(random_hardware(rng), dimensions=frozenset(Dimension))
    kinds = tuple(random_layer(rng) for _ in range(3))
    node = rng.choice([2, 4, 8])
    setting = StageSetting.for_stage(hardware, node_gpus=node, gpus=8, global_batch=12, node_gpus_min=(0, 4)[node == 2])
    for field, factor in BETTER.items():
        better = replace(hardware, **{field: max(getattr(hardware, field) * factor, LEAST.get(field, 0.0))})
        for count, own in compute_stage_costs(LayerChain(kinds), setting).items():
            other = compute_stage_costs(LayerChain(kinds), replace(setting, hardware=better))[count]
            assert (other.costs.time_s <= own.costs.time_s * ROUNDING).all(), field
            assert (other.costs.reshard_s <= own.costs.reshard_s * ROUNDING).all(), field
            assert (other.costs.border_s <= own.costs.border_s * ROUNDING).all(), field
            assert (other.costs.kept_bytes == own.costs.kept_bytes).all()
