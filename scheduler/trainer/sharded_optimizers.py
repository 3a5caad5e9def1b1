"""Optimizers that update each rank's own shards.

On distributed tensors torch would plan each operation anew in each process, which takes seconds per replan.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from scheduler.trainer.local_shards import find_local_region, get_local_tensor, wrap_like

_BETAS = (0.9, 0.95)
_EPSILON = 1e-8
_FUSED_DEVICE = "cuda"
_SGD_MOMENTUM = 0.9
_MUON_MOMENTUM = 0.95
_MUON_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_MUON_ITERATIONS = 5
_MUON_RMS = 0.2


class ShardedOptimizer(Optimizer):
    """Optimizer over this rank's shards. The state of `offloaded` parameters stays in host memory.

    It moves to the device one parameter at a time.

    Attributes:
        state_names: tensors of the state that have the shape of their parameter.
        counts_steps: whether the state has a step count.
    """

    state_names: ClassVar[tuple[str, ...]]
    counts_steps: ClassVar[bool] = False

    def __init__(
        self, parameters: Iterable[Tensor], *, lr: float, weight_decay: float, offloaded: Iterable[Tensor] = ()
    ) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})
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
                    self._move_state(parameter, torch.device("cpu"))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # closures are not supported
        """Update all parameters that have a gradient. Collective if parameters are distributed."""
        assert closure is None
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            self._update([each for each in parameters if id(each) not in self._offloaded], group)
            for parameter in parameters:
                if id(parameter) in self._offloaded:
                    self._move_state(parameter, parameter.device)
                    self._update([parameter], group)
                    self._move_state(parameter, torch.device("cpu"))

    def _update(self, parameters: Sequence[Tensor], group: dict[str, Any]) -> None:
        raise NotImplementedError

    def _get_or_create_state(self, parameter: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            if self.counts_steps:
                state["step"] = torch.tensor(0.0, dtype=torch.float32)
            for name in self.state_names:
                # Wrapping moves a part to the device of its mesh. Streamed parameters are on the host.
                state[name] = wrap_like(torch.zeros_like(get_local_tensor(parameter)), parameter).to(parameter.device)
        return state

    def _move_state(self, parameter: Tensor, device: torch.device) -> None:
        """Move the state. The step count is always on the host."""
        state = self.state[parameter]
        for name in self.state_names:
            if name in state:
                state[name] = state[name].to(device)

    def _local_state(self, parameters: Sequence[Tensor], name: str) -> list[Tensor]:
        return [get_local_tensor(self._get_or_create_state(parameter)[name]) for parameter in parameters]


class ShardedAdamW(ShardedOptimizer):
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101)."""

    state_names = ("exp_avg", "exp_avg_sq")
    counts_steps = True

    def _update(self, parameters: Sequence[Tensor], group: dict[str, Any]) -> None:
        """Update the parameters. On CUDA one kernel does it, in 28 bytes of traffic per fp32 weight and no copies."""
        if not parameters:
            return
        counts = [self._get_or_create_state(parameter)["step"] for parameter in parameters]
        device = parameters[0].device
        is_fused = device.type == _FUSED_DEVICE
        steps = list(torch.stack(counts).to(device).unbind()) if is_fused else counts
        adamw(
            [get_local_tensor(parameter) for parameter in parameters],
            _local_gradients(parameters),
            self._local_state(parameters, "exp_avg"),
            self._local_state(parameters, "exp_avg_sq"),
            [],
            steps,
            fused=is_fused,
            amsgrad=False,
            beta1=_BETAS[0],
            beta2=_BETAS[1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=_EPSILON,
            maximize=False,
        )
        if is_fused:
            for count in counts:
                count.add_(1)


class ShardedSGD(ShardedOptimizer):
    """Stochastic gradient descent with momentum."""

    state_names = ("momentum_buffer",)

    def _update(self, parameters: Sequence[Tensor], group: dict[str, Any]) -> None:
        buffers: list[Tensor | None] = [*self._local_state(parameters, "momentum_buffer")]
        sgd(
            [get_local_tensor(parameter) for parameter in parameters],
            _local_gradients(parameters),
            buffers,
            weight_decay=group["weight_decay"],
            momentum=_SGD_MOMENTUM,
            lr=group["lr"],
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )


class ShardedMuon(ShardedOptimizer):
    """Muon (Jordan et al., 2024): the momentum of each matrix, orthogonalized, is its update.

    The step is scaled to the size of AdamW's, so that both take the same learning rate (Liu et al., arXiv 2502.16982,
    section 2.2). Orthogonalizing needs the whole matrix, so each rank gathers one matrix at a time. A stack of experts
    is a stack of matrices. Unlike torch.optim.Muon, the iteration runs in the weights' precision and takes shards.
    """

    state_names = ("momentum_buffer",)

    def _update(self, parameters: Sequence[Tensor], group: dict[str, Any]) -> None:
        gradients, buffers = _local_gradients(parameters), self._local_state(parameters, "momentum_buffer")
        for parameter, gradient, buffer in zip(parameters, gradients, buffers, strict=True):
            buffer.mul_(_MUON_MOMENTUM).add_(gradient)
            direction = wrap_like(gradient.add(buffer, alpha=_MUON_MOMENTUM), parameter)
            whole = direction.full_tensor() if isinstance(direction, DTensor) else direction
            update = orthogonalize(whole)[find_local_region(parameter)]
            rate = group["lr"] * _MUON_RMS * math.sqrt(max(parameter.shape[-2:]))
            local = get_local_tensor(parameter)
            local.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update.to(local.device), alpha=rate)


def orthogonalize(matrices: Tensor) -> Tensor:
    """Return nearly orthogonal matrices with the singular vectors of `matrices`, of shape (..., rows, columns).

    Five Newton-Schulz iterations take each singular value to between about 0.7 and 1.2.
    """
    a, b, c = _MUON_COEFFICIENTS
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    values: Tensor = matrices.mT if is_tall else matrices
    values = values / values.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(_MUON_ITERATIONS):
        gram = values @ values.mT
        values = a * values + (b * gram + c * gram @ gram) @ values
    return values.mT if is_tall else values


def _local_gradients(parameters: Sequence[Tensor]) -> list[Tensor]:
    return [get_local_tensor(parameter.grad) for parameter in parameters if parameter.grad is not None]
