"""State of models, optimizers and schedulers over several generations of `ebbtide.elastic`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import ebbtide
from ebbtide.checkpoints import CheckpointError
from ebbtide.training_state import ObjectState


class Routed(nn.Module):
    """Two layers, of which `second` has no gradient until step 3, as an expert that gets no sample."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, inputs: torch.Tensor, step: int) -> torch.Tensor:
        hidden: torch.Tensor = self.first(inputs)
        return self.second(hidden) if step >= 3 else hidden


def _train_routed(folder: Path, ends: list[int], optimizer_type: Callable[..., torch.optim.Optimizer]) -> list[float]:
    """Return the losses of a training with one generation for each number of steps in `ends`."""
    losses: list[float] = []
    for end in ends:
        torch.manual_seed(3)
        model = Routed()
        optimizer = optimizer_type(model.parameters())
        with ebbtide.elastic(model, optimizer, folder=folder) as run:
            for step in run.steps(end):
                loss = model(torch.ones(2), step).sub(3.0).pow(2).sum()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(float(loss.detach()))
    return losses


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01),
}


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_parameter_without_a_gradient_so_far_gets_no_optimizer_state(tmp_path: Path, name: str) -> None:
    expected = _train_routed(tmp_path / "whole", [6], OPTIMIZERS[name])
    assert _train_routed(tmp_path / "resized", [1, 2, 4, 6], OPTIMIZERS[name]) == pytest.approx(expected, rel=1e-6)


def test_model_smaller_than_that_of_the_checkpoint_is_refused(tmp_path: Path) -> None:
    def start(layers: int, steps: int) -> None:
        model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers)))
        optimizer = torch.optim.AdamW(model.parameters())
        with ebbtide.elastic(model, optimizer, folder=tmp_path) as run:
            for _ in run.steps(steps):
                model(torch.ones(2)).sum().backward()
                optimizer.step()

    start(4, steps=3)
    with pytest.raises(CheckpointError, match=r"has model\.2\.bias, which this model lacks"):
        start(2, steps=6)
    assert [path.name for path in tmp_path.iterdir()] == ["step-3"]
    start(4, steps=4)


def test_parameter_outside_the_model_is_refused() -> None:
    model, criterion = nn.Linear(2, 2), nn.Linear(2, 1)
    optimizer = torch.optim.AdamW([*model.parameters(), *criterion.parameters()])
    with pytest.raises(ValueError, match=r"`optimizer` has 2 of 4 parameters that `model` lacks"):
        ebbtide.elastic(model, optimizer)
    run = ebbtide.elastic(nn.ModuleList([model, criterion]), optimizer)
    run.finish()


def _sequence(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    parts = [lr_scheduler.LinearLR(optimizer, total_iters=2), lr_scheduler.MultiStepLR(optimizer, [1, 3])]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[2])


def _chain(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.ChainedScheduler([lr_scheduler.LinearLR(optimizer), lr_scheduler.MultiStepLR(optimizer, [2])])


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "ChainedScheduler": _chain,
    "ConstantLR": lambda optimizer: lr_scheduler.ConstantLR(optimizer, total_iters=3),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 5),
    "CosineAnnealingWarmRestarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2),
    "CyclicLR": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=2),
    "ExponentialLR": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
    "LinearLR": lambda optimizer: lr_scheduler.LinearLR(optimizer, total_iters=4),
    "MultiStepLR": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 4]),
    "MultiplicativeLR": lambda optimizer: lr_scheduler.MultiplicativeLR(optimizer, lambda _: 0.9),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=6),
    "PolynomialLR": lambda optimizer: lr_scheduler.PolynomialLR(optimizer, 6),
    "ReduceLROnPlateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
    "SequentialLR": _sequence,
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 2),
}


def test_every_scheduler_of_torch_is_covered() -> None:
    bases = {"LRScheduler", "SWALR"}
    assert {name for name in lr_scheduler.__all__ if name not in bases} == set(SCHEDULERS)


@pytest.mark.parametrize("name", list(SCHEDULERS))
def test_learning_rates_continue_over_three_generations(tmp_path: Path, name: str) -> None:
    def train(folder: Path, ends: list[int]) -> list[float]:
        rates: list[float] = []
        for end in ends:
            model = nn.Linear(1, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
            scheduler = SCHEDULERS[name](optimizer)
            arguments = (1.0,) if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else ()
            with ebbtide.elastic(model, optimizer, scheduler, folder=folder) as run:
                for _ in run.steps(end):
                    rates.append(optimizer.param_groups[0]["lr"])
                    model(torch.ones(1)).backward()
                    optimizer.step()
                    scheduler.step(*arguments)
        return rates

    assert train(tmp_path / "resized", [1, 3, 6]) == pytest.approx(train(tmp_path / "whole", [6]))


def test_state_with_tensors_and_any_keys_is_restored() -> None:
    class Holder:
        def __init__(self, value: float) -> None:
            moments = {0: {"mean": torch.full((2,), value), "is_warm": value > 0}}
            self.state: dict[str, Any] = {"moments": moments, "counts": {3: value}}

        def state_dict(self) -> dict[str, Any]:
            return self.state

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.state = state

    encoded = ObjectState(Holder(2.0)).state_dict()
    assert isinstance(encoded["moments"]["0"]["mean"], torch.Tensor)
    holder = Holder(0.0)
    ObjectState(holder).load_state_dict(encoded)
    assert holder.state["counts"] == {3: 2.0}
    assert holder.state["moments"][0]["is_warm"] is True
    assert holder.state["moments"][0]["mean"].tolist() == [2.0, 2.0]
