"""GPT: the small decoder that the reference trainer trains. Pre-norm blocks, learned positions, bytes as tokens.

Its feed-forward part is dense or, where a size has experts, a mixture of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from scheduler.domain.parallel_plan import Recompute
from scheduler.trainer.mixture_of_experts import MixtureOfExperts

AttentionFunction = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Query, key and value, each of shape (samples, heads, tokens, head size), to what each token takes in, so shaped."""


@dataclass(frozen=True, slots=True)
class GptSize:
    """`hidden` must be a multiple of `heads`; `sequence` is the longest input in tokens.

    `experts` are those of each block; 0 is a dense model, which `experts_per_token` does not concern.
    """

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    sequence: int
    experts: int = 0
    experts_per_token: int = 2


SIZES = {
    "nano-gpt": GptSize(layers=2, hidden=32, heads=2, vocabulary=256, sequence=64),
    "tiny-gpt": GptSize(layers=4, hidden=128, heads=4, vocabulary=256, sequence=128),
    "mini-gpt": GptSize(layers=8, hidden=512, heads=8, vocabulary=256, sequence=256),
    "wide-gpt": GptSize(layers=4, hidden=640, heads=8, vocabulary=256, sequence=32),
    "nano-moe": GptSize(layers=2, hidden=32, heads=2, vocabulary=256, sequence=64, experts=4),
    "mini-moe": GptSize(layers=8, hidden=256, heads=8, vocabulary=256, sequence=256, experts=8),
}


def get_model_size(name: str) -> GptSize:
    """
    Raises:
        ValueError: the name is not in `SIZES`.
    """
    if name not in SIZES:
        raise ValueError(f"model is {name!r}, this trainer has {', '.join(SIZES)}")
    return SIZES[name]


class Embedding(nn.Module):
    """Tokens of shape (samples, tokens) to vectors. `places` are the tokens' positions where a rank has not all of them
    in order."""

    def __init__(self, size: GptSize) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.hidden)
        self.positions = nn.Embedding(size.sequence, size.hidden)
        self.token_positions: Tensor | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        places = (
            torch.arange(tokens.shape[1], device=tokens.device)
            if self.token_positions is None
            else self.token_positions
        )
        hidden: Tensor = self.tokens(tokens) + self.positions(places)
        return hidden


class Attention(nn.Module):
    """Causal self-attention over inputs of shape (samples, tokens, hidden)."""

    def __init__(self, size: GptSize) -> None:
        super().__init__()
        self.head_size = size.hidden // size.heads
        self.attend: AttentionFunction = causal_attention
        self.project_in = nn.Linear(size.hidden, 3 * size.hidden)
        self.project_out = nn.Linear(size.hidden, size.hidden)

    def forward(self, inputs: Tensor) -> Tensor:
        projected = self.project_in(inputs)
        samples, tokens, _ = projected.shape
        # Rows of the projection go head by head, each with its query, key and value: a tensor-parallel rank that has
        # some of the rows has whole heads. (samples, tokens, heads x 3 x size) -> 3 x (samples, heads, tokens, size)
        split = projected.view(samples, tokens, -1, 3, self.head_size)
        query, key, value = split.permute(3, 0, 2, 1, 4)
        mixed = self.attend(query, key, value)
        joined: Tensor = self.project_out(mixed.transpose(1, 2).reshape(samples, tokens, -1))
        return joined


class Block(nn.Module):
    """Attention and a feed-forward part, each added to its input; `recompute` says what backward computes again."""

    def __init__(self, size: GptSize) -> None:
        super().__init__()
        self.recompute = Recompute.NONE
        self.attention_norm = nn.LayerNorm(size.hidden)
        self.attention = Attention(size)
        self.feed_forward_norm = nn.LayerNorm(size.hidden)
        self.feed_forward = _build_feed_forward(size)

    def forward(self, inputs: Tensor) -> Tensor:
        return _run_with_recompute(self.recompute is Recompute.FULL, self._forward, inputs)

    def _forward(self, inputs: Tensor) -> Tensor:
        attended = _run_with_recompute(
            self.recompute is Recompute.SELECTIVE, self.attention, self.attention_norm(inputs)
        )
        middle = inputs + attended
        outputs: Tensor = middle + self.feed_forward(self.feed_forward_norm(middle))
        return outputs


class Head(nn.Module):
    """The last vectors to logits of shape (samples, tokens, vocabulary)."""

    def __init__(self, size: GptSize) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size.hidden)
        self.project = nn.Linear(size.hidden, size.vocabulary, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.project(self.norm(hidden))
        return logits


class Gpt(nn.Module):
    """A run of the model's layers: 0 is the embedding, then come the blocks, the head is last.

    Whatever run it is, its parameters have the names that they have in the whole model. `before` maps a layer to what
    is done to its input, which is how a layer gets the part of the batch that it works on.
    """

    def __init__(self, size: GptSize, layers: range | None = None) -> None:
        super().__init__()
        self.layer_range = range(size.layers + 2) if layers is None else layers
        self.input_transforms: dict[int, Callable[[Tensor], Tensor]] = {}
        self.embedding = Embedding(size) if 0 in self.layer_range else None
        self.blocks = nn.ModuleDict({str(k - 1): Block(size) for k in self.layer_range if 1 <= k <= size.layers})
        self.head = Head(size) if size.layers + 1 in self.layer_range else None

    def numbered_layers(self) -> Iterator[tuple[int, nn.Module]]:
        """The layers with their numbers, in order."""
        modules = (self.embedding, *self.blocks.values(), self.head)
        return zip(self.layer_range, (module for module in modules if module is not None), strict=True)

    def forward(self, inputs: Tensor) -> Tensor:
        """Tokens, or the vectors of the layer before, to logits or to the vectors of the layer behind."""
        outputs = inputs
        for number, piece in self.numbered_layers():
            if number in self.input_transforms:
                outputs = self.input_transforms[number](outputs)
            outputs = piece(outputs)
        behind = self.input_transforms.get(self.layer_range.stop)
        return outputs if behind is None else behind(outputs)


def build_gpt(size: GptSize, *, seed: int | None, dtype: torch.dtype, layers: range | None = None) -> Gpt:
    """The model, or a run of its layers. First weights depend on the seed and the layer alone, so that every rank of
    every layout starts with the same; without a seed they are whatever was in memory."""
    with torch.device("meta"):
        model = Gpt(size, layers)
    model.to_empty(device="cpu")
    if seed is not None:
        with torch.random.fork_rng(devices=[]):
            for number, piece in model.numbered_layers():
                torch.manual_seed(seed * 1_000_003 + number)
                _init_weights(piece, residual_scale=(2 * size.layers) ** -0.5)
    return model.to(dtype)


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def _build_feed_forward(size: GptSize) -> nn.Module:
    if size.experts:
        return MixtureOfExperts(hidden=size.hidden, experts=size.experts, experts_per_token=size.experts_per_token)
    return nn.Sequential(nn.Linear(size.hidden, 4 * size.hidden), nn.GELU(), nn.Linear(4 * size.hidden, size.hidden))


def _init_weights(piece: nn.Module, *, residual_scale: float) -> None:
    """GPT-2's: normal, and narrower by `depth` where a branch is added to the residual stream."""
    for name, parameter in piece.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)  # those of experts are stacked, and so have two dimensions
        elif parameter.dim() == 1:
            nn.init.ones_(parameter)  # scales of norms
        else:
            added = name.endswith(("project_out.weight", "2.weight", "experts.down"))
            # Drawn in float32 in either case: then both precisions start from the same weights.
            nn.init.normal_(parameter, std=0.02 * (residual_scale if added else 1.0))


def _run_with_recompute(recompute: bool, compute: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    if not recompute:
        return compute(inputs)
    # There is no dropout, so the second computation needs no random state of the first.
    outputs: Tensor = checkpoint(compute, inputs, use_reentrant=False, preserve_rng_state=False)
    return outputs
