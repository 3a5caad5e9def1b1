"""Small random requests: a few layers on a few GPUs, for which computation, links and memory all matter."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from scheduler.domain.gpu_sets import GpuShape
from scheduler.solver.profiles.hardware_profile import Dimension, HardwareProfile, Precision
from scheduler.solver.profiles.model_profile import Attachment, LayerProfile, ModelProfile
from scheduler.solver.request import SolveRequest
from tests.unit.solver.costs.random_layers import random_hardware

THEMES = (
    (Dimension.INTERLEAVE, Dimension.PIPELINE),
    (Dimension.INTERLEAVE, Dimension.GPIPE, Dimension.PIPELINE),
    (Dimension.FSDP, Dimension.ZERO, Dimension.HYBRID_SHARD),
    (Dimension.TENSOR, Dimension.SEQUENCE_SHARDING),
    (Dimension.ULYSSES, Dimension.RING, Dimension.TENSOR),
    (Dimension.EXPERT, Dimension.HYBRID_SHARD, Dimension.FSDP),
    (Dimension.RECOMPUTE, Dimension.SELECTIVE_RECOMPUTE, Dimension.OFFLOAD),
)
"""Dimensions that matter to one another."""


def toy_request(rng: random.Random, *, gpus: Sequence[int], layers: Sequence[int], models: int = 1) -> SolveRequest:
    """With GPUs of each model and layers drawn from what is given. Memory has no limit.

    Mostly pipelines, as single stages are the simpler case.
    """
    themes = rng.sample(THEMES, k=rng.choice([1, 1, 2]))
    dimensions = {Dimension.DATA, *(dimension for theme in themes for dimension in theme if rng.random() < 0.8)}
    dimensions |= {Dimension.PIPELINE} if rng.random() < 0.75 else set()
    precision = rng.choice(list(Precision))
    hardware = tuple(_hardware(rng, f"toy-{number}", dimensions, precision) for number in range(models))
    counts = [(profile.gpu, share) for profile in hardware for share in _nodes(rng, rng.choice(gpus))]
    model = toy_model(rng, rng.choice(layers), moe=Dimension.EXPERT in dimensions)
    return SolveRequest(
        model=_partly_frozen(model),
        hardware=hardware,
        shape=GpuShape.from_node_counts(counts),
        global_batch=rng.choice([1, 2, 2, 4, 4, 6, 8]),
    )


def _partly_frozen(model: ModelProfile) -> ModelProfile:
    """Return the model mostly unchanged, otherwise with its first layers frozen, often all, and some of these cached.

    It uses a generator of its own, so that everything else of a request stays the same.
    """
    own = random.Random(f"frozen {model.parameters} {model.flops_per_sample}")
    frozen = model.with_frozen_layers(
        own.choice([0, 0, 0, 0, 1, model.layer_count // 2, own.randint(0, model.layer_count)])
    )
    return frozen.with_cached_layers(own.choice([0, own.randint(0, frozen.frozen_layer_count)]))


def _hardware(rng: random.Random, gpu: str, dimensions: set[Dimension], precision: Precision) -> HardwareProfile:
    """Return a GPU whose bandwidths and latencies lie in a range in which no single cost dominates."""
    drawn = random_hardware(rng, gpu)
    return replace(
        drawn,
        memory_bytes=10**15,
        reserve_bytes=rng.choice([0, 10**7]),
        reserve_ratio=rng.choice([0.0, 0.03]),
        precision=precision,
        peak_flops_per_s=10 ** rng.uniform(12.5, 14),
        intra_bandwidth_bytes_per_s=10 ** rng.uniform(9.5, 11.5),
        inter_bandwidth_bytes_per_s=10 ** rng.uniform(8.3, 10.5),
        intra_latency_s=10 ** rng.uniform(-6, -4.5),
        inter_latency_s=10 ** rng.uniform(-6, -4.5),
        iteration_overhead_s=rng.choice([0.0, 1e-3]),
        dimensions=frozenset(dimensions),
    )


def _nodes(rng: random.Random, gpus: int) -> list[int]:
    """Return the GPUs of each node: all in one, one in each, or two halves, which may be uneven."""
    halves = [gpus - gpus // 2, gpus // 2]
    return rng.choice([[gpus], [1] * gpus, halves if gpus > 1 else [gpus]])


def toy_model(rng: random.Random, layers: int, *, moe: bool = False) -> ModelProfile:
    """Return a model of `layers` layers in runs of equal ones; embedding and head may be large."""
    runs, left = [], layers
    tokens, experts = rng.choice([12, 12, 24, 7]), rng.choice([2, 4, 6])
    measured = rng.random() < 0.1
    while left:
        count = rng.randint(1, left)
        runs.append(_run(rng, count, tokens, experts if moe and rng.random() < 0.8 else 0, measured))
        left -= count
    return ModelProfile(
        name="toy",
        sequence_length=tokens,
        layers=tuple(runs),
        embedding=Attachment(parameters=rng.choice([0, 10**6])),
        head=Attachment(rng.choice([0.0, 1e10]), rng.choice([0, 10**6]), rng.choice([0, 10**7])),
        tied_embedding=rng.random() < 0.3,
    )


def _run(rng: random.Random, count: int, tokens: int, experts: int, measured: bool) -> LayerProfile:
    parameters, activations = rng.randint(10**5, 10**7), rng.randint(10**5, 4 * 10**7)
    heads = rng.choice([2, 4, 6, 12])
    seconds = 10 ** rng.uniform(-4, -2)
    return LayerProfile(
        layers=count,
        flops_per_sample=10 ** rng.uniform(9.5, 11),
        parameters=parameters,
        activation_bytes_per_sample=activations,
        replicated_activation_bytes_per_sample=rng.choice([0, activations // 4]),
        boundary_bytes_per_sample=rng.randint(10**4, 10**6),
        heads=heads,
        attention_flops_per_sample=rng.choice([0.0, 10 ** rng.uniform(8, 10.5)]),
        traffic_bytes_per_sample=rng.choice([0, rng.randint(1, 10**8)]),
        selective_bytes_per_sample=rng.choice([0, activations // 3]),
        tokens_per_sample=tokens,
        attention_heads=rng.choice([0, 2 * heads]),
        expert_parameters=parameters // 2 if experts else 0,
        experts=experts,
        experts_per_token=min(experts, 2),
        frozen=rng.random() < 0.1,
        forward_s_per_sample=tuple((degree, seconds * degree**-0.7) for degree in (1, 2)) if measured else (),
    )
