"""Instances of a complete search over toy models and GPUs: one per pipeline degree and number of micro-batches.

Sizes resemble real ones (A100 and H100 class GPUs, layers of 0.04 to 0.6 billion parameters), so that compute,
communication and memory have realistic proportions.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import product
from math import inf

import numpy as np

from scheduler.solver.costs.strategy_space import list_divisors
from scheduler.solver.instance import Floats, Instance, Ints, StageCosts

LATENCY_S = 1e-5
STRATEGIES_MAX = 12
TOKENS = 2048


@dataclass(frozen=True, slots=True, eq=False)
class ToyModel:
    """A chain of layers: the kind of each layer [L], and the hidden size of each kind [T, 1]."""

    types: Ints
    hidden: Floats

    @property
    def parameters(self) -> Floats:
        return np.asarray(12 * self.hidden**2)

    @property
    def boundary_bytes(self) -> Floats:
        """Of one sample."""
        return np.asarray(2 * TOKENS * self.hidden)


@dataclass(frozen=True, slots=True)
class ToyGpu:
    """Compute speed and link bandwidth of a group's GPUs. Links are slower for stages that span nodes of 4 GPUs."""

    flops_per_s: float
    bytes_per_s: float

    def across(self, width: int) -> float:
        return self.bytes_per_s / max(1.0, width / 4)


@dataclass(frozen=True, slots=True)
class ToyPair:
    """Pipeline degree, GPUs per stage, number of micro-batches and samples per micro-batch."""

    degree: int
    width: int
    micro_batches: int
    samples: int


def a_loop(seeded: random.Random, *, layers: int, kinds: int, gpus: int, batch: int, groups: int = 1) -> list[Instance]:
    """Return instances of `layers` layers of `kinds` kinds on `gpus` GPUs, with a random tight memory limit.

    With two groups, each has half of the stages, the second one is slower and smaller, and odd degrees are omitted.
    """
    drawn = [*range(kinds), *(seeded.randrange(kinds) for _ in range(layers - kinds))]
    hidden = np.array([[seeded.uniform(2048, 7168)] for _ in range(kinds)])
    model = ToyModel(np.sort(np.array(drawn)), hidden)
    fast = ToyGpu(seeded.choice([100e12, 300e12]), seeded.choice([20e9, 100e9, 200e9]))
    owned = (fast, ToyGpu(fast.flops_per_s * 0.6, fast.bytes_per_s * 0.5))[:groups]
    link_bytes_per_s = seeded.choice([5e9, 12e9, 25e9])
    pairs = [
        ToyPair(degree, gpus // degree, micro_batches, batch // micro_batches)
        for degree, micro_batches in product(list_divisors(gpus), list_divisors(batch))
        if degree <= layers and degree % groups == 0
    ]
    loop = [_an_instance(model, owned, pair, link_bytes_per_s) for pair in pairs]
    leanest, fastest = _needs(seeded.choice(sorted(loop, key=_floor_s)[:4]))
    limit = leanest + seeded.uniform(0.05, 0.95) * (fastest - leanest)
    return [replace(instance, capacity_bytes=(round(limit), round(0.75 * limit))[:groups]) for instance in loop]


def _an_instance(model: ToyModel, owned: tuple[ToyGpu, ...], pair: ToyPair, link_bytes_per_s: float) -> Instance:
    sent_bytes = model.boundary_bytes[model.types[:-1], 0] * pair.samples / pair.width
    hand_over_s = np.full((pair.degree - 1, len(owned), len(owned), len(model.types) + 1), inf)
    hand_over_s[..., 1:-1] = sent_bytes / link_bytes_per_s + LATENCY_S
    return Instance(
        types=model.types,
        costs=tuple(_costs(model, gpu, pair) for gpu in owned),
        counts=(pair.degree // len(owned),) * len(owned),
        capacity_bytes=(0,) * len(owned),
        in_flight=tuple(float(min(pair.micro_batches, pair.degree - at)) for at in range(pair.degree)),
        hand_over_s=hand_over_s,
        micro_batches=pair.micro_batches,
    )


def _costs(model: ToyModel, gpu: ToyGpu, pair: ToyPair) -> StageCosts:
    """Return the costs of tensor and data parallelism, with and without sharded states and recomputation."""
    options = [
        (tp, pair.width // tp, sharded, again)
        for sharded, again, tp in product((0, 1), (0, 1), list_divisors(pair.width))
        if pair.samples % (pair.width // tp) == 0 and not (sharded and tp == pair.width)
    ]
    tp, dp, sharded, again = np.array(options[:STRATEGIES_MAX], dtype=np.float64).T
    samples, bytes_per_s = pair.samples / dp, gpu.across(pair.width)
    weights, edge_bytes = model.parameters / tp, model.boundary_bytes * samples
    compute_s = 6 * TOKENS * weights * samples * (1 + again / 3) / (gpu.flops_per_s * 0.5 * tp**-0.1)
    tensor_s = edge_bytes * (6 + 2 * again) * (tp - 1) / tp / bytes_per_s + LATENCY_S * (tp > 1)
    data_s = 4 * weights * (dp - 1) / dp / bytes_per_s * (1 / pair.micro_batches + sharded)
    layouts, kept_bytes = np.unique(tp, return_inverse=True)[1], edge_bytes * (1 + (1 - again) * 16 / tp)
    shares = np.array([samples[layouts == number][0] for number in range(layouts.max() + 1)])
    moved = np.abs(np.subtract.outer(shares, shares)) / bytes_per_s
    return StageCosts(
        layouts=layouts,
        time_s=compute_s + tensor_s + data_s,
        state_bytes=(16 * weights / np.where(sharded, dp, 1)).astype(np.int64),
        kept_bytes=kept_bytes.astype(np.int64),
        working_bytes=(sharded * 4 * weights.max(axis=0)).astype(np.int64),
        reshard_s=model.boundary_bytes.reshape(-1, 1, 1) * moved,
        border_s=edge_bytes * 0.5 * (tp > 1) / bytes_per_s,
    )


def _floor_s(instance: Instance) -> float:
    total_s = float(instance.costs[0].time_s.min(axis=1)[instance.types].sum())
    return instance.objective.compute_time_s(total_s, total_s / instance.devices)


def _needs(instance: Instance) -> tuple[int, int]:
    """Return the memory of the first device for an even share of the layers, with the leanest and the fastest
    strategies.
    """
    costs, share = instance.costs[0], instance.layers // instance.devices
    needs = costs.compute_memory_bytes(instance.in_flight[0]) + costs.working_bytes // share
    fastest = needs[np.arange(len(needs)), costs.time_s.argmin(axis=1)]
    return share * int(needs.min(axis=1).max()), share * int(fastest.max())
