"""Memory of one layer on one GPU. All results are whole bytes, rounded up, so that sums are exact."""

from __future__ import annotations

from collections.abc import Iterable

from scheduler.domain.parallel_plan import LayerStrategy, Recompute
from scheduler.solver.costs.chain import Layer
from scheduler.solver.costs.setting import Setting

_GATHERED_UNITS = 2
"""FSDP holds the unit that computes and the next one, which it prefetches."""


def state_bytes(layer: Layer, strategy: LayerStrategy, setting: Setting) -> int:
    """Weights, gradients and optimizer state, for the whole of training."""
    shards = strategy.dp if strategy.zero == 3 else 1
    total = layer.parameters * setting.hardware.precision.state_bytes_per_parameter
    return _divide_up(total, strategy.tp * shards)


def kept_bytes(layer: Layer, strategy: LayerStrategy, setting: Setting) -> int:
    """Activations that one micro-batch keeps until its backward pass (Korthikanti et al., arXiv 2205.05198).

    Full recompute keeps the layer's input alone, which each tensor-parallel rank holds whole.
    """
    samples = setting.micro_batch_size // strategy.dp
    attached = _divide_up(layer.attached_bytes, strategy.tp)
    own = layer.boundary_bytes if strategy.recompute is Recompute.FULL else _activation_bytes(layer, strategy.tp)
    return samples * (own + attached)


def working_bytes(layers: Iterable[Layer], strategy: LayerStrategy, setting: Setting) -> int:
    """The buffer that a stage needs beside the above if any of its layers follows `strategy`.

    FSDP gathers two units at a time and holds one unsharded gradient; recompute holds one layer's activations again.
    The buffer is sized for the largest of the model's layers, and a stage needs the largest of its strategies'.
    """
    samples = setting.micro_batch_size // strategy.dp
    largest = 0
    for layer in frozenset(layers):
        size = 0
        if strategy.zero == 3:
            unit = _divide_up(layer.unit_parameters, strategy.tp) * setting.hardware.precision.value_bytes
            size += (_GATHERED_UNITS + 1) * unit
        if strategy.recompute is Recompute.FULL:
            size += samples * _activation_bytes(layer, strategy.tp)
        largest = max(largest, size)
    return largest


def _activation_bytes(layer: Layer, tp: int) -> int:
    return layer.replicated_bytes + _divide_up(layer.activation_bytes, tp)


def _divide_up(total: int, parts: int) -> int:
    return -(-total // parts)
