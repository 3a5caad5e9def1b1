"""The small GPT that the reference trainer trains: pre-norm blocks, learned positions, bytes as tokens.

The feed-forward layer of a block is dense or a mixture of experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from scheduler.domain.parallel_plan import Recompute
from scheduler.trainer.mixture_of_experts import MixtureOfExperts

# Maps query, key and value to the attention output, all of shape (samples, heads, tokens, head size).
AttentionFunction = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class GptSize:
    """Dimensions of a GPT.

    Attributes:
        hidden: must be a multiple of `heads`.
        sequence: maximum input length in tokens.
        experts: number of experts per block; 0 for a dense model, which ignores `experts_per_token`.
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
    """Return the size with this name.

    Raises:
        ValueError: the name is not in `SIZES`.
    """
    if name not in SIZES:
        raise ValueError(f"`--model` is {name!r}. Accepted values: {', '.join(SIZES)}.")
    return SIZES[name]


class Embedding(nn.Module):
    """Embedding of tokens of shape (samples, tokens).

    Attributes:
        token_positions: positions of the tokens, if this rank does not hold all tokens of a sequence in order.
    """

    def __init__(self, size: GptSize) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.hidden)
        self.positions = nn.Embedding(size.sequence, size.hidden)
        self.token_positions: Tensor | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        positions = self.token_positions
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden: Tensor = self.tokens(tokens) + self.positions(positions)
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
        # The rows of the projection are ordered by head, each with its query, key and value, so that a tensor-parallel
        # rank has whole heads. (samples, tokens, heads x 3 x size) -> 3 x (samples, heads, tokens, size)
        heads = projected.view(samples, tokens, -1, 3, self.head_size)
        query, key, value = heads.permute(3, 0, 2, 1, 4)
        attended = self.attend(query, key, value)
        outputs: Tensor = self.project_out(attended.transpose(1, 2).reshape(samples, tokens, -1))
        return outputs


class Block(nn.Module):
    """Attention and feed-forward layer with residual connections. `recompute` selects activation recomputation."""

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
        residual = inputs + attended
        outputs: Tensor = residual + self.feed_forward(self.feed_forward_norm(residual))
        return outputs


class Head(nn.Module):
    """Final norm and projection to logits of shape (samples, tokens, vocabulary)."""

    def __init__(self, size: GptSize) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size.hidden)
        self.project = nn.Linear(size.hidden, size.vocabulary, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.project(self.norm(hidden))
        return logits


class OutputCache(Protocol):
    """The stored outputs of frozen layers, as a forward pass uses them."""

    def begin_pass(self, inputs: Tensor) -> tuple[Tensor, int]:
        """Return the input of a layer, and the number of this layer, with which the pass begins."""

    def store_output(self, layer: int, output: Tensor) -> None:
        """Store the output of `layer` if it is to be kept."""


class Gpt(nn.Module):
    """A contiguous range of the model's layers: layer 0 is the embedding, then come the blocks; the head is last.

    Parameters have the same names as in the whole model.

    Attributes:
        input_transforms: functions applied to the input of a layer, by layer number. They redistribute activations.
        output_cache: stored outputs of frozen layers, or None if all layers are computed.
    """

    def __init__(self, size: GptSize, layers: range | None = None) -> None:
        super().__init__()
        self.layer_range = range(size.layers + 2) if layers is None else layers
        self.input_transforms: dict[int, Callable[[Tensor], Tensor]] = {}
        self.output_cache: OutputCache | None = None
        self.embedding = Embedding(size) if 0 in self.layer_range else None
        self.blocks = nn.ModuleDict({str(k - 1): Block(size) for k in self.layer_range if 1 <= k <= size.layers})
        self.head = Head(size) if size.layers + 1 in self.layer_range else None

    def numbered_layers(self) -> Iterator[tuple[int, nn.Module]]:
        """Return the layers with their numbers, in order."""
        modules = (self.embedding, *self.blocks.values(), self.head)
        return zip(self.layer_range, (module for module in modules if module is not None), strict=True)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map tokens, or the previous layer's activations, to logits or to the input of the next layer."""
        cache, outputs, first = self.output_cache, inputs, self.layer_range.start
        if cache is not None:
            outputs, first = cache.begin_pass(inputs)
        for number, layer in self.numbered_layers():
            if number < first:
                continue
            if number in self.input_transforms:
                outputs = self.input_transforms[number](outputs)
            outputs = layer(outputs)
            if cache is not None:
                cache.store_output(number, outputs)
        output_transform = self.input_transforms.get(self.layer_range.stop)
        return outputs if output_transform is None else output_transform(outputs)


def build_gpt(size: GptSize, *, seed: int | None, dtype: torch.dtype, layers: range | None = None) -> Gpt:
    """Build the model or a range of its layers.

    Initial weights depend only on the seed and the layer, so they are the same in every layout. Without a seed,
    weights are uninitialized memory.
    """
    with torch.device("meta"):
        model = Gpt(size, layers)
    model.to_empty(device="cpu")
    if seed is not None:
        with torch.random.fork_rng(devices=[]):
            for number, layer in model.numbered_layers():
                torch.manual_seed(seed * 1_000_003 + number)
                _init_weights(layer, residual_scale=(2 * size.layers) ** -0.5)
    return model.to(dtype)


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def _build_feed_forward(size: GptSize) -> nn.Module:
    if size.experts:
        return MixtureOfExperts(hidden=size.hidden, experts=size.experts, experts_per_token=size.experts_per_token)
    return nn.Sequential(nn.Linear(size.hidden, 4 * size.hidden), nn.GELU(), nn.Linear(4 * size.hidden, size.hidden))


def _init_weights(layer: nn.Module, *, residual_scale: float) -> None:
    """Initialize as GPT-2: normal, scaled down where a branch is added to the residual stream."""
    for name, parameter in layer.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)  # before the test of dimensions: stacked biases of experts have two
        elif parameter.dim() == 1:
            nn.init.ones_(parameter)  # scales of norms
        else:
            is_residual = name.endswith(("project_out.weight", "2.weight", "experts.down"))
            # Parameters are float32 here, so that both dtypes start from the same weights.
            nn.init.normal_(parameter, std=0.02 * (residual_scale if is_residual else 1.0))


def _run_with_recompute(recompute: bool, compute: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    if not recompute:
        return compute(inputs)
    # The model has no dropout, so the recomputation needs no random state.
    outputs: Tensor = checkpoint(compute, inputs, use_reentrant=False, preserve_rng_state=False)
    return outputs
