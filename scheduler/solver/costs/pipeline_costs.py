"""Costs of a pipeline.

They comprise micro-batches in flight, hand-overs between stages, and the costs of all strategies of a stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import gcd

import numpy as np
from numpy.typing import NDArray

from scheduler.domain.parallel_plan import LayerStrategy, Schedule, ScheduleName
from scheduler.domain.plan_limits import NO_LIMITS, PlanDimension, PlanLimits
from scheduler.solver.costs.collectives import StageSetting, send_s
from scheduler.solver.costs.communication_time import compute_border_s, compute_reshard_s, list_layouts
from scheduler.solver.costs.layer_chain import Layer, LayerChain, build_layer_table
from scheduler.solver.costs.layer_memory import (
    compute_activation_bytes,
    compute_buffer_bytes,
    compute_host_activation_bytes,
    compute_host_bytes,
    compute_state_bytes,
)
from scheduler.solver.costs.layer_time import compute_layer_times
from scheduler.solver.costs.strategy_space import DegreeLimits, StrategyCandidates, enumerate_candidates
from scheduler.solver.instance import Floats, Ints, StageCosts
from scheduler.solver.profiles.hardware_profile import HardwareProfile


@dataclass(frozen=True, slots=True, eq=False)
class CostedStrategies:
    """The strategies of a stage at one number of micro-batches, and their costs.

    `costs` has one row per layer type (in order of first appearance in the chain) and one column per strategy.
    """

    costs: StageCosts
    _candidates: StrategyCandidates
    _numbers: Ints

    def build_strategy(self, number: int) -> LayerStrategy:
        """Return strategy `number` of the costs, for one layer."""
        return self._candidates.build_strategy(int(self._numbers[number]))

    def select(self, strategies: Ints) -> CostedStrategies:
        """Return only these strategies, in this order."""
        return CostedStrategies(self.costs.select_strategies(strategies), self._candidates, self._numbers[strategies])

    def use(self, dimension: PlanDimension) -> NDArray[np.bool_]:
        """Return [S]: whether each strategy uses the dimension."""
        return np.asarray(self._candidates.use(dimension)[self._numbers])


@lru_cache(maxsize=256)
def compute_stage_costs(
    layers: LayerChain, setting: StageSetting, plan_limits: PlanLimits = NO_LIMITS
) -> Mapping[int, CostedStrategies]:
    """Return the costs by number of micro-batches (divisors of the global batch) with at least one strategy.

    Strategies that cannot win, whatever the other layers do, are left out; see strategy_space. So are those beyond
    `plan_limits`.
    """
    kinds = layers.kinds
    candidates = enumerate_candidates(
        DegreeLimits.from_layers(kinds),
        setting.hardware.dimensions,
        setting.node_gpus,
        setting.gpus,
        setting.global_batch,
        plan_limits=plan_limits,
    )
    if not len(candidates.degree_index):
        return {}
    counts, firsts = np.unique(candidates.micro_batches, return_index=True)
    joint, changes_s = _compute_joint_costs(kinds, candidates, setting.global_batch // counts, setting)
    found = {}
    numbers = np.arange(len(candidates.degree_index))
    ends = [*firsts[1:].tolist(), len(candidates.degree_index)]
    for row, (count, first, end) in enumerate(zip(counts.tolist(), firsts.tolist(), ends, strict=True)):
        costs = StageCosts(
            layouts=joint.layouts[first:end],
            time_s=joint.time_s[:, first:end],
            state_bytes=joint.state_bytes[:, first:end],
            kept_bytes=joint.kept_bytes[:, first:end],
            working_bytes=joint.working_bytes[first:end],
            reshard_s=changes_s[row],
            border_s=joint.border_s[:, first:end],
            host_bytes=None if joint.host_bytes is None else joint.host_bytes[:, first:end],
            host_kept_bytes=None if joint.host_kept_bytes is None else joint.host_kept_bytes[:, first:end],
        )
        found[count] = CostedStrategies(costs, candidates, numbers[first:end])
    return found


def _compute_joint_costs(
    kinds: tuple[Layer, ...], candidates: StrategyCandidates, batches: Ints, setting: StageSetting
) -> tuple[StageCosts, Floats]:
    """Return the costs of all numbers of micro-batches side by side, and the changes of layout [C, T, K, K].

    The changes of layout depend on the number of micro-batches, so they are separate.
    """
    table, degrees = build_layer_table(kinds), candidates.degrees
    is_limited = setting.hardware.host_memory_bytes > 0
    layouts, numbers = list_layouts(degrees)
    changes_s = compute_reshard_s(table, layouts, batches, setting)
    costs = StageCosts(
        layouts=numbers[candidates.degree_index],
        time_s=compute_layer_times(kinds, candidates, setting).total_s,
        state_bytes=compute_state_bytes(kinds, candidates, setting),
        kept_bytes=compute_activation_bytes(kinds, candidates, setting),
        working_bytes=compute_buffer_bytes(kinds, candidates, setting),
        reshard_s=changes_s[0],
        border_s=compute_border_s(table, degrees, setting)[:, candidates.degree_index],
        host_bytes=compute_host_bytes(kinds, candidates, setting) if is_limited else None,
        host_kept_bytes=compute_host_activation_bytes(kinds, candidates) if is_limited else None,
    )
    return costs, changes_s


@dataclass(frozen=True, slots=True)
class StageGroup:
    """The `count` stages on GPUs of one model, with `gpus` GPUs each, in a cluster with `node_gpus` GPUs per node."""

    hardware: HardwareProfile
    node_gpus: int
    gpus: int
    count: int

    @property
    def spans_nodes(self) -> bool:
        """Whether some neighboring stages of the group are in different nodes."""
        return bool(self.node_gpus % self.gpus) or self.count * self.gpus > self.node_gpus

    def crosses_nodes(self, cut: int) -> bool:
        """Return whether stage `cut` (of this group, from 0) and the next one are in different nodes."""
        sender, receiver = cut * self.gpus, (cut + 1) * self.gpus
        return bool(self.node_gpus % self.gpus) or sender // self.node_gpus != receiver // self.node_gpus


def compute_hand_over_s(layer: Layer, batch: int, sender: StageGroup, receiver: StageGroup, *, crosses: bool) -> float:
    """Return the time to pass a micro-batch of `batch` samples on, and its gradient back, after `layer`.

    Every GPU sends an equal share of the micro-batch to its counterpart (the scatter of Megatron's scatter-gather,
    SC'21, section 4.1), so the time does not depend on the strategies of either side. Between groups the slower side
    sets the pace. No gradient returns to layers without a backward pass.
    """
    share_bytes = layer.boundary_bytes * batch / min(sender.gpus, receiver.gpus)
    directions = 2 if layer.backward else 1
    return directions * max(_compute_send_s(share_bytes, side, crosses) for side in (sender, receiver))


def compute_hand_over_table_s(
    layers: LayerChain, groups: tuple[StageGroup, ...], batch: int, *, interleave: int = 1
) -> Floats:
    """Return [P-1, G, G, L+1]: hand-over times at cut p, from group to group, if the next stage begins with layer a.

    The time is infinite for a = 0 and a = L.

    An interleaved pipeline has [P, ...]: the last row leads from the last device back to the first. In a mixed pipeline
    the order of stages is open, so a group's hand-overs count as between nodes if any of them can be.
    """
    devices = sum(group.count for group in groups)
    kinds, types = layers.kinds, layers.types[:-1]
    cuts = devices if interleave > 1 else devices - 1
    table = np.full((cuts, len(groups), len(groups), len(layers) + 1), np.inf)
    for (one, sender), (two, receiver) in product(enumerate(groups), repeat=2):
        near_s, far_s = (
            np.array([compute_hand_over_s(kind, batch, sender, receiver, crosses=crosses) for kind in kinds])[types]
            for crosses in (False, True)
        )
        if len(groups) == 1:
            far = [sender.crosses_nodes(cut) if cut < devices - 1 else sender.spans_nodes for cut in range(cuts)]
        else:
            far = [one != two or sender.spans_nodes] * cuts
        table[:, one, two, 1:-1] = np.where(np.array(far, dtype=bool)[:, None], far_s, near_s)
    return table


def _compute_send_s(size_bytes: float, side: StageGroup, crosses: bool) -> float:
    at_once = gcd(side.node_gpus, side.gpus)
    return float(send_s(np.array(size_bytes), np.array(crosses), side.hardware, at_once))


def count_in_flight(schedule: Schedule, *, micro_batches: int, devices: int, position: int) -> float:
    """Return the micro-batches whose activations the device at `position` (from 0) holds at its peak.

    GPipe holds all. Under 1F1B the last device runs its backward pass at once and holds one; each device before it
    holds one more (Narayanan et al., SC'21, section 2.2). Interleaved over v chunks per device, each chunk counts 1/v,
    and the warm-up is (v - 1) x P + 2 (P - position - 1) chunks (same source; in Korthikanti et al., arXiv 2205.05198,
    section 4.2.3, the first stage holds 1 + (P - 1) / (P v) times as much as under 1F1B).
    """
    if schedule.name is ScheduleName.GPIPE:
        return micro_batches
    if schedule.name is ScheduleName.ONE_F_ONE_B:
        return min(micro_batches, devices - position)
    chunks = schedule.interleave
    warm_up = (chunks - 1) * devices + 2 * (devices - position - 1)
    return min(micro_batches * chunks, warm_up + 1) / chunks
