"""Mixed precision: which numbers are rounded, the same in every layout; and the scale of the loss in float16.

Matrix products and attention run in half precision. Weights are rounded to it before each use; the weights that the
optimizer updates, the residual stream, norms and the loss stay in float32. FSDP gathers rounded weights, which takes
half of the memory and messages. Layers without FSDP round them where they are used.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor

_INITIAL_SCALE = 2.0**16
_GROWTH_INTERVAL = 2000
"""Steps without an overflow after which the scale doubles. Both constants are those of torch.amp.GradScaler."""


def autocast_to(dtype: torch.dtype | None, device: torch.device) -> AbstractContextManager[None]:
    """Return a context in which products run in `dtype`; with None they run in the precision of their operands."""
    return torch.autocast(device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None)


def round_as_computed(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `values` in `dtype`, rounded to the precision of products if autocast is on."""
    if not torch.is_autocast_enabled(values.device.type):
        return values
    return values.to(torch.get_autocast_dtype(values.device.type)).to(dtype)


class LossScaler:
    """Factor of the loss that keeps float16 gradients from rounding to zero (Micikevicius et al., arXiv 1710.03740).

    A step whose gradients overflow is skipped and halves the scale.

    Attributes:
        scale: the factor, a power of two; 1 if scaling is off.
    """

    def __init__(self, *, enabled: bool, device: str) -> None:
        self.is_enabled = enabled
        self.scale = torch.full((), _INITIAL_SCALE if enabled else 1.0, device=device)
        self._good_steps = torch.zeros((), dtype=torch.int64)

    @property
    def state(self) -> dict[str, Tensor]:
        """The tensors to store in a checkpoint; a load fills them in place. Empty if scaling is off."""
        return {"loss_scale": self.scale, "loss_scale_good_steps": self._good_steps} if self.is_enabled else {}

    def update(self, *, overflowed: bool) -> None:
        """Change the scale after a step. All ranks must pass the same."""
        if overflowed:
            self.scale.mul_(0.5)
            self._good_steps.zero_()
            return
        self._good_steps.add_(1)
        if int(self._good_steps) >= _GROWTH_INTERVAL:
            self.scale.mul_(2.0)
            self._good_steps.zero_()
