"""The small GPT that the reference trainer trains: pre-norm blocks, learned positions, bytes as tokens.

The feed-forward layer of a block is dense or a mixture of experts.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from scheduler.domain.parallel_plan import Recompute
from scheduler.trainer.dropout import TokenDropout, TokenNumbers
from scheduler.trainer.initial_weights import initialize_layer
from scheduler.trainer.mixture_of_experts import MixtureOfExperts
from scheduler.trainer.precision import autocast_to, round_as_computed

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


class Norm(nn.LayerNorm):
    """Layer norm in the precision of its inputs, with weights of any precision."""

    def forward(self, inputs: Tensor) -> Tensor:
        weight, bias = (round_as_computed(part, inputs.dtype) for part in (self.weight, self.bias))
        return functional.layer_norm(inputs, self.normalized_shape, weight, bias, self.eps)


class Embedding(nn.Module):
    """Embedding of tokens of shape (samples, tokens).

    Attributes:
        token_positions: positions of the tokens, if this rank does not hold all tokens of a sequence in order.
        output_dtype: precision of the residual stream, which begins here.
    """

    def __init__(self, size: GptSize) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.hidden)
        self.positions = nn.Embedding(size.sequence, size.hidden)
        self.token_positions: Tensor | None = None
        self.output_dtype = torch.float32
        self.dropout = TokenDropout()

    def forward(self, tokens: Tensor, token_numbers: Tensor | None = None) -> Tensor:
        positions = self.token_positions
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        parts = self.tokens(tokens), self.positions(positions)
        of_token, of_position = (round_as_computed(part, self.output_dtype) for part in parts)
        return self.dropout(of_token + of_position, token_numbers)


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
    """Attention and feed-forward layer with residual connections.

    Attributes:
        recompute: which activations the backward pass recomputes.
        offloads_inputs: inputs of a fully recomputed block stay in host memory until its backward pass.
        compute: the function of inputs and token numbers that `forward` calls; torch.compile replaces it.
    """

    def __init__(self, size: GptSize) -> None:
        super().__init__()
        self.recompute = Recompute.NONE
        self.offloads_inputs = False
        self.attention_norm = Norm(size.hidden)
        self.attention = Attention(size)
        self.attention_dropout = TokenDropout()
        self.feed_forward_norm = Norm(size.hidden)
        self.feed_forward = _build_feed_forward(size)
        self.feed_forward_dropout = TokenDropout()
        self.compute: Callable[[Tensor, Tensor | None], Tensor] = self.compute_eagerly

    def forward(self, inputs: Tensor, token_numbers: Tensor | None = None) -> Tensor:
        is_recomputed = self.recompute is Recompute.FULL
        if not self.offloads_inputs:
            return _run_with_recompute(is_recomputed, self.compute, inputs, token_numbers)
        # A recomputed block saves nothing but its inputs.
        with save_on_cpu(pin_memory=inputs.is_cuda):
            return _run_with_recompute(is_recomputed, self.compute, inputs, token_numbers)

    def compute_eagerly(self, inputs: Tensor, token_numbers: Tensor | None) -> Tensor:
        attended = _run_with_recompute(
            self.recompute is Recompute.SELECTIVE, self.attention, self.attention_norm(inputs)
        )
        residual = inputs + self.attention_dropout(attended, token_numbers)
        branch = self.feed_forward(self.feed_forward_norm(residual))
        return residual + self.feed_forward_dropout(branch, token_numbers)


class Head(nn.Module):
    """Final norm and projection to logits of shape (samples, tokens, vocabulary), in the precision of the input."""

    def __init__(self, size: GptSize) -> None:
        super().__init__()
        self.norm = Norm(size.hidden)
        self.project = nn.Linear(size.hidden, size.vocabulary, bias=False)

    def forward(self, hidden: Tensor, token_numbers: Tensor | None = None) -> Tensor:
        logits: Tensor = self.project(self.norm(hidden))
        return logits.to(hidden.dtype)


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
        output_cache: stored outputs of frozen layers, or None if all layers are computed. Not used in evaluation mode.
        token_numbers: the tokens of each forward pass in training mode, for dropout; None keeps all activations.
        compute_dtype: precision of matrix products and attention; None means that of the weights.
    """

    def __init__(self, size: GptSize, layers: range | None = None) -> None:
        super().__init__()
        self.layer_range = range(size.layers + 2) if layers is None else layers
        self.input_transforms: dict[int, Callable[[Tensor], Tensor]] = {}
        self.output_cache: OutputCache | None = None
        self.token_numbers: TokenNumbers | None = None
        self.compute_dtype: torch.dtype | None = None
        self.embedding = Embedding(size) if 0 in self.layer_range else None
        self.blocks = nn.ModuleDict({str(k - 1): Block(size) for k in self.layer_range if 1 <= k <= size.layers})
        self.head = Head(size) if size.layers + 1 in self.layer_range else None

    def numbered_layers(self) -> Iterator[tuple[int, nn.Module]]:
        """Return the layers with their numbers, in order."""
        modules = (self.embedding, *self.blocks.values(), self.head)
        return zip(self.layer_range, (module for module in modules if module is not None), strict=True)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map tokens, or the previous layer's activations, to logits or to the input of the next layer."""
        tokens: Mapping[int, Tensor] = {}
        if self.training and self.token_numbers is not None:
            tokens = self.token_numbers.begin_pass()
        with autocast_to(self.compute_dtype, inputs.device):
            return self._compute_layers(inputs, tokens)

    def _compute_layers(self, inputs: Tensor, tokens: Mapping[int, Tensor]) -> Tensor:
        outputs, first = inputs, self.layer_range.start
        cache = self.output_cache if self.training else None
        if cache is not None:
            outputs, first = cache.begin_pass(inputs)
        for number, layer in self.numbered_layers():
            if number < first:
                continue
            if number in self.input_transforms:
                outputs = self.input_transforms[number](outputs)
            outputs = layer(outputs, tokens.get(number))
            if cache is not None:
                cache.store_output(number, outputs)
        output_transform = self.input_transforms.get(self.layer_range.stop)
        return outputs if output_transform is None else output_transform(outputs)


def build_gpt(size: GptSize, *, seed: int | None, dtype: torch.dtype, layers: range | None = None) -> Gpt:
    """Build the model or a range of its layers.

    Initial weights depend only on the seed and the layer, so they are the same in every layout. Without a seed,
    weights are uninitialized memory.
    """
    model = build_meta_gpt(size, dtype=dtype, layers=layers)
    model.to_empty(device="cpu")
    if seed is not None:
        initialize_weights(model, size, seed=seed)
    return model


def build_meta_gpt(size: GptSize, *, dtype: torch.dtype, layers: range | None = None) -> Gpt:
    """Build the model or a range of its layers with parameters that have shapes but no memory."""
    with torch.device("meta"):
        model = Gpt(size, layers).to(dtype)
    if model.embedding is not None:
        model.embedding.output_dtype = dtype
    return model


def compile_blocks(model: Gpt, *, backend: str) -> None:
    """Compile the computation of each block when it first runs.

    Blocks are compiled apart from FSDP and recomputation, which surround them. Exchanges between ranks stay eager.
    """
    # While it compiles, torch reads the gradients of inputs that cannot have one, and warns of that.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    run_eagerly: Callable[..., Any] = torch.compiler.disable
    for block in model.blocks.values():
        assert isinstance(block, Block)
        if block.attention.attend is not causal_attention:
            block.attention.attend = run_eagerly(block.attention.attend)
        if isinstance(block.feed_forward, MixtureOfExperts):
            block.feed_forward.run_rows = run_eagerly(block.feed_forward.run_experts)
        block.compute = torch.compile(block.compute_eagerly, backend=backend)


def initialize_weights(model: Gpt, size: GptSize, *, seed: int) -> None:
    """Fill the parameters, which may be sharded, with the initial weights of this seed."""
    for number, layer in model.numbered_layers():
        initialize_layer(layer, seed=seed, number=number, residual_scale=(2 * size.layers) ** -0.5)


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def _build_feed_forward(size: GptSize) -> nn.Module:
    if size.experts:
        return MixtureOfExperts(hidden=size.hidden, experts=size.experts, experts_per_token=size.experts_per_token)
    return nn.Sequential(nn.Linear(size.hidden, 4 * size.hidden), nn.GELU(), nn.Linear(4 * size.hidden, size.hidden))


def _run_with_recompute(recompute: bool, compute: Callable[..., Tensor], *inputs: Tensor | None) -> Tensor:
    if not recompute:
        return compute(*inputs)
    # Dropout masks are a function of the token numbers, so the recomputation needs no random state.
    outputs: Tensor = checkpoint(compute, *inputs, use_reentrant=False, preserve_rng_state=False)
    return outputs
