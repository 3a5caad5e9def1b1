"""Numbers of a Lightning Trainer that count micro-batches.

A step takes more micro-batches on fewer ranks. So these numbers follow, and mean the same steps in each generation.
"""

from __future__ import annotations

from math import gcd
from typing import Any


def scale_counts(trainer: Any, *, steps_per_epoch: int, asked: int, passes: int) -> None:
    """Express `limit_train_batches`, `val_check_interval` and frequencies of schedulers in the present micro-batches.

    A limit that ends within a step is extended to the end of the step, and a fraction is rounded down to whole steps.

    Args:
        steps_per_epoch: steps of the whole training data.
        asked: micro-batches per step that the script asks for, `accumulate_grad_batches`.
        passes: micro-batches per step on the present ranks.

    Raises:
        ValueError: the script validates within a step.
    """
    limit = trainer.limit_train_batches
    if isinstance(limit, int):
        trainer.limit_train_batches = -(-limit // asked) * passes
        steps_per_epoch = min(steps_per_epoch, -(-limit // asked))
    elif limit < 1.0:
        steps_per_epoch = _take_fraction(steps_per_epoch, limit)
        trainer.limit_train_batches = steps_per_epoch * passes
    _scale_validation(trainer, steps_per_epoch=steps_per_epoch, asked=asked, passes=passes)
    for config in trainer.lr_scheduler_configs:
        if config.interval == "step":
            # Lightning advances a scheduler at the ends of steps at which the micro-batches are a multiple of this.
            config.frequency = config.frequency // gcd(config.frequency, asked) * passes


def _scale_validation(trainer: Any, *, steps_per_epoch: int, asked: int, passes: int) -> None:
    interval = trainer.val_check_interval
    if isinstance(interval, int):
        if interval % asked:
            raise ValueError(
                f"`val_check_interval` is {interval}, but a step takes `accumulate_grad_batches`={asked} batches. "
                f"Set it to a multiple of {asked}, because a resize changes the batches per step."
            )
        trainer.val_check_interval = interval // asked * passes
    elif isinstance(interval, float) and interval < 1.0:
        trainer.val_check_interval = _take_fraction(steps_per_epoch, interval) * passes


def _take_fraction(steps: int, fraction: float) -> int:
    return max(1, int(steps * fraction))
