"""Dropout whose masks are the same under every layout.

Whether an element is kept depends on the seed, the place in the model, the token and the element's index. Tokens are
numbered over the whole training: `sample x sequence + position`. Ranks that hold copies of a token drop the same
elements, ranks with other tokens drop others, recomputation needs no random state, and a resize changes no mask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from scheduler.trainer.activation_sharding import TokenSharding
from scheduler.trainer.counter_random import draw_mask
from scheduler.trainer.layout import Layout


class TokenDropout:
    """Dropout of activations of shape (samples, tokens, hidden). Kept elements are scaled up by `1 / (1 - p)`."""

    def __init__(self, probability: float = 0.0, key: int = 0) -> None:
        self.probability = probability
        # torch.compile makes a graph for each value of an integer, so keys in tensors let all blocks share one.
        self._key = torch.tensor(key, dtype=torch.int64, device="cpu")

    def __call__(self, values: Tensor, token_numbers: Tensor | None) -> Tensor:
        """Drop elements.

        Args:
            token_numbers: numbers of the tokens, of shape (samples, tokens). None keeps all elements.
        """
        if self.probability == 0.0 or token_numbers is None:
            return values
        hidden = values.shape[-1]
        counters = token_numbers.unsqueeze(-1) * hidden + torch.arange(hidden, device=values.device)
        kept = draw_mask(self._key, counters, probability=1.0 - self.probability)
        return values * kept / (1.0 - self.probability)


class TokenNumbers(Protocol):
    """The tokens of each forward pass of a model part."""

    def begin_pass(self) -> Mapping[int, Tensor]:
        """Return the numbers of the tokens that this rank has in each layer in the next forward pass."""


class MicroBatchTokens:
    """The tokens of a step's micro-batches, which run through a model part one after the other."""

    def __init__(
        self,
        layers: range,
        layout: Layout,
        shardings: Sequence[TokenSharding],
        *,
        rank: int,
        sequence: int,
        device: str,
    ) -> None:
        """Prepare the numbers within a micro-batch.

        Args:
            rank: this rank's number in its pipeline group.
            sequence: tokens of a sample.
        """
        by_sharding = {
            id(sharding): sharding.token_indices[rank].view(sharding.shape(rank)).to(device)
            for sharding in (shardings[layer] for layer in layers)
        }
        self._in_micro_batch = {layer: by_sharding[id(shardings[layer])] for layer in layers}
        self._tokens_per_pass = layout.micro_batch_size * sequence
        self._sequence = sequence
        self._next_token = 0

    def begin_step(self, first_sample: int) -> None:
        """Begin the step of the samples from `first_sample` on."""
        self._next_token = first_sample * self._sequence

    def begin_pass(self) -> Mapping[int, Tensor]:
        first, self._next_token = self._next_token, self._next_token + self._tokens_per_pass
        shifted = {id(numbers): numbers + first for numbers in self._in_micro_batch.values()}
        return {layer: shifted[id(numbers)] for layer, numbers in self._in_micro_batch.items()}


class SequenceTokens:
    """The tokens of one sequence, the same in every layer."""

    def __init__(self, layers: range, numbers: Tensor) -> None:
        """Use `numbers`, 1-D, for the only sample of each forward pass."""
        self._numbers = dict.fromkeys(layers, numbers.unsqueeze(0))

    def begin_pass(self) -> Mapping[int, Tensor]:
        return self._numbers
