"""How the work of a stage may be spread over its GPUs: the degrees, for every number of micro-batches at once.

tp x dp x ulysses x ring = GPUs of the stage. Ranks are numbered with tp varying fastest, then ulysses, ring, dp. The
dp x ulysses x ring ranks that share a tensor rank are *replicas*: they hold the same weights, or shards of them.

All ranks of a sequence hold as many of its tokens. A rank of a ring holds two equal chunks of them, one from the front
and one from the back (zigzag), so that the causal mask leaves all ranks as much to do; its Ulysses ranks share both
alike.

Left out are spreads that cannot win (each lemma has a property test):

* Sequences are split only where samples cannot be. With R replicas and micro-batches of b samples, dp = gcd(b, R).
  A smaller dp leaves a factor f of ulysses x ring that also divides b / dp. Moving f over to dp changes neither
  rows, weights, replicas nor memory, and shortens the groups that ulysses and ring talk in; tokens that divided before
  still do.
* Tensor parallelism shards the sequence wherever the worker can and the tokens divide. A reduce-scatter and all-gather
  take the time of the all-reduce that they replace (the group is inside a node), element-wise work and kept activations
  shrink, and a border needs no gather (Korthikanti et al., arXiv 2205.05198, section 4.2.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import gcd, lcm

import numpy as np

from scheduler.solver.costs.chain import Layer
from scheduler.solver.costs.divisors import divisors
from scheduler.solver.instance import Ints
from scheduler.solver.profiles.hardware_profile import Dimension


@dataclass(frozen=True, slots=True)
class Limits:
    """What the layers of a model allow, all together.

    Attributes:
        heads, attention_heads, tokens: every tensor degree divides the first, tensor x Ulysses the second, the
            `token_multiple` of Ulysses x ring the third (greatest common divisors over the layers).
        experts: every expert degree divides it; 0 for a model without experts.
        measured: tensor degrees with measured times in all layers that have some; empty where none has.
    """

    heads: int
    attention_heads: int
    tokens: int
    experts: int
    measured: frozenset[int]

    @classmethod
    def of(cls, layers: tuple[Layer, ...]) -> Limits:
        figures = [frozenset(degree for degree, _ in layer.measured_s) for layer in layers if layer.measured_s]
        return cls(
            heads=gcd(*(layer.heads for layer in layers)),
            attention_heads=gcd(*(layer.attention_heads for layer in layers)),
            tokens=gcd(*(layer.tokens for layer in layers)),
            experts=gcd(*(layer.experts for layer in layers)),
            measured=frozenset.intersection(*figures) if figures else frozenset(),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Spreads:
    """Candidate spreads as columns [B], by ascending number of micro-batches. `sharded` is sequence sharding (0, 1)."""

    micro_batches: Ints
    samples: Ints
    tp: Ints
    sharded: Ints
    dp: Ints
    ulysses: Ints
    ring: Ints
    ep: Ints

    @property
    def replicas(self) -> Ints:
        return self.dp * self.context

    @property
    def context(self) -> Ints:
        return self.ulysses * self.ring


@lru_cache(maxsize=1024)
def spreads(limits: Limits, dimensions: frozenset[Dimension], node_gpus: int, gpus: int, global_batch: int) -> Spreads:
    """Every spread of `gpus` GPUs that may win, for every divisor of the batch; possibly none."""
    rows = []
    tensor_degrees = _tensor_degrees(limits, dimensions, gcd(node_gpus, gpus))
    for micro_batches in divisors(global_batch):
        batch = global_batch // micro_batches
        for tp in tensor_degrees:
            replicas = gpus // tp
            dp = gcd(batch, replicas)
            may_shard = tp > 1 and Dimension.SEQUENCE_SHARDING in dimensions
            for ulysses, ring in _context_degrees(limits, dimensions, tp, replicas // dp):
                sharded = int(may_shard and limits.tokens % (tp * ulysses * ring) == 0)
                rows += [
                    (micro_batches, batch // dp, tp, sharded, dp, ulysses, ring, ep)
                    for ep in _expert_degrees(limits, dimensions, replicas)
                ]
    return Spreads(*np.array(rows, dtype=np.int64).reshape(-1, 8).T)


def token_multiple(ulysses: int, ring: int) -> int:
    """What the tokens of a sequence must be a multiple of, so that all ranks that share it hold as many."""
    return ring * lcm(2, ulysses) if ring > 1 else ulysses


def _tensor_degrees(limits: Limits, dimensions: frozenset[Dimension], node_gpus: int) -> list[int]:
    """Divisors of a node, so that no tensor-parallel group leaves it, that have measured times where any have."""
    degrees = divisors(gcd(node_gpus, limits.heads)) if Dimension.TENSOR in dimensions else [1]
    return [degree for degree in degrees if not limits.measured or degree in limits.measured]


def _context_degrees(limits: Limits, dimensions: frozenset[Dimension], tp: int, context: int) -> list[tuple[int, int]]:
    """Pairs (ulysses, ring) with product `context`; heads limit the first alone (USP, arXiv 2405.07719)."""
    pairs = [(ulysses, context // ulysses) for ulysses in divisors(context)]
    return [
        (ulysses, ring)
        for ulysses, ring in pairs
        if limits.tokens % token_multiple(ulysses, ring) == 0
        and (ulysses == 1 or (Dimension.ULYSSES in dimensions and limits.attention_heads % (tp * ulysses) == 0))
        and (ring == 1 or Dimension.RING in dimensions)
    ]


def _expert_degrees(limits: Limits, dimensions: frozenset[Dimension], replicas: int) -> list[int]:
    """Expert parallelism splits the experts over replicas: its degree divides both; 1 where no layer has experts."""
    if not limits.experts or Dimension.EXPERT not in dimensions:
        return [1]
    return divisors(gcd(limits.experts, replicas))
