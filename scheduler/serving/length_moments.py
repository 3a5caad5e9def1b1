"""Moments of the work that a request brings to a replica, computed once for all loads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scheduler.serving.replica_model import IterationCosts
from scheduler.serving.request_mix import Floats, RequestMix

GROUPS = 48
"""Groups of requests by output length, and again by prompt length, over which tails are summed."""


@dataclass(frozen=True, slots=True, eq=False)
class LengthMoments:
    """Means over the requests of a mix; a decode step is an iteration in which a request gets an output token.

    Attributes:
        prompt: mean prompt in tokens. `longest`: prompt plus output of the longest request.
        prefill_s, prefill_square_s2: first and second moment of the seconds that a prompt adds to iterations.
        decode_s: seconds that all decode steps of a request add.
        steps: decode steps of a request; `steps_square` their second moment.
        context, context_square: tokens that a running request has cached at a random decode step, and their square.
        prompt_groups, step_groups: (values, shares), each of shape [groups]; the latter only of requests with at least
            one decode step.
    """

    prompt: float
    longest: float
    prefill_s: float
    prefill_square_s2: float
    decode_s: float
    steps: float
    steps_square: float
    context: float
    context_square: float
    prompt_groups: tuple[Floats, Floats]
    step_groups: tuple[Floats, Floats]

    @property
    def work_s(self) -> float:
        """Seconds that a request adds to iterations, apart from their base."""
        return self.prefill_s + self.decode_s

    @property
    def sequence_s(self) -> float:
        """Mean seconds that a running request adds to one iteration."""
        return self.decode_s / self.steps if self.steps else 0.0

    @property
    def context_variance(self) -> float:
        return max(self.context_square - self.context**2, 0.0)


def compute_moments(mix: RequestMix, costs: IterationCosts) -> LengthMoments:
    """Return the moments of a mix under the costs of an iteration.

    Step k of a request reads its prompt and k outputs, so sums over steps are integrals of powers of the context.
    """
    prompts, outputs, shares = mix.columns
    steps = outputs - 1
    prefill_s = costs.prefill_token_s * prompts + costs.attention_pair_s * prompts**2 / 2
    contexts = steps * prompts + steps * (steps + 1) / 2
    squares = steps * prompts**2 + steps**2 * prompts + steps**3 / 3
    all_steps = float(shares @ steps)
    per_step = max(all_steps, 1e-12)
    decodes = steps > 0
    return LengthMoments(
        prompt=float(shares @ prompts),
        longest=float((prompts + outputs).max()),
        prefill_s=float(shares @ prefill_s),
        prefill_square_s2=float(shares @ prefill_s**2),
        decode_s=float(shares @ (costs.decode_sequence_s * steps + costs.kv_token_s * contexts)),
        steps=all_steps,
        steps_square=float(shares @ steps**2),
        context=float(shares @ contexts) / per_step,
        context_square=float(shares @ squares) / per_step,
        prompt_groups=_group(prompts, shares),
        step_groups=_group(steps[decodes], shares[decodes]) if decodes.any() else (np.ones(1), np.ones(1)),
    )


def _group(values: Floats, shares: Floats) -> tuple[Floats, Floats]:
    """Return the mean value and the share of groups of about equal shares, in ascending order of value."""
    order = np.argsort(values, kind="stable")
    values, shares = values[order], shares[order] / shares.sum()
    numbers = np.minimum(((np.cumsum(shares) - shares / 2) * GROUPS).astype(np.int64), GROUPS - 1)
    weights = np.bincount(numbers, weights=shares, minlength=GROUPS).astype(np.float64)
    sums = np.bincount(numbers, weights=shares * values, minlength=GROUPS)
    held = weights > 0
    return sums[held] / weights[held], weights[held]
