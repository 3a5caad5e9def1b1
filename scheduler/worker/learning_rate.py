"""The learning rate of each step: a function of the position, so that a resumed training goes on where it was."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum


class BatchRule(StrEnum):
    """How the learning rate follows a changed global batch: in proportion (Goyal et al., arXiv 1706.02677), by its
    square root (Krizhevsky, arXiv 1404.5997), or KEEP: a changed batch is refused."""

    KEEP = "keep"
    LINEAR = "linear"
    SQUARE_ROOT = "sqrt"

    def factor(self, before: int, after: int) -> float:
        """What the learning rate is multiplied by.

        Raises:
            ValueError: the rule is KEEP and the batches differ.
        """
        if before == after:
            return 1.0
        if self is BatchRule.KEEP:
            raise ValueError(
                f"global_batch is {after}, the training's was {before}: "
                "keep it, or say how the learning rate follows (--batch-rule linear or sqrt)"
            )
        ratio = after / before
        return ratio if self is BatchRule.LINEAR else math.sqrt(ratio)


class Decay(StrEnum):
    CONSTANT = "constant"
    COSINE = "cosine"


@dataclass(frozen=True, slots=True)
class LearningRate:
    """Rises in a straight line over `warmup_steps`, then stays, or falls along half a cosine to a tenth of `peak` at
    `steps`."""

    peak: float
    steps: int
    warmup_steps: int = 0
    decay: Decay = Decay.CONSTANT

    def at(self, step: int) -> float:
        """The rate of the step that follows `step` finished ones."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        if self.decay is Decay.CONSTANT:
            return self.peak
        done = min(1.0, (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps))
        return self.peak * (0.1 + 0.45 * (1.0 + math.cos(math.pi * done)))
