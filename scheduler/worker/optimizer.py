"""AdamW over one part of the model, with its state in host memory where the plan asks for that."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from scheduler.worker.layout import Layout
from scheduler.worker.parallel import Part

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.01


def build_optimizers(part: Part, layout: Layout, *, learning_rate: float) -> tuple[Optimizer, ...]:
    """One for all parameters whose state stays on the device, and one for each whose state lies in host memory, so that
    no two such states are on the device at once. Frozen parameters have none."""
    resident: list[Tensor] = []
    hosted: list[Tensor] = []
    for number, piece in part.model.pieces():
        home = hosted if layout.layers[number].offload else resident
        home.extend(parameter for parameter in piece.parameters() if parameter.requires_grad)
    found = [_adamw([parameter], learning_rate) for parameter in hosted]
    for optimizer in found:
        optimizer.register_step_pre_hook(_bring)
        optimizer.register_step_post_hook(_take_away)
    if resident:
        found.append(_adamw(resident, learning_rate))
    return tuple(found)


def _adamw(parameters: list[Tensor], learning_rate: float) -> AdamW:
    # Layers may be spread over different ranks, which the combined (foreach) update does not take.
    return AdamW(parameters, lr=learning_rate, betas=BETAS, weight_decay=WEIGHT_DECAY, foreach=False)


def _bring(optimizer: Optimizer, _given: Any, _named: Any) -> None:
    for parameter, state in optimizer.state.items():
        _move(state, parameter.device)


def _take_away(optimizer: Optimizer, _given: Any, _named: Any) -> None:
    for state in optimizer.state.values():
        _move(state, torch.device("cpu"))


def _move(state: dict[str, Any], device: torch.device) -> None:
    """The moments; the count of steps is a number that AdamW keeps on the host anyway."""
    for name in ("exp_avg", "exp_avg_sq"):
        if name in state:
            state[name] = state[name].to(device)
