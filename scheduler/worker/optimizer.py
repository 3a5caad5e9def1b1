"""AdamW over one part of the model, shard by shard, with its state in host memory where the plan asks for that."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer
from torch.optim.adamw import adamw

from scheduler.worker.layout import Layout
from scheduler.worker.parallel import Part

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.01


class ShardAdamW(AdamW):
    """AdamW whose update runs on each rank's own shards.

    It is element by element, so that shards need to know nothing of each other. On the distributed tensors themselves
    torch would find out anew in each process, operation by operation, that this is so: seconds at each re-plan. The
    moments of `hosted` parameters lie in host memory and visit the device one parameter at a time.
    """

    def __init__(self, parameters: Iterable[Tensor], *, hosted: Iterable[Tensor] = (), **options: Any) -> None:
        super().__init__(parameters, **options)
        self._hosted = {id(parameter) for parameter in hosted}

    @torch.no_grad()
    def make_state(self) -> None:
        """Before the first step, for state that is to be loaded: torch would make a step over zeros to have it."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self._state_of(parameter)
                if id(parameter) in self._hosted:
                    self._move(parameter, torch.device("cpu"))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # nobody needs a closure here
        """One update of all parameters that have a gradient."""
        assert closure is None
        for group in self.param_groups:
            given = [parameter for parameter in group["params"] if parameter.grad is not None]
            self._update([parameter for parameter in given if id(parameter) not in self._hosted], group)
            for parameter in given:
                if id(parameter) in self._hosted:
                    self._move(parameter, parameter.device)
                    self._update([parameter], group)
                    self._move(parameter, torch.device("cpu"))

    def _update(self, parameters: Sequence[Tensor], group: dict[str, Any]) -> None:
        states = [self._state_of(parameter) for parameter in parameters]
        adamw(
            [_local(parameter) for parameter in parameters],
            [_local(parameter.grad) for parameter in parameters if parameter.grad is not None],
            [_local(state["exp_avg"]) for state in states],
            [_local(state["exp_avg_sq"]) for state in states],
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

    def _state_of(self, parameter: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32)
            state["exp_avg"], state["exp_avg_sq"] = _zeros_like(parameter), _zeros_like(parameter)
        return state

    def _move(self, parameter: Tensor, device: torch.device) -> None:
        """The moments; the count of steps is on the host anyway."""
        state = self.state[parameter]
        for name in ("exp_avg", "exp_avg_sq"):
            if name in state:
                state[name] = state[name].to(device)


def build_optimizers(
    part: Part, layout: Layout, *, learning_rate: float, is_blank: bool = False
) -> tuple[Optimizer, ...]:
    """One for all parameters of the part that learn; none where all are frozen. `is_blank`: it will be loaded."""
    learning: list[Tensor] = []
    hosted: list[Tensor] = []
    for number, piece in part.model.pieces():
        parameters = [parameter for parameter in piece.parameters() if parameter.requires_grad]
        learning += parameters
        hosted += parameters if layout.layers[number].offload else []
    options = {"lr": learning_rate, "betas": BETAS, "weight_decay": WEIGHT_DECAY}
    if not learning:
        return ()
    optimizer = ShardAdamW(learning, hosted=hosted, **options)
    if is_blank:
        optimizer.make_state()
    return (optimizer,)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _zeros_like(parameter: Tensor) -> Tensor:
    zeros = torch.zeros_like(_local(parameter))
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
