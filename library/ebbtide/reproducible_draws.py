"""Random draws of training data that depend on the position in the training alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ebbtide.random_state import encode_random_state, mix_seed, seeded_random


class PositionedSampler:
    """A function that draws random training data, called so that its result depends on the global position alone.

    The n-th call on rank r of W draws batch number `base + n x W + r`. Calls while the model is in evaluation mode are
    numbered separately in each step and are the same on all ranks.
    """

    def __init__(self, draw: Callable[..., Any], *, seed: int, rank: int, world_size: int) -> None:
        self._draw = draw
        self._seed, self._rank, self._world_size = seed, rank, world_size
        self._is_checked = False
        self._base = self._calls = self._early_calls = self._evaluations = self._step = 0

    def resume(self, base: int) -> None:
        """Continue after `base` batches of all ranks."""
        self._base = base

    def begin_steps(self) -> None:
        """Note the calls before the first step: their batches belong to steps that follow."""
        self._early_calls = self._calls

    def begin_step(self, step: int) -> None:
        self._step, self._evaluations = step, 0

    @property
    def position(self) -> int:
        """Number of batches that finished steps of all ranks have used."""
        return self._base + (self._calls - self._early_calls) * self._world_size

    def draw(self, *arguments: Any, is_training: bool, **keywords: Any) -> Any:
        if is_training:
            number = self._base + self._calls * self._world_size + self._rank
            self._calls += 1
            seed = mix_seed(self._seed, number)
        else:
            seed = mix_seed(self._seed, -2, self._step, self._evaluations)
            self._evaluations += 1
        with seeded_random(seed):
            if self._is_checked or not is_training:
                return self._draw(*arguments, **keywords)
            self._is_checked = True
            before = encode_random_state()
            drawn = self._draw(*arguments, **keywords)
            if encode_random_state() == before:
                raise ValueError(
                    f"`{getattr(self._draw, '__name__', self._draw)}` has used no global random number of torch, "
                    "Python or NumPy, so its data cannot follow the position in the training. Draw without a "
                    "`torch.Generator` or `numpy.random.default_rng` of your own."
                )
            return drawn


def list_wrapped_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules whose `eval()` means evaluation: wrappers, what they wrap, and members of a container."""
    modules = [model]
    for name in ("module", "_orig_mod"):
        if isinstance(inner := getattr(model, name, None), nn.Module):
            modules += list_wrapped_modules(inner)
    if isinstance(model, nn.ModuleList | nn.ModuleDict):
        for child in model.children():
            modules += list_wrapped_modules(child)
    return modules
