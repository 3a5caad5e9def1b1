"""GPT: the small decoder that the reference trainer trains. Pre-norm blocks, learned positions, bytes as tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from scheduler.domain.parallel_plan import Recompute


@dataclass(frozen=True, slots=True)
class GptSize:
    """`hidden` must be a multiple of `heads`; `sequence` is the longest input in tokens."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    sequence: int


SIZES = {
    "nano-gpt": GptSize(layers=2, hidden=32, heads=2, vocabulary=256, sequence=64),
    "tiny-gpt": GptSize(layers=4, hidden=128, heads=4, vocabulary=256, sequence=128),
    "mini-gpt": GptSize(layers=8, hidden=512, heads=8, vocabulary=256, sequence=256),
}


def model_size(name: str) -> GptSize:
    """
    Raises:
        ValueError: the name is not in `SIZES`.
    """
    if name not in SIZES:
        raise ValueError(f"model is {name!r}, this trainer has {', '.join(SIZES)}")
    return SIZES[name]


class Attention(nn.Module):
    """Causal self-attention over inputs of shape (samples, tokens, hidden)."""

    def __init__(self, size: GptSize) -> None:
        super().__init__()
        self.heads = size.heads
        self.project_in = nn.Linear(size.hidden, 3 * size.hidden)
        self.project_out = nn.Linear(size.hidden, size.hidden)

    def forward(self, inputs: Tensor) -> Tensor:
        samples, tokens, hidden = inputs.shape
        # (samples, tokens, 3 x hidden) -> three of (samples, heads, tokens, hidden / heads)
        split = self.project_in(inputs).view(samples, tokens, 3, self.heads, hidden // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        joined: Tensor = self.project_out(mixed.transpose(1, 2).reshape(samples, tokens, hidden))
        return joined


class Block(nn.Module):
    """Attention and a feed-forward part, each added to its input; `recompute` says what backward computes again."""

    def __init__(self, size: GptSize) -> None:
        super().__init__()
        self.recompute = Recompute.NONE
        self.attention_norm = nn.LayerNorm(size.hidden)
        self.attention = Attention(size)
        self.feed_forward_norm = nn.LayerNorm(size.hidden)
        self.feed_forward = nn.Sequential(
            nn.Linear(size.hidden, 4 * size.hidden), nn.GELU(), nn.Linear(4 * size.hidden, size.hidden)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        return _maybe_again(self.recompute is Recompute.FULL, self._forward, inputs)

    def _forward(self, inputs: Tensor) -> Tensor:
        attended = _maybe_again(self.recompute is Recompute.SELECTIVE, self.attention, self.attention_norm(inputs))
        middle = inputs + attended
        outputs: Tensor = middle + self.feed_forward(self.feed_forward_norm(middle))
        return outputs


class Gpt(nn.Module):
    """Byte tokens of shape (samples, tokens) to logits of shape (samples, tokens, vocabulary)."""

    def __init__(self, size: GptSize) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.hidden)
        self.positions = nn.Embedding(size.sequence, size.hidden)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.hidden)
        self.head = nn.Linear(size.hidden, size.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def build_gpt(size: GptSize, *, seed: int, dtype: torch.dtype) -> Gpt:
    """A model whose first weights depend on the seed alone, so that every rank of every layout starts with the same."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # Drawn in float32 in either case: then both precisions start from the same weights.
        model = Gpt(size)
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                depth = (2 * size.layers) ** -0.5 if name.endswith(("project_out.weight", "2.weight")) else 1.0
                nn.init.normal_(parameter, std=0.02 * depth)
    return model.to(dtype)


def _maybe_again(again: bool, compute: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    if not again:
        return compute(inputs)
    # There is no dropout, so the second computation needs no random state of the first.
    outputs: Tensor = checkpoint(compute, inputs, use_reentrant=False, preserve_rng_state=False)
    return outputs
