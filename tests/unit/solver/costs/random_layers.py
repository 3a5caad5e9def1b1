"""Random layers, GPUs and strategies for the laws of the cost model."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from scheduler.domain.parallel_plan import LayerStrategy, Recompute
from scheduler.solver.costs.layer_chain import Layer
from scheduler.solver.costs.strategy_space import list_divisors
from scheduler.solver.profiles.hardware_profile import Dimension, HardwareProfile, Precision


def random_layer(rng: random.Random) -> Layer:
    """Return a layer whose heads, tokens and experts have many divisors, so that few degrees are ruled out."""
    parameters = rng.randint(10**4, 10**8)
    experts = rng.choice([0, 0, 4, 12])
    activations = rng.randint(10**4, 10**8)
    boundary = rng.randint(10**3, 10**7)
    heads = rng.choice([12, 24, 48])
    trained = rng.random() < 0.8
    layer = Layer(
        flops=10 ** rng.uniform(8, 13),
        attention_flops=rng.choice([0.0, 10 ** rng.uniform(8, 13)]),
        attached_flops=rng.choice([0.0, 10 ** rng.uniform(8, 12)]),
        traffic_bytes=rng.choice([0, rng.randint(1, 10**9)]),
        parameters=parameters,
        expert_parameters=parameters // 2 if experts else 0,
        unit_parameters=rng.choice([parameters, parameters * 2]),
        activation_bytes=activations,
        selective_bytes=rng.choice([0, activations // 3]),
        replicated_bytes=rng.randint(0, 10**8),
        boundary_bytes=boundary,
        attached_bytes=rng.choice([0, rng.randint(1, 10**8)]),
        attached_traffic_bytes=rng.choice([0, rng.randint(1, 10**8)]),
        attached_messages=rng.choice([0, 1, 2]),
        product_parameters=rng.choice([0, parameters // 2]),
        columns=(0, 50_304, 50_257, 12)[parameters % 4],
        tied_parameters=rng.choice([0, parameters // 2]),
        tied_inside=rng.random() < 0.5,
        tokens=rng.choice([48, 96, 1536]),
        heads=heads // rng.choice([1, 2]),
        attention_heads=heads,
        tensor_messages=rng.choice([0, 1, 2, 3]),
        experts=experts,
        experts_per_token=min(experts, 2),
        trained=trained,
        backward=trained or rng.random() < 0.7,
        attached_trained=trained or parameters % 2 > 0,
        trained_head_parameters=0 if trained else (0, parameters // 4)[parameters % 2],
        computed=True,
        cached_bytes=0,
        measured_s=rng.choice([(), (), tuple((degree, rng.uniform(1e-5, 1e-2)) for degree in (1, 2, 3, 4, 6))]),
        head_width=(0, 64, 128)[heads % 5 % 3],
        attention_kernel=parameters % 5,
        overlaps_tensor=parameters % 2 > 0,
        expert_imbalance=(0.0, 1.7)[activations % 2],
    )
    if layer.backward or parameters % 3:
        return layer
    return replace(layer, computed=False, cached_bytes=(0, boundary)[parameters % 2])


def random_hardware(rng: random.Random, gpu: str = "drawn") -> HardwareProfile:
    """Return a GPU with any relation between computation, links and memory."""
    intra = 10 ** rng.uniform(8, 12)
    chosen = frozenset(dimension for dimension in Dimension if rng.random() < 0.8)
    return HardwareProfile(
        gpu=gpu,
        memory_bytes=10**10,
        reserve_bytes=0,
        precision=rng.choice(list(Precision)),
        peak_flops_per_s=10 ** rng.uniform(11, 15),
        efficiency=rng.uniform(0.2, 1.0),
        memory_bandwidth_bytes_per_s=10 ** rng.uniform(10, 13),
        intra_bandwidth_bytes_per_s=intra,
        intra_latency_s=10 ** rng.uniform(-7, -3),
        inter_bandwidth_bytes_per_s=intra * 10 ** rng.uniform(-2, 0.5),
        inter_latency_s=10 ** rng.uniform(-7, -3),
        overlap_coefficient=rng.uniform(1.0, 2.5),
        dimensions=chosen | {Dimension.DATA},
        attention_efficiency=rng.choice([0.0, 0.5]),
        attention_generation=1 + int(intra) % 3,
        launch_s=rng.choice([0.0, 1e-3]),
        intra_hop_s=rng.choice([0.0, 10 ** rng.uniform(-7, -4)]),
        inter_hop_s=rng.choice([0.0, 10 ** rng.uniform(-7, -4)]),
        gradient_overlap=rng.choice([0.0, 1.0, rng.random()]),
        expert_imbalance=rng.uniform(1.0, 2.0),
        unaligned_slowdown=(1.0, 2.5)[int(intra) % 2],
        gpus_per_nic=(1, 2, 4)[int(intra) % 3],
        expert_priority=rng.random() < 0.5,
        host_bandwidth_bytes_per_s=10 ** rng.uniform(9, 11),
        host_optimizer_s_per_parameter=10 ** rng.uniform(-10, -8),
    )


def enumerate_strategies(gpus: int, experts: int) -> Iterator[LayerStrategy]:
    """Yield all strategies whose degrees multiply to `gpus`, whether or not a worker supports them."""
    for tp, ulysses, ring in product(list_divisors(gpus), repeat=3):
        if gpus % (tp * ulysses * ring):
            continue
        replicas = gpus // tp
        for ep, sharded in product(list_divisors(experts or 1), (False, True)):
            for zero, group in [
                (0, 1),
                (1, replicas),
                (2, replicas),
                *((3, shards) for shards in list_divisors(replicas)),
            ]:
                for recompute, (offload, streamed), inputs in product(Recompute, _OFFLOADS, (False, True)):
                    yield LayerStrategy(
                        layers=1,
                        tp=tp,
                        sequence_sharding=sharded,
                        dp=gpus // (tp * ulysses * ring),
                        zero=zero,
                        shard_group=group,
                        ulysses=ulysses,
                        ring=ring,
                        ep=ep,
                        recompute=recompute,
                        offload=offload,
                        offload_parameters=streamed,
                        offload_activations=inputs,
                    )


_OFFLOADS = ((False, False), (True, False), (True, True))
