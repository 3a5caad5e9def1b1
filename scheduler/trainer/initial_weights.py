"""Initial weights as GPT-2 has them, drawn shard by shard.

A weight depends on the seed, the layer, the parameter's name and its index only. Each rank draws its own shards, so a
model that fits no single rank can start, and every layout starts with the same model.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from scheduler.trainer.counter_random import derive_key, draw_normal
from scheduler.trainer.local_shards import find_local_region, get_local_tensor

_STANDARD_DEVIATION = 0.02
_ELEMENTS_AT_ONCE = 1 << 18
"""Bounds the memory of the drawing: some eight bytes per element."""


@torch.no_grad()
def initialize_layer(layer: nn.Module, *, seed: int, number: int, residual_scale: float) -> None:
    """Fill the parameters of layer `number`, which may be sharded.

    Args:
        residual_scale: factor of the weights whose products are added to the residual stream.
    """
    for name, parameter in layer.named_parameters():
        local = get_local_tensor(parameter)
        if name.endswith("bias"):
            local.zero_()  # before the test of dimensions: stacked biases of experts have two
        elif parameter.dim() == 1:
            local.fill_(1.0)  # scales of norms
        else:
            is_residual = name.endswith(("project_out.weight", "2.weight", "experts.down"))
            deviation = _STANDARD_DEVIATION * (residual_scale if is_residual else 1.0)
            _fill_normal(local, parameter, key=derive_key(seed, number, name), deviation=deviation)


def _fill_normal(local: Tensor, parameter: Tensor, *, key: int, deviation: float) -> None:
    rows, *others = find_local_region(parameter)
    if not local.numel():
        return
    width = parameter.shape[1:].numel()
    columns = torch.zeros(1, dtype=torch.int64)
    for axis, region in enumerate(others, start=1):
        indices = torch.arange(region.start, region.stop) * parameter.shape[axis + 1 :].numel()
        columns = (columns[:, None] + indices).flatten()
    step = max(1, _ELEMENTS_AT_ONCE // len(columns))
    for first in range(rows.start, rows.stop, step):
        block = torch.arange(first, min(first + step, rows.stop))
        # Rounded to float32 first, so that trainings in float32 and float64 start from the same weights.
        values = (draw_normal(key, block[:, None] * width + columns) * deviation).float()
        part = local[first - rows.start : first - rows.start + len(block)]
        part.copy_(values.view(part.shape))
