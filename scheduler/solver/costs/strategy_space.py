"""The strategies of a layer: parallel degrees on the GPUs of a stage, with sharding, recompute and offload.

tp x dp x ulysses x ring = GPUs of the stage. Ranks are numbered with tp varying fastest, then ulysses, ring and dp. The
dp x ulysses x ring ranks with the same tensor rank are *replicas*: they hold the same weights, or shards of them.

All ranks of a sequence hold equally many of its tokens. A rank of a ring holds two equal chunks, one from the front and
one from the back (zigzag), so that the causal mask gives all ranks the same amount of work. Its Ulysses ranks share
both chunks equally.

Strategies that cannot win are left out. A property test covers each of these lemmas:

* Sequences are split only if samples cannot be. With R replicas and micro-batches of b samples, dp = gcd(b, R). A
  smaller dp leaves a factor f of ulysses x ring that also divides b / dp. Moving f to dp changes neither rows, weights,
  replicas nor memory, and makes the Ulysses and ring groups smaller; token counts that divided before still do.
* Tensor parallelism shards the sequence if the worker supports it and the tokens divide. A reduce-scatter and an
  all-gather take the time of the all-reduce that they replace (the group is within a node), element-wise work and kept
  activations shrink, and a border needs no gather (Korthikanti et al., arXiv 2205.05198, section 4.2.2).
* ZeRO-1 is left out if the worker supports ZeRO-2 and there is one micro-batch: both reduce once, and ZeRO-2 holds
  less.

Parameters in host memory are sharded over all replicas, so that each byte passes one host link (ZeRO-Infinity, arXiv
2104.07857, section 6.1), or belong to the only replica. Activations in host memory are the inputs of layers that are
fully recomputed (section 5.1.2).

Limits of the request (`PlanLimits`) can forbid the strategy that a lemma relies on. The lemma is then not used.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from math import gcd, isqrt, lcm

import numpy as np
from numpy.typing import NDArray

from scheduler.domain.parallel_plan import LayerStrategy, Recompute
from scheduler.domain.plan_limits import NO_LIMITS, SHARDINGS, PlanDimension, PlanLimits
from scheduler.solver.costs.layer_chain import Layer
from scheduler.solver.instance import Ints
from scheduler.solver.profiles.hardware_profile import Dimension

RECOMPUTES = (Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL)
"""A recompute column holds positions in this tuple."""


def list_divisors(number: int) -> list[int]:
    """Return all divisors of `number` (at least 1), ascending."""
    small = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


@dataclass(frozen=True, slots=True)
class DegreeLimits:
    """The degrees that all layers of a model allow.

    Attributes:
        heads: a multiple of every tensor degree, as the greatest common divisor over the layers.
        attention_heads: a multiple of tensor x Ulysses.
        tokens: a multiple of `compute_token_multiple` of Ulysses and ring.
        experts: a multiple of every expert degree; 0 for a model without experts.
        measured: tensor degrees for which all layers with measured times have one; empty if no layer has measured
            times.
    """

    heads: int
    attention_heads: int
    tokens: int
    experts: int
    measured: frozenset[int]

    @classmethod
    def from_layers(cls, layers: tuple[Layer, ...]) -> DegreeLimits:
        figures = [frozenset(degree for degree, _ in layer.measured_s) for layer in layers if layer.measured_s]
        return cls(
            heads=gcd(*(layer.heads for layer in layers)),
            attention_heads=gcd(*(layer.attention_heads for layer in layers)),
            tokens=gcd(*(layer.tokens for layer in layers)),
            experts=gcd(*(layer.experts for layer in layers)),
            measured=frozenset.intersection(*figures) if figures else frozenset(),
        )


@dataclass(frozen=True, slots=True, eq=False)
class ParallelDegrees:
    """Candidate degrees as columns [B], by ascending number of micro-batches.

    `sharded` is sequence sharding (0 or 1).
    """

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
def enumerate_degrees(
    limits: DegreeLimits,
    dimensions: frozenset[Dimension],
    node_gpus: int,
    gpus: int,
    global_batch: int,
    *,
    plan_limits: PlanLimits = NO_LIMITS,
) -> ParallelDegrees:
    """Return all degrees on `gpus` GPUs that can win, for every divisor of the batch; possibly none."""
    rows = []
    tensor_max = plan_limits.compute_degree_max(PlanDimension.TENSOR, gpus)
    expert_max = plan_limits.compute_degree_max(PlanDimension.EXPERT, gpus)
    context_max = tuple(
        plan_limits.compute_degree_max(dimension, gpus) for dimension in (PlanDimension.ULYSSES, PlanDimension.RING)
    )
    tensor_degrees = _list_tensor_degrees(limits, dimensions, gcd(node_gpus, gpus))
    for micro_batches in list_divisors(global_batch):
        batch = global_batch // micro_batches
        for tp in (tp for tp in tensor_degrees if tp <= tensor_max):
            replicas = gpus // tp
            expert_degrees = [ep for ep in _list_expert_degrees(limits, dimensions, replicas) if ep <= expert_max]
            for dp in _list_data_degrees(batch, replicas, plan_limits):
                for ulysses, ring in _list_context_degrees(limits, dimensions, tp, replicas // dp, context_max):
                    can_shard = (
                        tp > 1
                        and Dimension.SEQUENCE_SHARDING in dimensions
                        and limits.tokens % (tp * ulysses * ring) == 0
                    )
                    rows += [
                        (micro_batches, batch // dp, tp, sharded, dp, ulysses, ring, ep)
                        for sharded in _list_shardings(can_shard, plan_limits)
                        for ep in expert_degrees
                    ]
    return ParallelDegrees(*np.array(rows, dtype=np.int64).reshape(-1, 8).T)


def compute_token_multiple(ulysses: int, ring: int) -> int:
    """Return the number that the tokens of a sequence must be a multiple of, so that all ranks hold equally many."""
    return ring * lcm(2, ulysses) if ring > 1 else ulysses


def _list_tensor_degrees(limits: DegreeLimits, dimensions: frozenset[Dimension], node_gpus: int) -> list[int]:
    """Return the divisors of a node's GPUs, restricted to measured degrees if any are measured."""
    degrees = list_divisors(gcd(node_gpus, limits.heads)) if Dimension.TENSOR in dimensions else [1]
    return [degree for degree in degrees if not limits.measured or degree in limits.measured]


def _list_data_degrees(batch: int, replicas: int, plan_limits: PlanLimits) -> list[int]:
    """Return the data-parallel degrees: only the largest, unless limits may forbid it."""
    largest = gcd(batch, replicas)
    degrees = [largest]
    if plan_limits.may_forbid(PlanDimension.DATA):
        most = plan_limits.compute_degree_max(PlanDimension.DATA, largest)
        degrees = [degree for degree in list_divisors(largest) if degree <= most]
    samples_max = plan_limits.replica_samples_max
    return degrees if samples_max is None else [degree for degree in degrees if batch // degree <= samples_max]


def _list_shardings(can_shard: bool, plan_limits: PlanLimits) -> tuple[int, ...]:
    """Return the options of sequence sharding: used wherever possible, unless limits may forbid it."""
    if not can_shard or not plan_limits.allows(PlanDimension.SEQUENCE_SHARDING):
        return (0,)
    return (0, 1) if plan_limits.is_paired(PlanDimension.SEQUENCE_SHARDING) else (1,)


def _list_context_degrees(
    limits: DegreeLimits, dimensions: frozenset[Dimension], tp: int, context: int, largest: tuple[int, ...]
) -> list[tuple[int, int]]:
    """Return pairs (ulysses, ring) with product `context`, both up to a largest degree.

    The heads limit only Ulysses (USP, arXiv 2405.07719).
    """
    pairs = [(ulysses, context // ulysses) for ulysses in list_divisors(context)]
    return [
        (ulysses, ring)
        for ulysses, ring in pairs
        if ulysses <= largest[0]
        and ring <= largest[1]
        and limits.tokens % compute_token_multiple(ulysses, ring) == 0
        and (ulysses == 1 or (Dimension.ULYSSES in dimensions and limits.attention_heads % (tp * ulysses) == 0))
        and (ring == 1 or Dimension.RING in dimensions)
    ]


def _list_expert_degrees(limits: DegreeLimits, dimensions: frozenset[Dimension], replicas: int) -> list[int]:
    """Return the degrees that divide both experts and replicas; 1 if no layer has experts."""
    if not limits.experts or Dimension.EXPERT not in dimensions:
        return [1]
    return list_divisors(gcd(limits.experts, replicas))


@dataclass(frozen=True, slots=True, eq=False)
class StrategyCandidates:
    """Candidate strategies as columns [N].

    `degree_index` points into `degrees`; `hybrid` is 1 for ZeRO-3 within a node. `offload` is 1 for optimizer state in
    host memory, `streamed` for parameters and gradients, and `inputs_offload` for the inputs of layers.
    """

    degrees: ParallelDegrees
    degree_index: Ints
    zero: Ints
    hybrid: Ints
    shard_group: Ints
    recompute: Ints
    offload: Ints
    streamed: Ints
    inputs_offload: Ints

    @property
    def micro_batches(self) -> Ints:
        return self.degrees.micro_batches[self.degree_index]

    def select(self, chosen: NDArray[np.bool_]) -> StrategyCandidates:
        """Return the candidates for which `chosen` [N] is true."""
        columns = (getattr(self, field.name)[chosen] for field in fields(self) if field.name != "degrees")
        return StrategyCandidates(self.degrees, *columns)

    def use(self, dimension: PlanDimension) -> NDArray[np.bool_]:
        """Return [N]: whether each candidate uses the dimension; false for those of pipelines."""
        degrees, at = self.degrees, self.degree_index
        if dimension in SHARDINGS:
            level = np.where(self.hybrid == 1, SHARDINGS.index(PlanDimension.HYBRID_SHARD), self.zero)
            return np.asarray((level == SHARDINGS.index(dimension)) & (degrees.replicas[at] > 1))
        uses = {
            PlanDimension.DATA: degrees.dp[at] > 1,
            PlanDimension.TENSOR: degrees.tp[at] > 1,
            PlanDimension.SEQUENCE_SHARDING: degrees.sharded[at] == 1,
            PlanDimension.ULYSSES: degrees.ulysses[at] > 1,
            PlanDimension.RING: degrees.ring[at] > 1,
            PlanDimension.EXPERT: degrees.ep[at] > 1,
            PlanDimension.RECOMPUTE: self.recompute == RECOMPUTES.index(Recompute.FULL),
            PlanDimension.SELECTIVE_RECOMPUTE: self.recompute == RECOMPUTES.index(Recompute.SELECTIVE),
            PlanDimension.OFFLOAD: self.offload == 1,
            PlanDimension.OFFLOAD_PARAMETERS: self.streamed == 1,
            PlanDimension.OFFLOAD_ACTIVATIONS: self.inputs_offload == 1,
        }
        return np.asarray(uses.get(dimension, np.zeros(len(at), dtype=np.bool_)))

    @classmethod
    def from_strategies(cls, strategies: list[LayerStrategy], *, micro_batches: int, batch: int) -> StrategyCandidates:
        """Return the given strategies, one per column, for `micro_batches` micro-batches of `batch` samples."""
        columns = np.array(
            [
                (
                    micro_batches,
                    batch // strategy.dp,
                    strategy.tp,
                    strategy.sequence_sharding,
                    strategy.dp,
                    strategy.ulysses,
                    strategy.ring,
                    strategy.ep,
                )
                for strategy in strategies
            ],
            dtype=np.int64,
        )
        degrees = ParallelDegrees(*columns.T)
        groups = np.array([strategy.shard_group for strategy in strategies], dtype=np.int64)
        zero = np.array([strategy.zero for strategy in strategies], dtype=np.int64)
        return cls(
            degrees=degrees,
            degree_index=np.arange(len(strategies)),
            zero=zero,
            hybrid=((zero == 3) & (groups < degrees.replicas)).astype(np.int64),
            shard_group=groups,
            recompute=np.array([RECOMPUTES.index(strategy.recompute) for strategy in strategies], dtype=np.int64),
            offload=np.array([strategy.offload for strategy in strategies], dtype=np.int64),
            streamed=np.array([strategy.offload_parameters for strategy in strategies], dtype=np.int64),
            inputs_offload=np.array([strategy.offload_activations for strategy in strategies], dtype=np.int64),
        )

    def build_strategy(self, number: int) -> LayerStrategy:
        """Return candidate `number` as the strategy of one layer."""
        degrees, index = self.degrees, self.degree_index[number]
        return LayerStrategy(
            layers=1,
            tp=int(degrees.tp[index]),
            sequence_sharding=bool(degrees.sharded[index]),
            dp=int(degrees.dp[index]),
            zero=int(self.zero[number]),
            shard_group=int(self.shard_group[number]),
            ulysses=int(degrees.ulysses[index]),
            ring=int(degrees.ring[index]),
            ep=int(degrees.ep[index]),
            recompute=RECOMPUTES[self.recompute[number]],
            offload=bool(self.offload[number]),
            offload_parameters=bool(self.streamed[number]),
            offload_activations=bool(self.inputs_offload[number]),
        )


@lru_cache(maxsize=1024)
def enumerate_candidates(
    limits: DegreeLimits,
    dimensions: frozenset[Dimension],
    node_gpus: int,
    gpus: int,
    global_batch: int,
    *,
    plan_limits: PlanLimits = NO_LIMITS,
) -> StrategyCandidates:
    """Return every strategy on a stage of `gpus` GPUs that can win, by ascending number of micro-batches."""
    base = enumerate_degrees(limits, dimensions, node_gpus, gpus, global_batch, plan_limits=plan_limits)
    variants = _list_variants(dimensions)
    index = np.repeat(np.arange(len(base.tp)), len(variants))
    zero, hybrid, recompute, offload, streamed, inputs_offload = np.tile(variants.T, len(base.tp))
    replicas, ep = base.replicas[index], base.ep[index]
    in_node = node_gpus // base.tp[index]
    group = np.where(zero == 0, 1, np.where(hybrid == 1, in_node, replicas))
    allowed = (zero == 0) | (replicas > 1)
    allowed &= (hybrid == 0) | ((in_node > 1) & (in_node < replicas) & ((in_node % ep == 0) | (ep % in_node == 0)))
    allowed &= (offload == 0) | (zero > 0) | (replicas == 1)
    # Whole parameters are streamed to the only replica; with several replicas, ZeRO-3 shards them.
    allowed &= (streamed == 0) | (zero == 3) | (replicas == 1)
    if Dimension.ZERO in dimensions and not plan_limits.may_forbid(PlanDimension.ZERO2):
        allowed &= (zero != 1) | (base.micro_batches[index] > 1)
    columns = zero, hybrid, group, recompute, offload, streamed, inputs_offload
    found = StrategyCandidates(base, index, *columns).select(allowed)
    return found if plan_limits == NO_LIMITS else found.select(_find_within_limits(found, plan_limits))


def _find_within_limits(candidates: StrategyCandidates, plan_limits: PlanLimits) -> NDArray[np.bool_]:
    """Return [N]: whether a candidate uses no excluded dimension, and no exclusive pair of dimensions."""
    within = np.ones(len(candidates.degree_index), dtype=np.bool_)
    for dimension in plan_limits.excluded:
        within &= ~candidates.use(dimension)
    for one, two in plan_limits.exclusive:
        within &= ~(candidates.use(one) & candidates.use(two))
    return within


def _list_variants(dimensions: frozenset[Dimension]) -> Ints:
    """Return rows (zero, hybrid, recompute, offload, streamed, inputs_offload) that the worker supports."""
    zeros = [(0, 0)]
    zeros += [(1, 0), (2, 0)] if Dimension.ZERO in dimensions else []
    zeros += [(3, 0)] if Dimension.FSDP in dimensions else []
    zeros += [(3, 1)] if Dimension.HYBRID_SHARD in dimensions else []
    recomputes = [0]
    recomputes += [1] if Dimension.SELECTIVE_RECOMPUTE in dimensions else []
    recomputes += [2] if Dimension.RECOMPUTE in dimensions else []
    offloads = [(0, 0)]
    offloads += [(1, 0)] if Dimension.OFFLOAD in dimensions else []
    offloads += [(1, 1)] if {Dimension.OFFLOAD, Dimension.OFFLOAD_PARAMETERS} <= dimensions else []
    moves_inputs = Dimension.OFFLOAD_ACTIVATIONS in dimensions
    rows = [
        (*zero, recompute, *offload, inputs_offload)
        for zero in zeros
        for offload in offloads
        if not offload[1] or zero in ((0, 0), (3, 0))
        for recompute in recomputes
        for inputs_offload in ((0, 1) if moves_inputs and recompute == 2 else (0,))
    ]
    return np.array(rows, dtype=np.int64)
