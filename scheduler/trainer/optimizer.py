"""The choice of the optimizer, and the learning rate schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from torch import Tensor, nn
from torch.optim import Optimizer

from scheduler.trainer.layout import Layout
from scheduler.trainer.model import Block
from scheduler.trainer.model_parts import ModelPart
from scheduler.trainer.sharded_optimizers import ShardedAdamW, ShardedMuon, ShardedOptimizer, ShardedSGD

_WEIGHT_DECAY = 0.01


class OptimizerName(StrEnum):
    """The optimizer of a training. MUON updates the matrices of blocks with Muon and all other weights with AdamW."""

    ADAMW = "adamw"
    SGD = "sgd"
    MUON = "muon"


def build_optimizers(
    part: ModelPart,
    layout: Layout,
    *,
    learning_rate: float,
    name: OptimizerName = OptimizerName.ADAMW,
    for_loading: bool = False,
) -> tuple[Optimizer, ...]:
    """Return the optimizers of the part's trainable parameters, or none if all are frozen.

    Args:
        for_loading: create the state now, because it is loaded next.
    """
    by_class: dict[type[ShardedOptimizer], list[Tensor]] = {}
    offloaded: list[Tensor] = []
    for number, layer in part.model.numbered_layers():
        for parameter_name, parameter in layer.named_parameters():
            if parameter.requires_grad:
                by_class.setdefault(_choose_class(name, layer, parameter_name), []).append(parameter)
                offloaded += [parameter] if layout.strategies[number].offload else []
    optimizers = [
        optimizer_class(parameters, lr=learning_rate, weight_decay=_WEIGHT_DECAY, offloaded=offloaded)
        for optimizer_class, parameters in by_class.items()
    ]
    for optimizer in optimizers if for_loading else ():
        optimizer.init_state()
    return tuple(optimizers)


def _choose_class(name: OptimizerName, layer: nn.Module, parameter: str) -> type[ShardedOptimizer]:
    if name is OptimizerName.SGD:
        return ShardedSGD
    is_matrix = parameter.endswith(("project_in.weight", "project_out.weight", "0.weight", "2.weight"))
    is_matrix = is_matrix or parameter.endswith(("experts.up", "experts.down"))
    if name is OptimizerName.MUON and isinstance(layer, Block) and is_matrix:
        return ShardedMuon
    return ShardedAdamW


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
