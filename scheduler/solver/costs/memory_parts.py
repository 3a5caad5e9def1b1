"""State of layers on one GPU by its purpose, [T, N]: a breakdown of `compute_state_bytes` for people."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scheduler.solver.costs.collectives import StageSetting
from scheduler.solver.costs.layer_chain import Layer, build_layer_table
from scheduler.solver.costs.strategy_space import StrategyCandidates
from scheduler.solver.instance import Floats, Ints


@dataclass(frozen=True, slots=True)
class StateParts:
    """Bytes of the weights as they are computed with, their gradients, and the rest: master weights and moments."""

    parameters: Floats
    gradients: Floats
    optimizer: Floats

    def add(self, other: StateParts) -> StateParts:
        return StateParts(
            self.parameters + other.parameters, self.gradients + other.gradients, self.optimizer + other.optimizer
        )

    def scale(self, factor: Floats) -> StateParts:
        return StateParts(factor * self.parameters, factor * self.gradients, factor * self.optimizer)


def compute_state_parts(kinds: tuple[Layer, ...], candidates: StrategyCandidates, setting: StageSetting) -> StateParts:
    """Return the parts, which add up to `compute_state_bytes` but for its rounding up."""
    table, group = build_layer_table(kinds), candidates.shard_group
    tp, ep = candidates.degrees.tp[candidates.degree_index], candidates.degrees.ep[candidates.degree_index]
    head = table.trained_head_parameters
    always, moments = np.ones_like(head), table.dense_moment_bytes
    dense = _split_parameter(table.trained, moments, candidates, group, setting)
    of_head = _split_parameter(always, moments, candidates, group, setting)
    parts = dense.scale((table.dense_parameters - head) / tp).add(of_head.scale(head / tp))
    shards = np.maximum(group // ep, 1)
    experts = _split_parameter(table.trained, table.expert_moment_bytes, candidates, shards, setting)
    return parts.add(experts.scale(table.expert_parameters / (tp * ep)))


def _split_parameter(
    trained: Floats, moment_bytes: Floats, candidates: StrategyCandidates, group: Ints, setting: StageSetting
) -> StateParts:
    """Return the bytes on a GPU per weight that tensor and expert parallelism leave to it.

    Under ZeRO-3 the fp32 master weight is the weight itself, unless it is on the host.
    """
    precision, zero = setting.hardware.precision, candidates.zero
    on_gpu, is_trained = 1 - candidates.streamed, np.where(trained, 1.0, 0.0)
    is_fsdp = np.where((zero == 3) & (candidates.offload == 0), is_trained, 0.0) > 0
    sharded_weight = (precision.fsdp_bytes - precision.gradient_bytes) / group
    weight = np.where(zero == 3, precision.value_bytes / group, precision.value_bytes)
    gradient = precision.gradient_bytes / np.where(zero >= 2, group, 1)
    states = np.where(is_fsdp, moment_bytes, precision.master_bytes + moment_bytes)
    states = np.where(candidates.offload == 1, 0.0, states) / np.where(zero >= 1, group, 1)
    return StateParts(
        np.asarray(on_gpu * np.where(is_fsdp, sharded_weight, weight)),
        np.asarray(on_gpu * is_trained * gradient),
        np.asarray(on_gpu * is_trained * states),
    )
