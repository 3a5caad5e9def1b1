"""The optimizer and the learning rate schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer
from torch.optim.adamw import adamw

from scheduler.trainer.layout import Layout
from scheduler.trainer.model_parts import ModelPart

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.01


class ShardedAdamW(AdamW):
    """AdamW that updates each rank's own shards.

    The update is elementwise, so shards are independent. On distributed tensors torch would find this out for each
    operation in each new process, which takes seconds per replan. The moments of `offloaded` parameters stay in host
    memory and move to the device one parameter at a time.
    """

    def __init__(self, parameters: Iterable[Tensor], *, offloaded: Iterable[Tensor] = (), **options: Any) -> None:
        super().__init__(parameters, **options)
        self._offloaded = {id(parameter) for parameter in offloaded}

    @torch.no_grad()
    def init_state(self) -> None:
        """Create the state before the first step, so that it can be loaded.

        torch would run a step over zero gradients for it.
        """
        for group in self.param_groups:
            for parameter in group["params"]:
                self._get_or_create_state(parameter)
                if id(parameter) in self._offloaded:
                    self._move_moments(parameter, torch.device("cpu"))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # closures are not supported
        """Update all parameters that have a gradient."""
        assert closure is None
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            self._update_parameters([each for each in parameters if id(each) not in self._offloaded], group)
            for parameter in parameters:
                if id(parameter) in self._offloaded:
                    self._move_moments(parameter, parameter.device)
                    self._update_parameters([parameter], group)
                    self._move_moments(parameter, torch.device("cpu"))

    def _update_parameters(self, parameters: Sequence[Tensor], group: dict[str, Any]) -> None:
        states = [self._get_or_create_state(parameter) for parameter in parameters]
        adamw(
            [_local_tensor(parameter) for parameter in parameters],
            [_local_tensor(parameter.grad) for parameter in parameters if parameter.grad is not None],
            [_local_tensor(state["exp_avg"]) for state in states],
            [_local_tensor(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _get_or_create_state(self, parameter: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32)
            state["exp_avg"], state["exp_avg_sq"] = _zeros_like(parameter), _zeros_like(parameter)
        return state

    def _move_moments(self, parameter: Tensor, device: torch.device) -> None:
        """Move the moments. The step count is always on the host."""
        state = self.state[parameter]
        for name in ("exp_avg", "exp_avg_sq"):
            if name in state:
                state[name] = state[name].to(device)


def build_optimizers(
    part: ModelPart, layout: Layout, *, learning_rate: float, for_loading: bool = False
) -> tuple[Optimizer, ...]:
    """Return one optimizer for the trainable parameters of the part, or none if all are frozen.

    Args:
        for_loading: create the state now, because it is loaded next.
    """
    trainable: list[Tensor] = []
    offloaded: list[Tensor] = []
    for number, layer in part.model.numbered_layers():
        parameters = [parameter for parameter in layer.parameters() if parameter.requires_grad]
        trainable += parameters
        offloaded += parameters if layout.strategies[number].offload else []
    if not trainable:
        return ()
    optimizer = ShardedAdamW(trainable, offloaded=offloaded, lr=learning_rate, betas=BETAS, weight_decay=WEIGHT_DECAY)
    if for_loading:
        optimizer.init_state()
    return (optimizer,)


def _local_tensor(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _zeros_like(parameter: Tensor) -> Tensor:
    zeros = torch.zeros_like(_local_tensor(parameter))
    if not isinstance(parameter, DTensor):
        return zeros
    return DTensor.from_local(
        zeros,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


class BatchScalingRule(StrEnum):
    """How the learning rate follows a changed global batch.

    LINEAR scales it in proportion (Goyal et al., arXiv 1706.02677), SQUARE_ROOT by the square root (Krizhevsky,
    arXiv 1404.5997). KEEP rejects a changed batch.
    """

    KEEP = "keep"
    LINEAR = "linear"
    SQUARE_ROOT = "sqrt"

    def compute_factor(self, old_batch: int, new_batch: int) -> float:
        """Return the factor of the learning rate.

        Raises:
            ValueError: the rule is KEEP and the batches differ.
        """
        if old_batch == new_batch:
            return 1.0
        if self is BatchScalingRule.KEEP:
            raise ValueError(
                f"The global batch is {new_batch}, but the training had {old_batch}. "
                "Keep it, or set `--batch-rule` to linear or sqrt to scale the learning rate."
            )
        ratio = new_batch / old_batch
        return ratio if self is BatchScalingRule.LINEAR else math.sqrt(ratio)


class LearningRateDecay(StrEnum):
    CONSTANT = "constant"
    COSINE = "cosine"


@dataclass(frozen=True, slots=True)
class LearningRateSchedule:
    """Learning rate per step, a function of the position, so that a resumed training continues unchanged.

    It rises linearly over `warmup_steps`. Then it stays constant, or falls along half a cosine to a tenth of `peak`
    at step `steps`.
    """

    peak: float
    steps: int
    warmup_steps: int = 0
    decay: LearningRateDecay = LearningRateDecay.CONSTANT

    def rate_at(self, step: int) -> float:
        """Return the learning rate of the step after `step` completed steps."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        if self.decay is LearningRateDecay.CONSTANT:
            return self.peak
        done = min(1.0, (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps))
        return self.peak * (0.1 + 0.45 * (1.0 + math.cos(math.pi * done)))
